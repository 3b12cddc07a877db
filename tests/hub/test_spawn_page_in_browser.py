"""The spawn page of a real Hub in a real browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.conftest import Chromium
from tests.hub.conftest import Hub
from tests.ui.pages import AXE, TOO_WIDE, browser_of, judge, sign_in
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.browser

WAITING = {
    "state": "waiting",
    "position": 2,
    "sentence": "Number 2. Needs 2 GPUs together; 1 is free.",
}
# 640: a page of 1280 at a zoom of 200 %
WIDTHS = (1280, 640, 360)
NOTIFIED: list[str] = []


@pytest.fixture(scope="module")
def browser(chromium: Chromium) -> Iterator[Browser]:
    """One chromium for all tests of this file."""
    with browser_of(chromium) as browser:
        yield browser


@pytest.fixture
def page(hub: Hub, browser: Browser) -> Iterator[Page]:
    """Ada's spawn page; its timers stand still between ``page.clock.fast_forward``."""
    NOTIFIED.clear()
    with browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["notifications"]
    ) as context:
        page = context.new_page()
        page.set_default_timeout(1_000 * PATIENCE_S)
        expect.set_options(timeout=1_000 * PATIENCE_S)
        errors: list[str] = []
        context.expose_function("notified", lambda title: NOTIFIED.append(title))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.add_init_script(
            "window.Notification = class { constructor(title) { window.notified(title); }"
            " static permission = 'granted'; static requestPermission() {} };"
        )
        page.clock.install()
        sign_in(page, f"{hub.url}/hub/spawn", "ada")
        for _ in range(20):  # on a busy machine the broker's answer is not always waited for
            page.wait_for_selector(".gpushare")
            if page.get_by_role("radio", name="2 GPUs", exact=True).count():
                break
            page.reload()
        yield page
        assert errors == []


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("GPUSHARE_PICTURES"):
        for theme in ("dark", "light"):
            page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)
            page.clock.run_for(1_000)  # colours fade
            page.wait_for_timeout(1_000)
            page.screenshot(path=Path(folder) / f"{name}-{theme}.png", full_page=True)


def wait_for_two_gpus(page: Page) -> None:
    page.get_by_role("radio", name="2 GPUs", exact=True).check()
    page.get_by_role("button", name="Start when it is free").click()


def test_the_spawn_page_says_which_sizes_start_now(hub: Hub, page: Page) -> None:
    expect(page.get_by_role("radio", name="1/2 GPU", exact=True)).to_be_enabled()
    card = page.locator("label", has_text="2 GPUs")
    expect(card).to_contain_text("cannot start now")
    expect(card).to_contain_text("Only 1 GPU is free.")
    expect(page.locator("label", has_text="1/2 GPU")).to_contain_text("starts now")
    picture(page, "spawn-sizes")


@pytest.mark.long
def test_the_cards_change_while_the_page_is_open_and_keep_what_was_entered(hub: Hub, page: Page) -> None:
    page.get_by_text("More: an exact amount").click()
    page.get_by_label("GPU memory in GiB").fill("12.5")
    page.get_by_role("radio", name="1/2 GPU", exact=True).check()
    card = page.locator("label", has_text="2 GPUs")
    expect(card).to_contain_text("cannot start now")
    hub.broker.is_free = True
    page.clock.fast_forward(11_000)
    expect(card).to_contain_text("starts now")
    expect(page.get_by_text("Free on this machine: 2 of 2.")).to_be_visible()
    expect(page.get_by_label("GPU memory in GiB")).to_have_value("12.5")
    expect(page.get_by_role("radio", name="1/2 GPU", exact=True)).to_be_checked()
    hub.broker.is_free = False
    page.get_by_role("radio", name="2 GPUs", exact=True).check()
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_enabled()
    page.clock.fast_forward(11_000)
    expect(card).to_contain_text("cannot start now")
    expect(page.get_by_role("radio", name="2 GPUs", exact=True)).to_be_checked()
    expect(page.get_by_role("button", name="Start when it is free")).to_be_enabled()


def test_a_size_that_is_not_free_starts_by_itself_when_its_turn_comes(hub: Hub, page: Page) -> None:
    hub.broker.place = WAITING
    wait_for_two_gpus(page)
    expect(page.get_by_role("status").filter(has_text="Number 2.")).to_contain_text("1 is free.")
    expect(page.get_by_role("button", name="Start when it is free")).to_be_disabled()
    picture(page, "spawn-waiting")
    asked = hub.broker.of("spawner/wait")[-1].body
    assert (asked["user"], asked["server"]) == ("ada", "")
    assert {key: value for key, value in asked["options"].items() if value} == {
        "gpus": 2,
        "project": "vision",
    }
    page.reload()  # the place is kept
    expect(page.get_by_role("status").filter(has_text="Number 2.")).to_be_visible()
    hub.broker.place = {"state": "ready", "sentence": "Your 2 GPUs are reserved."}
    page.clock.fast_forward(6_000)
    hub.wait_ready("ada")
    page.wait_for_url("**/user/ada/**")  # past the Hub's page of progress, which may be short
    options = hub.broker.of("spawner/start")[-1].body["options"]
    assert (options["gpus"], options["project"]) == (2, "vision")
    assert NOTIFIED == ["2 GPUs: free now"]


def test_waiting_can_be_stopped_and_a_refusal_is_shown(hub: Hub, page: Page) -> None:
    hub.broker.place = WAITING
    wait_for_two_gpus(page)
    stop = page.get_by_role("button", name="Stop waiting")
    stop.focus()
    with page.expect_response(lambda answer: answer.request.headers.get("x-gpushare-live") == "leave"):
        page.keyboard.press("Enter")
    expect(stop).to_be_hidden()
    expect(page.get_by_role("button", name="Start when it is free")).to_be_enabled()
    assert hub.broker.of("spawner/wait")[-1].body["options"] is None
    hub.broker.place = None
    wait_for_two_gpus(page)
    expect(page.get_by_role("status").filter(has_text="queue is closed")).to_be_visible()
    expect(page.get_by_role("button", name="Start when it is free")).to_be_enabled()
    assert hub.broker.of("spawner/start") == []


def test_a_request_to_leave_the_queue_does_not_pass_the_one_that_joins_it(hub: Hub, page: Page) -> None:
    hub.broker.place = WAITING
    sent: list[str] = []
    held: list[Route] = []

    def hold(route: Route) -> None:
        sent.append(route.request.headers.get("x-gpushare-live", ""))
        if len(sent) == 1:
            held.append(route)
        else:
            route.continue_()

    page.route("**/hub/spawn*", hold)
    wait_for_two_gpus(page)
    page.get_by_role("button", name="Stop waiting").click()
    page.wait_for_timeout(200)
    assert len(sent) == 1
    with page.expect_response(lambda answer: answer.request.headers.get("x-gpushare-live") == "leave"):
        held[0].continue_()
    assert sent[1] == "leave"
    assert hub.broker.of("spawner/wait")[-1].body["options"] is None


@pytest.mark.long
def test_a_page_that_waits_asks_on_while_the_hub_is_away(hub: Hub, page: Page) -> None:
    hub.broker.place = WAITING
    wait_for_two_gpus(page)
    expect(page.get_by_role("status").filter(has_text="Number 2.")).to_be_visible()
    page.route("**/hub/spawn*", lambda route: route.abort())
    for _ in range(3):
        page.clock.fast_forward(31_000)
    expect(page.get_by_role("status").filter(has_text="The Hub does not answer just now")).to_be_visible()
    page.unroute("**/hub/spawn*")
    page.clock.fast_forward(31_000)
    expect(page.get_by_role("status").filter(has_text="Number 2.")).to_be_visible()


# The Hub's two themes, and colours that the user's machine forces on every page.
@pytest.mark.parametrize(
    "judged", [(360,), pytest.param(WIDTHS, marks=pytest.mark.long)], ids=["narrow", "every_width"]
)
@pytest.mark.parametrize("theme", ["light", "dark", "forced"])
def test_the_spawn_page_is_accessible_in_every_theme_and_fits_a_telephone(
    hub: Hub, page: Page, theme: str, judged: tuple[int, ...]
) -> None:
    """The layout is looked at in every width, and axe-core judges the widths of ``judged``."""
    hub.broker.place = WAITING
    page.get_by_text("More: an exact amount").click()
    wait_for_two_gpus(page)
    expect(page.get_by_role("status").filter(has_text="Number 2.")).to_be_visible()
    if theme == "forced":
        page.emulate_media(forced_colors="active")
    else:
        page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)
    page.clock.run_for(1_000)
    # Colours fade.
    page.evaluate("() => Promise.all(document.getAnimations().map(each => each.finished))")
    page.evaluate(AXE.read_text() + "; undefined")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator(".gpushare").evaluate(TOO_WIDE) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width in judged:
            judge(page.evaluate("axe.run('.gpushare')"))
        if folder := os.environ.get("GPUSHARE_PICTURES"):
            page.screenshot(path=Path(folder) / f"spawn-{theme}-{width}.png", full_page=True)
    # What is picked, and what a part of the bar means, is seen also where backgrounds are forced.
    border = "card => getComputedStyle(card).border"
    picked = page.locator(".gpushare-card", has_text="2 GPUs")
    assert picked.evaluate(border) != page.locator(".gpushare-card", has_text="1/2 GPU").evaluate(border)
    parts = page.locator(".gpushare-swatch").evaluate_all(
        "all => all.map(one => getComputedStyle(one).background)"
    )
    assert len(set(parts)) == len(parts) == 4
    if theme == "forced":
        radios = page.locator(".gpushare-card input")
        assert radios.evaluate_all("all => all.every(one => getComputedStyle(one).appearance === 'auto')")
