"""Dialogs at 360 pixels and at a zoom of 200 %: nothing is cut off, and each button can be pressed."""

from __future__ import annotations

import pytest
from playwright.async_api import Locator, Page, expect

from tests.ui.pages import THEMES, TOO_WIDE, needs_browser, picture, queue, run_command, use_theme

pytestmark = needs_browser
# The second is a window of 1280 x 800 at a zoom of 200 %.
SIZES = {"phone": (360, 640), "zoomed": (640, 400)}


async def resize(page: Page, _golden) -> None:
    await run_command(page, "gpushare:open")
    panel = page.get_by_role("region", name="Shared GPU")
    await panel.get_by_role("button", name="Change size").dispatch_event("click")


async def release(page: Page, _golden) -> None:
    await run_command(page, "gpushare:open")
    panel = page.get_by_role("region", name="Shared GPU")
    await panel.get_by_role("button", name="Release").first.dispatch_event("click")


async def launch(page: Page, _golden) -> None:
    await run_command(page, "gpushare:launch", {"path": "train.ipynb"})


async def edit(page: Page, _golden) -> None:
    await run_command(page, "gpushare:jobs", {"job": "wait1"})
    await page.get_by_role("button", name="Change…").dispatch_event("click")


async def stop(page: Page, _golden) -> None:
    await run_command(page, "gpushare:jobs", {"job": "wait2"})
    detail = page.get_by_role("region", name="Job train 2")
    await detail.get_by_role("button", name="Stop").dispatch_event("click")


async def fits(page: Page, dialog: Locator, width: int, height: int) -> None:
    """Fail on what sticks out of the dialog or the window, and on a button that cannot be pressed."""
    content = dialog.locator(".jp-Dialog-content")
    box = await content.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["y"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= height
    assert await content.evaluate(TOO_WIDE) == []
    for button in await dialog.locator(".jp-Dialog-footer button").all():
        place = await button.bounding_box()
        assert place is not None
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= width
        assert place["y"] + place["height"] <= height
        await button.click(trial=True)


QUICK = (launch, "phone")
CASES = [
    pytest.param(
        opens,
        size,
        id=f"{opens.__name__}-{size}",
        marks=() if opens is launch and size == "phone" else pytest.mark.long,
    )
    for opens in (resize, release, launch, edit, stop)
    for size in SIZES
]


@pytest.mark.parametrize(("opens", "size"), CASES)
async def test_dialogs_fit_into_a_small_window(lab, broker, open_page, golden, opens, size):
    jobs = queue(golden, 2)
    jobs[1] |= {"state": "running", "started_at": "2031-05-06T14:20:07Z", "position": None}
    status = golden("status_active") | {"jobs": jobs}
    lab.say(status)
    broker.answer("GET jobs", {"jobs": jobs})
    for job in jobs:
        broker.answer(f"GET jobs/{job['id']}/timeline", golden("timeline"))
    width, height = SIZES[size]
    async with open_page(lab, viewport={"width": width, "height": height}) as page:
        await opens(page, golden)
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_be_visible()
        for theme in THEMES[:2]:
            await use_theme(page, theme)
            await fits(page, dialog, width, height)
            await picture(page, f"narrow-{opens.__name__}-{size}-{theme.split()[-1].lower()}")
        await use_theme(page, THEMES[0])
        await page.keyboard.press("Escape")
