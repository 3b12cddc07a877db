"""Jobs that wait in the queue: selected, moved and changed in the list of a real JupyterLab."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.ui.pages import (
    THEMES,
    in_themes,
    needs_browser,
    queue,
    run_command,
)
from tests.waiting import until

pytestmark = needs_browser


@pytest.mark.long
async def test_several_jobs_are_selected_and_stopped_at_once(page, lab, broker, golden):
    running = golden("job") | {"id": "runs", "name": "night", "state": "running", "ran_s": 4 * 3600.0}
    jobs = [running, *queue(golden, 3)]
    lab.has_jobs(jobs)
    for job in jobs:
        broker.answer(f"DELETE jobs/{job['id']}", job | {"state": "stopping"})
    await run_command(page, "gpushare:jobs")
    grid = page.get_by_role("grid", name="My training jobs")
    stop = page.get_by_role("button", name="Stop selected")
    await expect(stop).to_have_attribute("aria-disabled", "true")
    # A click on a mark selects, and opens no job.
    await grid.get_by_role("checkbox", name="Select night").check()
    await expect(page.get_by_role("region", name="Job night")).to_have_count(0)
    # The keyboard marks the row that it is on.
    await grid.locator('[data-job="wait1"]').click()
    await page.keyboard.press("Space")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Space")
    await expect(page.locator(".gpushare-jobs .gpushare-tools").first).to_contain_text("3 selected")
    await in_themes(page, "jobs-selected", ".gpushare-jobs", themes=THEMES[:2])
    await stop.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Stop 3 jobs?")
    await expect(dialog).to_contain_text("night It ran for 4 h")
    await expect(dialog).to_contain_text("train 1 It has not begun: nothing is lost.")
    await in_themes(page, "stop-several", ".jp-Dialog", themes=THEMES[:2])
    await dialog.get_by_role("button", name="Stop jobs").click()
    await expect(page.locator(".Toastify")).to_contain_text("2 jobs leave the queue.")
    for id in ("runs", "wait1", "wait2"):
        until(lambda id=id: broker.asked(f"DELETE jobs/{id}"))
    assert broker.asked("DELETE jobs/wait3") == []


@pytest.mark.long
async def test_a_queued_job_is_moved_with_buttons_and_with_the_keyboard(page, lab, broker, golden):
    jobs = queue(golden, 3)
    lab.has_jobs(jobs)
    broker.answer("PUT jobs/wait2/place", jobs[1])
    await run_command(page, "gpushare:jobs", {"job": "wait2"})
    detail = page.get_by_role("region", name="Job train 2")
    await detail.get_by_role("button", name="Move up").click()
    until(lambda: broker.asked("PUT jobs/wait2/place"))
    assert broker.asked("PUT jobs/wait2/place")[-1].json == {"before": "wait1", "behind": None}
    moved = [jobs[1] | {"position": 1}, jobs[0] | {"position": 2}, jobs[2]]
    lab.has_jobs(moved)
    rows = page.get_by_role("grid", name="My training jobs").locator(".gpushare-job-row")
    await expect(rows.first).to_contain_text("train 2")
    await expect(detail.get_by_role("button", name="Move up")).to_have_attribute("aria-disabled", "true")
    await page.locator('[data-job="wait2"]').focus()
    await page.keyboard.press("Alt+ArrowDown")
    until(lambda: len(broker.asked("PUT jobs/wait2/place")) == 2)
    assert broker.asked("PUT jobs/wait2/place")[-1].json == {"before": None, "behind": "wait1"}


async def test_a_queued_job_is_changed_and_a_refusal_leaves_the_dialog_open(page, lab, broker, golden):
    (job,) = queue(golden, 1)
    lab.has_jobs([job])
    said = "job wait1 has started: only jobs in the queue are changed"
    broker.answer("PUT jobs/wait1", {"status": 409, "reason": "conflict", "message": said}, 409)
    await run_command(page, "gpushare:jobs", {"job": "wait1"})
    await page.get_by_role("region", name="Job train 1").get_by_role("button", name="Change…").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Change train 1")
    await dialog.get_by_label("Priority in its project").fill("-")
    await expect(dialog).to_contain_text("A whole number from -100 to 100")
    await dialog.get_by_label("Priority in its project").fill("-5")
    await dialog.get_by_label("Maximum run time").fill("4 h")
    await in_themes(page, "dialog-change", ".gpushare-launch-dialog", themes=THEMES[:2])
    await dialog.get_by_role("button", name="Change", exact=True).click()
    await expect(dialog.get_by_role("alert")).to_contain_text("has started: only jobs in the queue")
    changed = job | {"priority": -5, "max_run_s": 14400.0}
    broker.answer("PUT jobs/wait1", changed)
    await dialog.get_by_role("button", name="Change", exact=True).click()
    await expect(dialog).to_have_count(0)
    assert broker.asked("PUT jobs/wait1")[-1].json == {
        "gpus": None,
        "memory": None,
        "profile": None,
        "project": None,
        "priority": -5,
        "max_run_s": 14400,
    }
