"""The sidebar in every theme, news, settings, and no harm done, in a real JupyterLab."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from playwright.async_api import Locator, Page, Route, expect

from jupyter_gpushare.protocol.jobfiles import log_path
from tests.server.fake_broker import eventually
from tests.ui.pages import (
    THEMES,
    TOO_WIDE,
    accessible,
    arrived,
    in_themes,
    needs_browser,
    picture,
    run_command,
    use_theme,
)

pytestmark = needs_browser


async def narrow(page: Page, panel: Locator) -> None:
    """Make the sidebar 240 px wide."""
    wide = await panel.bounding_box()
    assert wide is not None
    await page.mouse.move(wide["x"] - 2, 400)
    await page.mouse.down()
    await page.mouse.move(wide["x"] + wide["width"] - 240, 400, steps=5)
    await page.mouse.up()
    await page.wait_for_function("() => document.querySelector('.gpushare-panel').offsetWidth <= 250")


# Elements of the extension with an animation or a transition.
MOVING = """() => [
    ...document.querySelectorAll('[class*="gpushare-"], [class*="gpushare-"] *')
].filter(node => {
    const style = getComputedStyle(node);
    return style.animationName !== 'none' || style.transitionDuration.split(', ').some(s => s !== '0s');
}).map(node => node.outerHTML.slice(0, 120))"""


def longest(status: dict[str, Any]) -> dict[str, Any]:
    """The same with names that are long and have no blanks."""
    name = "experiments_of_2031_" * 5
    (lease,) = status["leases"]
    status["leases"] = [
        lease
        | {"project": name, "device_name": name}
        | {"processes": [process | {"kernel": name, "name": name} for process in lease["processes"]]}
    ]
    status["projects"] = [project | {"name": name} for project in status["projects"][:1]]
    reason = f"The folder /home/ada/{name}/{name} does not exist."
    status["jobs"] = [job | {"name": name, "reason": reason, "reason_texts": []} for job in status["jobs"]]
    status["events"] = [event | {"sentence": reason, "sentence_texts": []} for event in status["events"]]
    return status


async def test_the_sidebar_is_accessible_in_every_theme_narrow_and_still(page, lab, broker, golden):
    await page.emulate_media(reduced_motion="reduce")
    await page.locator(".jp-Notebook .cm-content").first.click()
    await page.keyboard.type("1")
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("You used 14 GPU-hours.")
    # With the mouse there is no focus ring; with the first key there is one.
    outline = "node => getComputedStyle(node).outlineStyle"
    await expect(panel).to_be_focused()
    assert await panel.evaluate(outline) == "none"
    await page.keyboard.press("Shift")
    assert await panel.evaluate(outline) == "solid"
    await narrow(page, panel)
    for theme in THEMES:
        await use_theme(page, theme)
        lab.say(golden("status_active"))
        await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
        await accessible(page, ".gpushare-panel", ".gpushare-status")
        assert await panel.evaluate(TOO_WIDE) == []
        await picture(page, f"panel-narrow-{theme.split()[-1].lower()}")
        lab.say(golden("status_warned"))
        await expect(panel).to_contain_text("Lent in 5 min")
        await expect(page.locator(".gpushare-banner")).to_contain_text("2 jobs are waiting")
        await accessible(page, ".gpushare-panel", ".gpushare-banner", ".gpushare-status")
        assert await panel.evaluate(TOO_WIDE) == []
        assert await page.evaluate(MOVING) == []
        await picture(page, f"panel-narrow-warned-{theme.split()[-1].lower()}")
    await use_theme(page, THEMES[0])
    lab.say(longest(golden("status_active")))
    await expect(panel).to_contain_text("does not exist.")
    await picture(page, "panel-narrow-long")
    assert await panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
    lab.say(golden("status_active"))
    await expect(panel).not_to_contain_text("does not exist.")
    await panel.get_by_role("button", name="Release the GPU memory of train.ipynb").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("all of its variables are lost")
    await dialog.get_by_role("button", name="Restart the kernel").click()
    await expect(page.locator(".Toastify")).to_contain_text("no such kernel")
    status = golden("status_active")
    (lease,) = status["leases"]
    (process,) = lease["processes"]
    left = [process | {"pid": 4801, "keeps": True}, process | {"pid": 4802, "used_bytes": 0, "keeps": True}]
    broker.answer("POST leases/b7q2mzk4x9/release", lease)
    lab.say(status | {"leases": [lease | {"processes": [process, *left]}]})
    ended = panel.get_by_text("train.ipynb (ended)")
    assert await ended.evaluate("node => node.scrollWidth <= node.clientWidth || !node.clientWidth")
    assert await panel.evaluate(TOO_WIDE) == []
    await picture(page, "panel-left")
    await panel.get_by_role("button", name="Release the GPU memory of train.ipynb (ended)").click()
    await expect(dialog).to_contain_text("ended at once (4801, 4802)")
    await picture(page, "release-left")
    await dialog.get_by_role("button", name="End the processes").click()
    await asyncio.to_thread(eventually, lambda: len(broker.asked("POST leases/b7q2mzk4x9/release")) == 1)


@pytest.mark.long
async def test_the_week_is_asked_for_once_at_a_time(page, lab, broker, golden):
    held: list[Route] = []
    await page.route("**/gpushare/history*", lambda route: held.append(route))
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    job = golden("job")
    for n, state in enumerate(["running", "suspended", "running"]):
        lab.say(golden("status_active") | {"jobs": [job | {"state": state, "name": f"name {n}"}]})
        await expect(panel).to_contain_text(f"name {n}")
    await arrived(held, 1)
    await held[0].continue_()
    await expect(panel).to_contain_text("Last seven days")
    lab.say(golden("status_active") | {"jobs": [job | {"state": "running", "name": "name 3"}]})
    await arrived(held, 2)


@pytest.mark.long
async def test_days_are_drawn_when_they_are_wanted_in_the_colours_of_the_theme(page, broker):
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("You used 14 GPU-hours.")
    asked = len(broker.asked("GET history"))
    button = panel.get_by_role("button", name="Show days")
    await button.focus()
    await expect(button).to_have_attribute("aria-expanded", "false")
    await page.keyboard.press("Enter")
    chart = panel.get_by_role("img", name="GPU-hours a day.")
    assert ": 2.0 used, 2.4 given to others" in await chart.get_attribute("aria-label")
    heights = "bars => bars.map(bar => bar.height.baseVal.value.toFixed(3))"
    drawn = await chart.locator("rect").evaluate_all(heights)
    assert drawn == ["0.000"] * 10 + ["1.000", "0.333", "0.167", "0.200"]
    assert len(broker.asked("GET history")) == asked

    await narrow(page, panel)
    for theme in [*THEMES[1:], THEMES[0]]:
        await use_theme(page, theme)
        await accessible(page, ".gpushare-panel")
        assert await panel.evaluate(TOO_WIDE) == []
        await chart.scroll_into_view_if_needed()
        await picture(page, f"days-{theme.split()[-1].lower()}")
    await panel.get_by_role("button", name="Hide days").press("Enter")
    await expect(chart).to_have_count(0)
    await expect(button).to_be_focused()


@pytest.mark.long
async def test_a_gpu_with_lost_memory_is_never_said_to_be_back(page, lab, golden):
    banner, toasts = page.locator(".gpushare-banner"), page.locator(".Toastify")
    lab.say(golden("status_waking"))
    await expect(banner).to_contain_text("The GPU is back in 5 to 12 s.")
    lab.say(golden("status_lost"))
    lost = "Your GPU memory could not be brought back"
    await expect(banner).to_contain_text(f"GPU state lost. {lost} (the driver refused: CUDA error 46), so ")
    await expect(banner).to_contain_text("Files are safe. Reference ")
    await expect(page.locator(".Toastify__toast", has_text=lost)).to_have_count(0)
    await expect(page.locator(".gpushare-status button.gpushare-attention")).to_contain_text("GPU state lost")
    await accessible(page, ".gpushare-banner")
    await picture(page, "banner-lost")
    # Where no notebook is in sight, a notification says it.
    told = f"{lost}: the kernels that used it have to restart. Your files are safe."
    await run_command(page, "launcher:create")
    await expect(toasts).to_contain_text(told)
    await page.locator(".lm-TabBar-tab", has_text="train.ipynb").first.click()
    await expect(toasts).not_to_contain_text(told)
    await expect(banner).to_contain_text("GPU state lost.")
    lab.say(golden("status_active"))
    await expect(banner).to_be_hidden()
    await expect(toasts).not_to_contain_text("back")


@pytest.mark.long
async def test_what_happened_while_no_page_was_open_is_told_by_the_next(lab, broker, golden, open_page):
    living = golden("job") | {"state": "running"}
    lab.say(golden("status_active") | {"jobs": [living]})
    async with open_page(lab) as page:
        await expect(page.locator(".gpushare-status button")).to_contain_text("Active")
        # The state database of JupyterLab saves with a delay.
        saved = f'"newest": "{living["submitted_at"]}"'
        await asyncio.to_thread(eventually, lambda: saved in workspaces(lab))
    ended = living | {"state": "succeeded", "reason": "Ended."}
    unseen = ended | {"id": "unseen", "name": "unseen", "submitted_at": "2031-06-01T10:00:00Z"}
    quiet = unseen | {"id": "quiet", "name": "quiet", "notify": False}
    lab.say(golden("status_active") | {"jobs": [quiet, unseen, ended]})
    async with open_page(lab, reset=False) as page:
        toasts = page.locator(".Toastify")
        await expect(toasts).to_contain_text("night: Done.")
        await expect(toasts).to_contain_text("unseen: Done.")
        await expect(toasts).not_to_contain_text("quiet")


def workspaces(lab: Any) -> str:
    """What JupyterLab keeps of its pages, as text."""
    folder = lab.folder / "data"
    kept = (json.dumps(json.loads(path.read_text())) for path in folder.glob("*.jupyterlab-workspace"))
    return "".join(kept)


# What shows that a plugin is there, once the GPU is about to be lent.
SIGNS = {
    "status-bar": ".gpushare-status button",
    "panel": ".gpushare-panel",
    "banner": ".gpushare-banner b",
    "jobs": '[data-jp-item-name="gpushare-launch"]',
}
ASLEEP = ".gpushare-status button:has-text('Asleep'), .gpushare-panel:has-text('Asleep')"
IN_USE = ".gpushare-status button:has-text('Active'), .gpushare-panel:has-text('is in use')"


@pytest.mark.long
async def test_each_plugin_can_be_disabled_alone(lab, broker, golden, open_page):
    page_config = lab.folder / "config" / "labconfig" / "page_config.json"
    page_config.parent.mkdir()
    async with open_page(lab) as page:
        for disabled in [*SIGNS, "notifications"]:
            off = {"disabledExtensions": {f"jupyter-gpushare:{disabled}": True}}
            page_config.write_text(json.dumps(off))
            lab.say(golden("status_active"))
            await page.reload()
            await expect(page.locator(IN_USE).first).to_be_attached()
            await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
            lab.say(golden("status_warned"))
            for plugin, sign in SIGNS.items():
                if plugin != disabled:
                    await expect(page.locator(sign).first).to_be_attached()
            lab.say(golden("status_asleep"))
            await expect(page.locator(ASLEEP).first).to_be_attached()
            lab.say(golden("status_active"))
            await expect(page.locator(IN_USE).first).to_be_attached()
            if disabled == "notifications":
                await expect(page.locator(".Toastify__toast")).to_have_count(0)
            else:
                await expect(page.locator(".Toastify")).to_contain_text("Your GPU is back")
                await expect(page.locator(SIGNS[disabled])).to_have_count(0)
    page_config.unlink()


# React's scheduler posts itself a message before it renders.
SLOW_RENDERING = """
    const post = MessagePort.prototype.postMessage;
    MessagePort.prototype.postMessage = function (...args) {
        setTimeout(() => post.apply(this, args), 2000);
    };
"""


@pytest.mark.long
async def test_an_answer_before_the_first_rendering_is_shown(lab, broker, open_page):
    mine = lab.folder / "config" / "jupyter-gpushare" / "model.jupyterlab-settings"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(json.dumps({"refreshSeconds": 300}))
    async with open_page(lab, script=SLOW_RENDERING) as page:
        await expect(page.locator(".gpushare-status button")).to_contain_text("Active")
        await run_command(page, "gpushare:open")
        await expect(page.get_by_role("region", name="Shared GPU")).to_contain_text("Your 1/2 GPU is in use.")
    mine.unlink()


@pytest.mark.long
async def test_what_is_set_holds(lab, broker, golden, open_page):
    mine = lab.folder / "config" / "jupyter-gpushare" / "model.jupyterlab-settings"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(json.dumps({"keepMinutes": 45, "banner": False, "toasts": False, "refreshSeconds": 300}))
    async with open_page(lab) as page:
        await page.locator(".gpushare-status button").click()
        panel = page.get_by_role("region", name="Shared GPU")
        await expect(panel.get_by_role("button", name="Keep it 45 min")).to_be_visible()
        broker.seen.clear()
        lab.say(golden("status_warned"))
        await expect(panel).to_contain_text("Lent in 5 min")
        await expect(page.locator(".gpushare-banner")).to_be_hidden()
        await expect(page.locator(".Toastify__toast")).to_have_count(0)
        lease = golden("status_warned")["leases"][0]
        broker.answer(f"POST leases/{lease['id']}/keep", lease)
        await panel.get_by_role("button", name="Keep it 45 min").click()
        await asyncio.to_thread(eventually, lambda: broker.asked(f"POST leases/{lease['id']}/keep"))
        assert broker.asked(f"POST leases/{lease['id']}/keep")[0].json == {"minutes": 45.0}
    mine.unlink()


async def test_keeping_a_gpu_gives_a_receipt_with_a_way_back(page, lab, broker, golden):
    warned = golden("status_warned")
    lab.say(warned)
    banner = page.locator(".gpushare-banner")
    await expect(banner).to_contain_text("Lent in 5 min")
    kept = golden("status_active")
    kept["leases"][0] |= {"keep_until": "2031-05-06T14:50:00Z", "keep_left_minutes": 90.0}
    keep = f"POST leases/{kept['leases'][0]['id']}/keep"
    broker.answer(keep, kept["leases"][0])
    lab.say(kept)
    await expect(banner).to_be_hidden()
    await page.locator(".gpushare-status button").click()
    await page.get_by_role("region", name="Shared GPU").get_by_role("button", name="Keep it").click()
    toasts = page.locator(".Toastify")
    await expect(toasts).to_contain_text("Your GPU stays with you until 6 May 2031")
    await expect(toasts).to_contain_text("90 min of that are left today.")
    await in_themes(page, "keep", themes=THEMES[:2])
    await toasts.get_by_role("button", name="Undo").click()
    await asyncio.to_thread(eventually, lambda: len(broker.asked(keep)) == 2)
    assert [request.json["minutes"] for request in broker.asked(keep)] == [30.0, 0.0]


@pytest.mark.long
async def test_utilization_is_a_line_with_its_axes_and_memory_the_meter_above(page, lab, broker, golden):
    busy = golden("status_active")
    busy["leases"][0] |= {"utilization_percent": 40}
    lab.say(busy)
    await page.locator(".gpushare-status button").click()
    history = page.locator(".gpushare-history")
    for percent in (60, 80, 70):
        busy["leases"][0]["utilization_percent"] = percent
        lab.say(busy)
        await expect(history).to_contain_text(f"{percent} %")
    await expect(history).to_contain_text("GPU utilization")
    await expect(history.locator("svg")).to_have_attribute(
        "aria-label", "Utilization of the last ten minutes, now 70 %"
    )
    for text in ("100 %", "0 %", "10 min ago", "now"):
        await expect(history.get_by_text(text, exact=True)).to_be_visible()
    await in_themes(page, "utilization", ".gpushare-panel")
    # A shared GPU has no figure of one server alone.
    busy["leases"][0]["utilization_percent"] = None
    lab.say(busy)
    await expect(history).to_have_count(0)


@pytest.mark.long
async def test_a_hidden_page_asks_nothing_and_a_visible_one_in_turn(page, lab, broker, golden):
    running = golden("job") | {"id": "hidden0001", "state": "running", "started_at": "2031-05-06T14:20:07Z"}
    lab.has_jobs([running])
    log = log_path(lab.folder, running["id"], 1)
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1\n")
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    await expect(page.locator(".gpushare-log")).to_contain_text("epoch 1")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/gpushare/" in request.url else None)
    hide = """hidden => {
        const set = (name, value) =>
            Object.defineProperty(document, name, { value, configurable: true });
        set('visibilityState', hidden ? 'hidden' : 'visible');
        set('hidden', hidden);
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    await page.evaluate(hide, True)
    for _ in range(10):  # what the page had begun with may still come
        asked.clear()
        await page.wait_for_timeout(2_000)
        if not asked:
            break
    await page.wait_for_timeout(8_000)
    assert asked == []
    async with page.expect_request("**/gpushare/status*"):
        await page.evaluate(hide, False)
    await page.wait_for_timeout(6_000)
    told = [url.split("/gpushare/")[1].split("?")[0] for url in asked]
    assert told.count("status") <= 3
    assert set(told) <= {"status", f"jobs/{running['id']}/log"}


@pytest.mark.long
async def test_a_time_in_a_sentence_is_in_the_zone_and_language_of_the_reader(lab, broker, golden, open_page):
    async with open_page(lab, timezone_id="Asia/Kolkata", locale="de-DE") as page:
        lab.say(golden("status_asleep"))
        banner = page.locator(".gpushare-banner")
        await expect(banner).to_contain_text("Asleep since 6. Mai 2031, 19:50. Your GPU is lent")
