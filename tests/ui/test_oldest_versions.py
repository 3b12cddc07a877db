"""The extension in the oldest Notebook and JupyterLab that it supports; `make test-long` installs both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect

from tests.ui.pages import needs_browser

OLDEST = Path(sys.prefix) / "oldest"

pytestmark = [
    *needs_browser,
    pytest.mark.skipif(not OLDEST.is_dir(), reason="no old JupyterLab: `make test-long` installs it"),
]


@pytest.fixture
def lab(start_lab, tmp_path) -> Iterator[Any]:
    """One server for both: Notebook brings JupyterLab along."""
    with start_lab(tmp_path, "notebook", OLDEST) as lab:
        yield lab


async def version(page: Page) -> str:
    """What the page says that it is."""
    config = page.locator("#jupyter-config-data")
    return str(await config.evaluate("node => JSON.parse(node.textContent).appVersion"))


async def submit_and_look(page: Page) -> Locator:
    """Fill in the dialog from the toolbar, follow the notification, return the list of jobs."""
    await page.locator('[data-jp-item-name="gpushare-launch"] jp-button').click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Notebook or script")).to_be_focused()
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("Number 3. Needs 2 GPUs")
    await dialog.locator("summary").press("Enter")
    await dialog.get_by_label("Name", exact=True).press("Enter")
    await expect(dialog).to_have_count(0)
    await page.locator(".Toastify").get_by_role("button", name="Show job").click()
    return page.get_by_role("grid", name="My training jobs")


@pytest.mark.long
async def test_the_oldest_notebook_and_the_oldest_jupyterlab_show_all_of_it(lab, broker, open_page, golden):
    broker.answer("POST jobs", golden("job"), 201)
    # Notebook first: it stumbles over what JupyterLab has kept of its file browser.
    async with open_page(lab, "notebooks/train.ipynb", reset=False) as page:
        assert (await version(page)).startswith("7.5.")
        jobs = await submit_and_look(page)
        await expect(jobs.locator(".gpushare-job-row").first).to_be_visible()
        await page.get_by_role("menuitem", name="View").click()
        await page.get_by_role("menuitem", name="Shared GPU").click()
        panel = page.get_by_role("region", name="Shared GPU")
        await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
        lab.say(golden("status_warned"))
        await expect(page.locator(".gpushare-banner")).to_contain_text("Lent in 5 min")
        await expect(page.locator(".Toastify__toast", has_text="Your GPU is lent in")).to_have_count(0)
    lab.say(golden("status_active"))
    async with open_page(lab) as page:
        assert await version(page) == "4.5.7"
        await page.locator(".gpushare-status button").click()
        panel = page.get_by_role("region", name="Shared GPU")
        await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
        jobs = await submit_and_look(page)
        await expect(jobs.locator(".gpushare-job-row").first).to_be_visible()
        lab.say(golden("status_warned"))
        await expect(page.locator(".gpushare-status button")).to_contain_text("Lent in 5 min")
        await expect(page.locator(".gpushare-banner")).to_be_attached()
