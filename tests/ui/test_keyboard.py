"""The whole story of a job, and of a suspension, without a mouse: keys only."""

from __future__ import annotations

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from jupyter_gpushare.protocol.jobfiles import log_path
from tests.ui.pages import needs_browser, run_command

pytestmark = needs_browser

# The element with the focus, if it is ours and the focus is not visible.
UNSEEN = """() => {
    const node = document.activeElement;
    const style = getComputedStyle(node);
    const seen = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
    return node.closest('[class*="gpushare-"]') === null || seen ? '' : node.outerHTML.slice(0, 200);
}"""


@pytest_asyncio.fixture(loop_scope="session")
async def page(page):
    # In a cell that is being edited, Tab would be a part of its text.
    await focus_is_in(page, ".jp-Notebook")
    await page.keyboard.press("Escape")
    await expect(page.locator(".jp-Notebook.jp-mod-commandMode")).to_have_count(1)
    return page


async def walk(page: Page, key: str, target: Locator) -> None:
    """Press a key until ``target`` has the focus; wherever it is meanwhile, it can be seen."""
    await expect(target).to_be_visible()
    for _ in range(60):
        await page.keyboard.press(key)
        assert await page.evaluate(UNSEEN) == ""
        if await target.evaluate("node => node.contains(document.activeElement)"):
            return
    raise AssertionError(f"{key} does not lead to {target}")


async def choose(page: Page, command: str) -> None:
    """Run a command from the palette."""
    await page.keyboard.press("Control+Shift+C")
    await expect(page.locator(".lm-CommandPalette-input")).to_be_focused()
    await page.keyboard.type(command)
    await expect(page.locator(".lm-CommandPalette-item.lm-mod-active")).to_contain_text(command)
    await page.keyboard.press("Enter")


async def focus_is_in(page: Page, selector: str) -> None:
    await page.wait_for_function("s => document.activeElement.closest(s) !== null", arg=selector)


async def test_a_job_is_submitted_without_a_mouse(page, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    dialog = page.get_by_role("dialog")
    path = dialog.get_by_label("Notebook or script")

    # From the toolbar of the notebook, and back to it.
    chip = page.locator('[data-jp-item-name="gpushare-launch"]')
    await walk(page, "Shift+Tab", page.locator(".jp-NotebookPanel-toolbar"))
    await walk(page, "ArrowRight", chip)
    await page.keyboard.press("Enter")
    await expect(path).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await focus_is_in(page, '[data-jp-item-name="gpushare-launch"]')

    # From the palette; every field, in the order in which they are read.
    await choose(page, "Run as training job")
    await expect(path).to_be_focused()
    await expect(path).to_have_value("train.ipynb")
    await walk(page, "Tab", dialog.get_by_label("Parameters"))
    await page.keyboard.type("lr = 0.1")
    await page.keyboard.press("Enter")
    await page.keyboard.type("seed = 2")
    await walk(page, "Tab", dialog.get_by_role("radio", name="GPUs", exact=True))
    await page.keyboard.press("ArrowRight")
    await walk(page, "Tab", dialog.get_by_label("Size"))
    await page.keyboard.type("20GiB")
    await walk(page, "Shift+Tab", dialog.get_by_role("radio", name="GPU memory of one GPU"))
    await page.keyboard.press("ArrowLeft")
    await walk(page, "Tab", dialog.get_by_label("Number or part"))
    await page.keyboard.press("Control+A")
    await page.keyboard.type("2")
    await walk(page, "Tab", dialog.get_by_label("May use borrowed GPUs"))
    await page.keyboard.press("Space")
    await walk(page, "Tab", dialog.get_by_label("When its GPU is needed"))
    await page.keyboard.press("ArrowDown")
    await walk(page, "Tab", dialog.get_by_label("Notify me"))
    await page.keyboard.press("Space")
    await walk(page, "Tab", dialog.locator("summary"))
    await page.keyboard.press("Enter")
    for label, text in [("Name", "night"), ("Variables", "SEED=1"), ("Tries after a failure", "3")]:
        await walk(page, "Tab", dialog.get_by_label(label, exact=True))
        await page.keyboard.press("Control+A")
        await page.keyboard.type(text)
    await walk(page, "Shift+Tab", dialog.get_by_label("Environment"))
    # Round and round: the focus stays in the dialog.
    submit = dialog.get_by_role("button", name="Submit")
    await walk(page, "Tab", submit)
    await walk(page, "Tab", path)
    await page.keyboard.press("Shift+Tab")
    await expect(submit).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(dialog).to_have_count(0)
    (asked,) = (request.json for request in broker.asked("POST jobs"))
    assert asked["source"]["parameters"] == {"lr": "0.1", "seed": "2"}
    assert (asked["gpus"], asked["name"], asked["retries"]) == ("2", "night", 3)
    assert (asked["borrow"], asked["notify"], asked["checkpoint"]) == (False, False, "suspend,sigterm")
    assert asked["env"]["SEED"] == "1"
    await focus_is_in(page, ".jp-Notebook")

    # The notification of it leads to the job, also after it has gone from the page.
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night.")
    await walk(page, "Tab", page.locator(".jp-Notification-Status"))
    await page.keyboard.press("Enter")
    await walk(page, "Tab", page.locator(".jp-Notification-List").get_by_role("button", name="Show job"))
    await page.keyboard.press("Enter")
    await focus_is_in(page, '.gpushare-job-row[data-job="k3v9m2x7qa"][aria-selected="true"]')


@pytest.mark.long
async def test_jobs_are_looked_through_stopped_and_retried_without_a_mouse(page, lab, broker, golden):
    night = golden("job") | {"id": "keys000001"}
    others = [night | {"id": f"keys00000{n}", "name": f"day {n}"} for n in range(2, 9)]
    broker.answer("GET jobs", {"jobs": [night, *others]})
    lab.say(golden("status_active") | {"jobs": [night]})
    broker.answer(f"GET jobs/{night['id']}/timeline", golden("timeline"))
    broker.answer(f"DELETE jobs/{night['id']}", night)
    log = log_path(lab.folder, night["id"], 1)
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"epoch {n}\n" for n in range(400)))
    await choose(page, "My training jobs")
    await focus_is_in(page, ".gpushare-job-row")
    grid = page.get_by_role("grid", name="My training jobs")
    chosen = grid.locator('[aria-selected="true"]')
    for key in ("End", "Home", "ArrowDown", "PageDown", "PageUp", "ArrowUp", "Home"):
        await page.keyboard.press(key)
        await expect(chosen).to_be_focused()
        await expect(chosen).to_be_in_viewport()
    await walk(page, "Shift+Tab", grid.get_by_role("button", name="Job"))
    await page.keyboard.press("Enter")
    await page.keyboard.press("Enter")
    await walk(page, "Shift+Tab", page.get_by_label("Filter jobs"))
    await page.keyboard.type("night")
    await expect(grid.locator(".gpushare-job-row")).to_have_count(1)
    await walk(page, "Tab", grid.locator(".gpushare-job-row"))
    await page.keyboard.press("ArrowDown")
    await expect(chosen).to_contain_text("night")

    detail = page.get_by_role("region", name="Job night")
    stop = detail.get_by_role("button", name="Stop")
    await walk(page, "Tab", detail.get_by_role("tab", name="Log"))
    await walk(page, "Tab", detail.get_by_label("Follow"))
    await page.keyboard.press("Space")
    await walk(page, "Tab", detail.get_by_label("Search the log"))
    await expect(detail.locator(".gpushare-log")).to_contain_text("epoch 399")
    await page.keyboard.type("epoch 30")
    await expect(detail.locator("mark")).to_have_count(11)
    for _ in range(2):
        await page.keyboard.press("Enter")
    await expect(detail.locator("mark").nth(2)).to_be_in_viewport()
    await walk(page, "Tab", detail.get_by_role("link", name="Download"))
    await walk(page, "Tab", detail.locator(".gpushare-log"))
    await walk(page, "Shift+Tab", detail.get_by_role("tab", name="Log"))
    await page.keyboard.press("ArrowRight")
    await expect(detail.get_by_role("tab", name="Timeline")).to_be_focused()
    await expect(detail.locator(".gpushare-timeline li")).to_have_count(5)

    # The button that was pressed keeps its place and the focus.
    await walk(page, "Shift+Tab", stop)
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_role("button", name="Let it go on")).to_be_focused()
    await walk(page, "Tab", dialog.get_by_role("button", name="Stop job"))
    await page.keyboard.press("Enter")
    await expect(stop).to_be_enabled()
    await expect(stop).to_be_focused()
    assert len(broker.asked(f"DELETE jobs/{night['id']}")) == 1
    broker.answer(f"POST jobs/{night['id']}/retry", night, 201)
    lab.say(golden("status_active") | {"jobs": [night | {"state": "cancelled", "reason": "Cancelled."}]})
    await expect(stop).to_be_disabled()
    await expect(stop).to_be_focused()
    await walk(page, "Tab", detail.get_by_role("button", name="Retry"))
    await page.keyboard.press("Enter")
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night")
    assert len(broker.asked(f"POST jobs/{night['id']}/retry")) == 1


@pytest.mark.long
async def test_a_gpu_is_kept_lent_and_woken_without_a_mouse(page, lab, broker, golden):
    lease = golden("status_active")["leases"][0]
    for verb in ("keep", "lend", "resume"):
        broker.answer(f"POST leases/{lease['id']}/{verb}", lease)
    # The sidebar, from the status bar.
    await walk(page, "Tab", page.locator(".gpushare-status button"))
    await page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_be_focused()
    release = panel.get_by_role("button", name="Release the GPU memory of train.ipynb")
    await walk(page, "Tab", panel.get_by_role("button", name="Keep it 30 min"))
    await walk(page, "Tab", release)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_contain_text("all of its variables are lost")
    await page.keyboard.press("Escape")
    await expect(release).to_be_enabled()
    await expect(release).to_be_focused()
    await walk(page, "Tab", panel.get_by_role("button", name="Run as training job"))
    await walk(page, "Tab", panel.get_by_role("button", name="All jobs"))

    # The notification is shown where no notebook is in sight, stays, and is after the status bar.
    await run_command(page, "launcher:create")
    await run_command(page, "application:toggle-right-area")
    lab.say(golden("status_warned"))
    toast = page.locator(".Toastify__toast").filter(has_text="Your GPU is lent in")
    await walk(page, "Tab", toast.get_by_role("button", name="Keep it 30 min"))
    await page.keyboard.press("Enter")
    await expect(toast).to_have_count(0)
    assert len(broker.asked(f"POST leases/{lease['id']}/keep")) == 1

    # The banner is before the notebook; when it goes, the notebook is next.
    await run_command(page, "application:activate-next-tab")
    banner = page.locator(".gpushare-banner")
    await walk(page, "Tab", banner.get_by_role("button", name="Lend it now"))
    await page.keyboard.press("Enter")
    await expect(banner.get_by_role("button", name="Lend it now")).to_be_enabled()
    assert len(broker.asked(f"POST leases/{lease['id']}/lend")) == 1
    lab.say(golden("status_asleep"))
    await expect(banner).to_contain_text("Asleep")
    await expect(banner).to_be_focused()
    await walk(page, "Tab", banner.get_by_role("button", name="Wake now"))
    await page.keyboard.press("Enter")
    lab.say(golden("status_waking"))
    await expect(banner).to_contain_text("The GPU is back in 5 to 12 s.")
    await expect(banner).to_be_focused()
    lab.say(golden("status_active"))
    await expect(banner).to_be_hidden()
    await focus_is_in(page, ".jp-Notebook")
