"""The extension in a real JupyterLab and a real browser, against a broker that the test drives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.ui.pages import needs_browser, picture, run_command

pytestmark = needs_browser

# While `away` is set, no stream of events is connected.
LOSES_EVENTS = """
window.streams = [];
window.WebSocket = class extends window.WebSocket {
  constructor(url, protocols) {
    const events = String(url).includes('api/events');
    super(events && window.away ? 'ws://127.0.0.1:9/' : url, protocols);
    if (events) window.streams.push(this);
  }
};
"""


@pytest.fixture
def lab(start_lab, tmp_path) -> Iterator[Any]:
    with start_lab(tmp_path) as lab:
        yield lab


@pytest.fixture
def broker(lab) -> Any:
    return lab.broker


@pytest_asyncio.fixture(loop_scope="session")
async def page(lab, open_page) -> AsyncIterator[Page]:
    async with open_page(lab) as page:
        yield page


async def test_story_of_a_suspension_is_seen_in_status_bar_panel_and_banner(page, broker, golden):
    status = page.locator(".gpushare-status button")
    await expect(status).to_contain_text("1/2 GPU 6.8/40 GiB Active")
    await status.focus()
    await page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
    memory = panel.get_by_role("meter", name="GPU memory")
    await expect(memory).to_have_attribute("aria-valuetext", "6.8 of 40 GiB")
    time = panel.get_by_role("meter", name="GPU time")
    await expect(time).to_have_attribute("aria-valuetext", "46 %, 50 % granted")
    await expect(panel).to_contain_text("a kernel of 300 ms is never cut")
    await expect(panel).to_contain_text("Queued, number 3")
    await picture(page, "panel-active")

    broker.answer("POST leases/b7q2mzk4x9/keep", golden("status_active")["leases"][0])
    warned = golden("status_warned")
    broker.say_status(warned)
    banner = page.locator(".gpushare-banner")
    await expect(banner).to_contain_text("Lent in 5 min")
    await expect(banner).to_contain_text("2 jobs are waiting. In 5 min")
    await picture(page, "panel-warned")
    await banner.get_by_role("button", name="Keep it 30 min").click()
    await expect(banner.get_by_role("button", name="Keep it 30 min")).to_be_enabled()
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[0].json == {"minutes": 30.0}

    broker.say_status(golden("status_asleep") | {"seq": warned["seq"] + 2})
    await expect(banner).to_contain_text("Run any GPU cell to wake it")
    await expect(memory).to_have_attribute("aria-valuetext", "6.8 GiB in RAM")
    await expect(time).to_be_hidden()
    await picture(page, "panel-asleep")
    broker.answer("POST leases/b7q2mzk4x9/resume", golden("error"), 409)
    await banner.get_by_role("button", name="Wake now").click()
    await expect(page.locator(".Toastify")).to_contain_text("No half GPU is free just now")

    broker.say_status(golden("status_waking") | {"seq": warned["seq"] + 3})
    await expect(banner).to_contain_text("The GPU is back in 5 to 12 s.")
    broker.say_status(golden("status_active") | {"seq": warned["seq"] + 4})
    await expect(page.locator(".Toastify")).to_contain_text("Your GPU is back after")
    await expect(banner).to_be_hidden()
    await picture(page, "panel-back")


async def test_silence_of_the_broker_is_shown_without_old_numbers(page, broker):
    await expect(page.locator(".gpushare-status button")).to_contain_text("6.8/40 GiB")
    await page.locator(".gpushare-status button").click()
    broker.stop()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("No news from the GPU broker since")
    await expect(panel.get_by_role("meter")).to_have_count(0)
    await expect(page.locator(".gpushare-status button")).to_have_text("GPU: no data")
    await picture(page, "panel-silent")
    broker.start()
    await expect(panel).to_contain_text("Your 1/2 GPU is in use.")


PLACES = {"banner": ".gpushare-banner", "sidebar": ".gpushare-panel", "jobs": ".gpushare-jobs"}
TOOLTIP = "document.querySelector('.gpushare-status button').title"


@pytest.mark.long
async def test_a_message_is_shown_in_the_most_specific_place_in_sight_alone(page, broker, golden):
    async def said_in(place: str, text: str) -> None:
        for name, selector in PLACES.items():
            shown = page.locator(f"{selector}:visible", has_text=text)
            await expect(shown).to_have_count(1 if name == place else 0)
        await expect(page.locator(".Toastify__toast")).to_have_count(1 if place == "notification" else 0)
        assert (text in await page.evaluate(TOOLTIP)) == (place == "notification")

    said = "2 jobs are waiting. In 5 min"
    await expect(page.locator(".gpushare-status button")).to_contain_text("Active")
    broker.say_status(golden("status_warned"))
    await said_in("banner", said)
    await page.locator(".gpushare-status button").click()
    await said_in("banner", said)
    # The sidebar keeps the badge and the buttons.
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("Lent in 5 min")
    await expect(panel.get_by_role("button", name="Keep it 30 min")).to_be_visible()
    await picture(page, "said-in-banner")
    await run_command(page, "launcher:create")
    await said_in("sidebar", said)
    await run_command(page, "application:toggle-right-area")
    await said_in("notification", said)
    await expect(page.locator(".Toastify")).to_contain_text("Your GPU is lent in 5 min")
    await picture(page, "said-in-notification")
    # One that was dismissed does not come again.
    await page.locator(".Toastify__toast").get_by_role("button", name="Hide notification").click()
    await expect(page.locator(".Toastify__toast")).to_have_count(0)
    await page.locator(".gpushare-status button").click()
    await said_in("sidebar", said)
    await run_command(page, "gpushare:jobs")
    broker.stop()
    await said_in("jobs", "No news from the GPU broker since")
    await expect(panel).to_contain_text("No data")
    await picture(page, "said-in-jobs")
    broker.start()
    await said_in("sidebar", said)


@pytest.mark.long
async def test_a_warning_goes_with_the_brokers_silence_and_comes_again(page, broker, golden):
    await expect(page.locator(".gpushare-status button")).to_contain_text("Active")
    await run_command(page, "launcher:create")  # it hides the banner
    warned = golden("status_warned")
    broker.say_status(warned)
    toasts = page.locator(".Toastify")
    await expect(toasts).to_contain_text("Your GPU is lent in 5 min")
    # It keeps up with the clock.
    warned["leases"][0]["lend_in_s"] = 240.0
    broker.say_status(warned | {"seq": warned["seq"] + 1})
    await expect(toasts).to_contain_text("Your GPU is lent in 4 min")
    broker.stop()
    await expect(page.locator(".gpushare-status button")).to_have_text("GPU: no data")
    await expect(toasts).not_to_contain_text("Your GPU is lent in")
    broker.start()
    await expect(toasts).to_contain_text("Your GPU is lent in")
    await expect(toasts.get_by_role("alert")).to_have_count(1)
    broker.say_status(golden("status_asleep") | {"seq": warned["seq"] + 2})
    await expect(toasts).to_contain_text("Asleep since 6 May 2031, ")
    await expect(toasts).not_to_contain_text("Your GPU is lent in")


@pytest.mark.long
async def test_a_page_that_is_connected_again_asks_for_what_it_missed(lab, broker, open_page, golden):
    settings = lab.folder / "config" / "jupyter-gpushare"
    settings.mkdir()
    (settings / "model.jupyterlab-settings").write_text('{"refreshSeconds": 300}')
    async with open_page(lab) as page:
        await page.add_init_script(LOSES_EVENTS)
        await page.reload()
        status = page.locator(".gpushare-status button")
        await expect(status).to_contain_text("Active")
        await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
        await page.evaluate("window.away = true; window.streams.forEach(stream => stream.close())")
        broker.say_status(golden("status_warned"))
        await page.wait_for_timeout(1_500)
        await expect(status).to_contain_text("Active")
        await page.evaluate("window.away = false")
        await expect(status).to_contain_text("Lent in 5 min")
