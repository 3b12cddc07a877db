"""The administrator's page by keyboard alone, in a real browser, against a broker that listens."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from jupyter_gpushare.protocol.helper import UnleasedProcess
from tests.broker import pages
from tests.broker.http_site import PREFIX, Http
from tests.broker.pages import HUB_STATIC, WIDTHS
from tests.ui.pages import TOO_WIDE, accessible, picture
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

# What can be reached with Tab, in the order of the page; radio buttons of a name are one.
REACHABLE = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary')]
    .filter(node => node.type !== 'hidden' && node.tabIndex >= 0 && node.checkVisibility())
    .map(node => node.outerHTML)"""
# The element with the focus; empty where it is none of the page's, or where it cannot be seen.
FOCUSED = """() => {
    const node = document.activeElement;
    const style = getComputedStyle(node);
    const seen = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    return node === document.body || !seen ? '' : node.outerHTML;
}"""

LONG = pytest.mark.long
browser, http = pages.module_browser, pages.module_http


@pytest_asyncio.fixture(loop_scope="module")
async def page(http: Http, browser: Browser) -> AsyncIterator[Page]:
    """The page of the administrator; ada has a session, and a job of bo waits."""
    await http.broker.loop.observer.measure()  # a sample may be old by now on a busy machine
    await http.session()
    await http.broker.loop.observer.measure()
    await http.submit("bo", name="whole", gpus="2")

    async def of_the_hub(route, request):
        name = request.url.partition("/hub/")[2].partition("?")[0].removeprefix("static/")
        await route.fulfill(path=HUB_STATIC / name.replace("logo", "images/jupyterhub-80.png"))

    async with await browser.new_page(extra_http_headers={"Authorization": "token root"}) as page:
        page.set_default_timeout(1000 * PATIENCE_S)
        expect.set_options(timeout=1000 * PATIENCE_S)
        await page.route("**/hub/**", of_the_hub)
        await page.goto(f"{http.url}{PREFIX}")
        yield page


async def walk(page: Page, target: Locator, key: str = "Tab") -> None:
    """Press Tab until ``target`` has the focus; wherever it is meanwhile, it can be seen."""
    await expect(target).to_be_visible()
    for _ in range(120):
        await page.keyboard.press(key)
        assert await page.evaluate(FOCUSED), await page.evaluate("document.activeElement.outerHTML")
        if await target.evaluate("node => node === document.activeElement"):
            return
    raise AssertionError(f"{key} does not lead to {target}")


async def enter(page: Page, target: Locator) -> None:
    """Go to a link or button, and press it."""
    await walk(page, target)
    await page.keyboard.press("Enter")


async def focused(page: Page, target: Locator) -> None:
    """Wait until ``target`` has the focus, and fail where that cannot be seen."""
    await expect(target).to_be_focused()
    assert await page.evaluate(FOCUSED)


async def test_everything_on_the_page_is_reached_in_its_order_and_left_again(page: Page) -> None:
    reachable = await page.evaluate(REACHABLE)
    seen = []
    for _ in reachable:
        await page.keyboard.press("Tab")
        seen.append(await page.evaluate(FOCUSED))
    assert seen == reachable
    assert any("Act on ada" in each for each in seen)
    await page.keyboard.press("Tab")
    assert await page.evaluate(FOCUSED) == "", "the focus leaves the page after its last link"
    for each in reversed(reachable):
        await page.keyboard.press("Shift+Tab")
        assert await page.evaluate(FOCUSED) == each


async def test_a_session_is_lent_and_stopped_and_the_focus_comes_back(http: Http, page: Page) -> None:
    registry = http.broker.registry
    (ada,) = [each for each in registry.leases.values() if each.lease.user == "ada"]
    act, panel = page.locator(f"#sessions-{ada.id}"), page.get_by_role("region", name="Act")
    await enter(page, act)
    await focused(page, panel)
    await enter(page, panel.get_by_role("link", name="Close"))
    await focused(page, act)
    await expect(panel).to_have_count(0)
    await page.keyboard.press("Enter")
    await focused(page, panel)
    await enter(page, panel.get_by_role("button", name="Lend it now"))
    await focused(page, act)
    assert registry.leases[ada.id].lease.lend_now
    # A stop needs a tick: the browser goes to the box where there is none.
    await page.keyboard.press("Enter")
    tick = panel.get_by_role("checkbox")
    await enter(page, panel.get_by_role("button", name="Stop"))
    await focused(page, tick)
    assert "stop_server" not in http.site.effects
    await page.keyboard.press("Space")
    await enter(page, panel.get_by_role("button", name="Stop"))
    await focused(page, page.get_by_role("heading", name="Sessions and running jobs"))
    assert "stop_server" in http.site.effects
    said = [entry.sentence for entry in registry.decisions.latest if entry.action == "admin"]
    assert said == [
        "root asked to lend the GPU of ada's session (1/2 GPU).",
        "root asked to stop ada's session (1/2 GPU).",
    ]


@pytest.mark.long
async def test_a_job_is_raised_and_stopped_and_a_refusal_has_the_focus(http: Http, page: Page) -> None:
    registry = http.broker.registry
    (job,) = registry.jobs.values()
    act, panel = page.locator(f"#jobs-j{job.id}"), page.get_by_role("region", name="Act")
    await enter(page, act)
    priority = panel.get_by_label("Priority within its project")
    await walk(page, priority)
    await page.keyboard.type("101")
    await page.keyboard.press("Enter")
    refused = panel.get_by_role("alert")
    await focused(page, refused)
    await expect(refused).to_contain_text("Nothing was changed: ")
    await walk(page, priority)
    await page.keyboard.type("20")
    await page.keyboard.press("Enter")
    await focused(page, act)
    assert registry.leases[job.lease_id].lease.priority == 20
    await page.keyboard.press("Enter")
    await walk(page, panel.get_by_role("checkbox"))
    await page.keyboard.press("Space")
    await enter(page, panel.get_by_role("button", name="Stop"))
    await focused(page, page.get_by_role("heading", name="Jobs", exact=True))
    assert registry.jobs[job.id].result == "cancelled"


async def test_a_projects_quota_is_changed_and_what_was_typed_outlives_a_refusal(
    http: Http, page: Page
) -> None:
    change = page.get_by_role("link", name="Change project vision")
    panel = page.get_by_role("form", name="Project vision")
    await enter(page, change)
    await focused(page, panel)
    await enter(page, panel.get_by_role("link", name="Cancel"))
    await focused(page, change)
    await page.keyboard.press("Enter")
    quota = panel.get_by_label("guaranteed GPUs")
    await walk(page, quota)
    await page.keyboard.press("Control+A")
    await page.keyboard.type("1.5")
    await page.keyboard.press("Enter")
    await focused(page, panel.get_by_role("alert"))
    await expect(panel.get_by_role("alert")).to_contain_text("fewer than the 2.5")
    await expect(quota).to_have_value("1.5")
    assert not http.broker.registry.overrides
    await walk(page, panel.get_by_role("checkbox"))
    await page.keyboard.press("Space")
    await enter(page, panel.get_by_role("button", name="Save"))
    await focused(page, change)
    assert http.broker.registry.overrides["vision"].quota_milli == 1_500
    await page.keyboard.press("Enter")
    await enter(page, panel.get_by_role("button", name="As configured"))
    await focused(page, change)
    assert not http.broker.registry.overrides


@pytest.mark.parametrize(("name", "it"), [pytest.param("GPU-0", "it", marks=LONG), ("machine", "all GPUs")])
async def test_gpus_are_emptied_and_take_work_again(http: Http, page: Page, name: str, it: str) -> None:
    devices = http.broker.registry.devices  # each change replaces its drains
    control, panel = page.locator(f"#work-{name}"), page.get_by_role("form", name=f"Empty {it}")
    await enter(page, control)
    await focused(page, panel)
    await enter(page, panel.get_by_role("link", name="Cancel"))
    await focused(page, control)
    assert not devices.drains.of
    await page.keyboard.press("Enter")
    await walk(page, panel.get_by_label("Ask them to finish"))
    await page.keyboard.press("ArrowDown")
    await enter(page, panel.get_by_role("button", name=f"Empty {it}"))
    await focused(page, control)
    drain = devices.drains.on("GPU-0")
    assert drain is not None
    assert drain.until is not None
    await expect(control).to_have_text(f"Let {it} take work again")
    await page.keyboard.press("Enter")
    await expect(control).to_have_text(f"Empty {it}")
    await focused(page, control)
    assert not devices.drains.of


@pytest.mark.long
async def test_lending_is_switched_and_a_process_without_a_lease_is_ended(http: Http, page: Page) -> None:
    process = UnleasedProcess(process="7-9", pid=7, uid=1003, name="x", used_bytes=2**30, kept="")
    http.site.unleased["GPU-0"] = [process]
    await http.broker.loop.observer.measure()
    await enter(page, page.get_by_role("button", name="Only log"))
    await focused(page, page.get_by_role("heading", name="Lending"))
    await enter(page, page.get_by_role("button", name="As configured"))
    await focused(page, page.get_by_role("heading", name="Lending"))
    await walk(page, page.get_by_role("checkbox"), "Shift+Tab")
    await page.keyboard.press("Space")
    await enter(page, page.get_by_role("button", name="End process 7"))
    await focused(page, page.get_by_role("heading", name="Devices"))
    assert http.site.unleased["GPU-0"] == []


@pytest.mark.long
async def test_nothing_reloads_the_page_while_a_panel_is_open(http: Http, page: Page) -> None:
    live = page.locator("meta[http-equiv=refresh]")
    await page.goto(f"{http.url}{PREFIX}?live=1")
    await expect(live).to_have_count(1)
    await enter(page, page.get_by_role("link", name="Change project vision"))
    await expect(live).to_have_count(0)
    await enter(page, page.get_by_role("link", name="Cancel"))
    await expect(live).to_have_count(1)


@pytest.mark.parametrize("judged", [(360,), pytest.param(WIDTHS, marks=LONG)], ids=["narrow", "every_width"])
@pytest.mark.parametrize("theme", ["light", "dark", "forced"])
async def test_every_panel_is_accessible_in_every_theme_and_fits_a_telephone(
    http: Http, page: Page, theme: str, judged: tuple[int, ...]
) -> None:
    """The layout is looked at in every width, and axe-core judges the widths of ``judged``."""
    if theme == "forced":
        await page.emulate_media(forced_colors="active")
    else:
        await page.emulate_media(color_scheme=theme)
    (ada,) = [each for each in http.broker.registry.leases.values() if each.lease.user == "ada"]
    for panel, query in [("act", f"act={ada.id}"), ("edit", "edit=vision"), ("empty", "empty=machine")]:
        await page.goto(f"{http.url}{PREFIX}?{query}#{panel}")
        await expect(page.locator(f"#{panel}")).to_be_focused()
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.locator(f"#{panel}").evaluate(TOO_WIDE) == []
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            if width in judged:
                await accessible(page, f"#{panel}")
            await picture(page, f"admin-{panel}-{theme}-{width}")
