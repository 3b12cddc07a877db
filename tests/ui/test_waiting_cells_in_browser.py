"""Cells that wait for a GPU, in a real JupyterLab."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import expect

from tests.server.fake_broker import eventually
from tests.ui.pages import (
    in_themes,
    needs_browser,
    picture,
    run_command,
)

pytestmark = needs_browser


UNTIL_TOLD = """from pathlib import Path
import time
while not Path("told").exists():
    time.sleep(0.1)"""


async def test_a_cell_that_waits_says_so_below_itself_and_only_on_the_page(page, lab, broker, golden):
    await page.locator(".jp-Notebook .jp-Cell").first.click()
    await page.locator(".jp-Notebook .cm-content").first.click()
    await page.keyboard.insert_text(UNTIL_TOLD)
    lab.say(golden("status_asleep"))
    await expect(page.locator(".gpushare-banner")).to_contain_text("Asleep")
    await page.keyboard.press("Shift+Enter")
    lab.say(golden("status_waking"))
    line = page.locator(".jp-Cell .gpushare-cell-line")
    await expect(page.locator(".gpushare-banner")).to_contain_text("s so far")
    await expect(line).to_contain_text("Waking up: step")
    # The steps are counted in one place.
    await expect(page.locator(".gpushare-banner")).not_to_contain_text("s so far")
    await in_themes(page, "waking", ".gpushare-banner", ".gpushare-cell-line")
    await picture(page, "cell-waits")
    await run_command(page, "docmanager:save")
    (lab.work / "told").touch()
    await expect(line).to_have_count(0)
    assert "Waking up" not in (lab.work / "train.ipynb").read_text()

    # What was cancelled by a restart of the kernel does not wait for anything.
    (lab.work / "told").unlink()
    lab.say(golden("status_asleep"))
    await expect(page.locator(".gpushare-banner")).to_contain_text("Asleep")
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    await cell.click()
    await page.keyboard.press("Control+Enter")
    lab.say(golden("status_waking"))
    await expect(line).to_contain_text("Waking up: step")
    await run_command(page, "kernelmenu:restart")
    await page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    await expect(line).to_have_count(0)
    await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    (lab.work / "told").touch()
    lab.say(golden("status_active"))
    await expect(page.locator(".gpushare-banner")).to_be_hidden()


async def run_waiting_cell(page, lab, golden, status) -> None:
    """Run a cell of the open notebook that ends when `told` exists, while its GPU is away."""
    (lab.work / "told").unlink(missing_ok=True)
    await page.locator(".jp-Notebook .jp-Cell").first.click()
    await page.locator(".jp-Notebook .cm-content").first.click()
    await page.keyboard.press("Control+A")
    await page.keyboard.insert_text(UNTIL_TOLD)
    lab.say(golden("status_asleep"))
    await expect(page.locator(".gpushare-banner")).to_contain_text("Asleep")
    await page.keyboard.press("Shift+Enter")
    lab.say(status)
    await expect(page.locator(".jp-Cell .gpushare-cell-line")).to_contain_text("Waking up: step")


def waiting(golden) -> dict[str, object]:
    """A status in which a cell waits for a GPU that others have."""
    status = golden("status_waking")
    status["leases"][0]["state"] = "suspended"
    return status


@pytest.mark.long
async def test_interrupt_and_restart_while_waking_are_answered_at_once(page, lab, broker, golden):
    await run_waiting_cell(page, lab, golden, waiting(golden))
    broker.answer("POST leases/b7q2mzk4x9/stay-asleep", golden("status_asleep")["leases"][0])
    toasts = page.locator(".Toastify")
    await run_command(page, "kernelmenu:interrupt")
    await expect(toasts).to_contain_text("Your cell waits for the GPU and is interrupted when it is back.")
    await expect(toasts.get_by_text("Your cell waits for the GPU")).to_have_count(1)
    await picture(page, "interrupt-waking")
    await toasts.get_by_role("button", name="Stay asleep").click()
    await asyncio.to_thread(eventually, lambda: len(broker.asked("POST leases/b7q2mzk4x9/stay-asleep")) == 1)
    await expect(page.locator(".gpushare-banner").get_by_role("button", name="Stay asleep")).to_be_visible()
    await run_command(page, "kernelmenu:restart")
    await page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    await expect(toasts).to_contain_text("no cell waits for the GPU any more")
    await asyncio.to_thread(eventually, lambda: len(broker.asked("POST leases/b7q2mzk4x9/stay-asleep")) == 2)
    await expect(page.locator(".jp-Cell .gpushare-cell-line")).to_have_count(0)


@pytest.mark.long
async def test_a_notebook_is_renamed_and_closed_while_its_gpu_is_copied_back(page, lab, broker, golden):
    await run_waiting_cell(page, lab, golden, golden("status_waking"))
    tab = page.locator(".lm-TabBar-tab", has_text="train.ipynb").first
    await tab.click(button="right")
    await page.get_by_role("menuitem", name="Rename Notebook").click()
    await page.get_by_role("dialog").get_by_role("textbox").fill("later.ipynb")
    await page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    await expect(page.locator(".lm-TabBar-tab", has_text="later.ipynb").first).to_be_visible()
    await expect(page.locator(".gpushare-banner")).to_contain_text("Waking up")
    await expect(page.locator(".jp-Cell .gpushare-cell-line")).to_contain_text("Waking up: step")
    await (
        page.locator(".lm-TabBar-tab", has_text="later.ipynb")
        .first.locator(".lm-TabBar-tabCloseIcon")
        .click()
    )
    discard = page.get_by_role("dialog").get_by_role("button", name="Discard")
    await expect(discard.or_(page.locator(".jp-Launcher").first)).to_be_visible()
    if await discard.is_visible():
        await discard.click()
    await expect(page.locator(".gpushare-banner")).to_have_count(0)
    await expect(page.locator(".gpushare-status button")).to_contain_text("Waking up")
    (lab.work / "told").touch()
    lab.say(golden("status_active"))
    await expect(page.locator(".Toastify")).to_contain_text("Your GPU is back")
    (lab.work / "later.ipynb").rename(lab.work / "train.ipynb")
