"""The list of training jobs, their logs and timelines in a real JupyterLab."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from jupyter_gpushare.protocol.heldlog import HeldLog
from jupyter_gpushare.protocol.jobfiles import BoundedLog, Disk, log_path
from tests.ui.pages import (
    BUNDLE,
    THEMES,
    TOO_WIDE,
    accessible,
    in_themes,
    loaded,
    needs_browser,
    picture,
    queue,
    run_command,
)
from tests.waiting import until

pytestmark = needs_browser


def many(golden: Any, count: int) -> dict[str, Any]:
    """A list of ``count`` jobs, newest first."""
    job = golden("job")
    states = ["running", "queued", "suspended", "succeeded", "failed", "cancelled"]
    return {
        "jobs": [
            job
            | {
                "id": f"job{n:07}",
                "name": f"train {n}",
                "state": states[n % 6],
                "submitted_at": f"2031-05-{1 + n % 28:02}T10:00:00Z",
                "ran_s": 10.0 * n,
                "done": float(n % 10),
                "total": 10.0,
                "position": None,
            }
            for n in range(count)
        ]
    }


# What sticks out of an area to the right.
@pytest.mark.long
async def test_a_thousand_jobs_are_one_list_that_is_loaded_when_it_is_opened(page, broker, golden):
    at_start = await loaded(page)
    assert "jupyter-gpushare:status-bar" in "".join((BUNDLE / "static" / n).read_text() for n in at_start)
    assert sum(at_start.values()) < 40_000
    broker.answer("GET jobs", many(golden, 1000))
    await run_command(page, "gpushare:jobs")
    grid = page.get_by_role("grid", name="My training jobs")
    rows = grid.locator(".gpushare-job-row")
    await expect(page.locator(".gpushare-jobs .gpushare-tools").first).to_contain_text("1003 jobs")
    assert await grid.get_attribute("aria-rowcount") == "1004"
    assert await rows.count() < 60
    await grid.get_by_role("button", name="Ran").click()
    await grid.get_by_role("button", name="Ran").click()
    await expect(rows.first).to_contain_text("train 999")
    await rows.first.focus()
    await page.keyboard.press("End")
    await expect(grid.locator('[aria-selected="true"]')).to_be_visible()
    await page.keyboard.press("Home")
    await expect(grid.locator('[aria-selected="true"]')).to_contain_text("train 999")
    await page.keyboard.press("ArrowDown")
    await expect(grid.locator('[aria-selected="true"]')).to_contain_text("train 998")
    await page.get_by_label("Filter jobs").fill("train 99 failed")
    await expect(page.locator(".gpushare-jobs .gpushare-tools").first).to_contain_text("of 1003 jobs")
    await page.get_by_label("Filter jobs").fill("no such job")
    await expect(grid).to_contain_text("No job is like that.")
    # Narrow, it keeps what matters.
    await page.get_by_label("Filter jobs").fill("")
    await page.set_viewport_size({"width": 700, "height": 700})
    await expect(rows.first.get_by_role("gridcell")).to_have_count(2)
    await expect(rows.first.locator(".gpushare-state")).to_be_in_viewport()
    assert await page.locator(".gpushare-jobs").evaluate(TOO_WIDE) == []
    assert len(await loaded(page)) > len(at_start)


@pytest.mark.long
async def test_a_failed_job_shows_the_lines_that_it_printed_last(page, lab, broker, golden):
    lines = ["Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: bad"]
    head = "Ended with exit code 1. It last printed:"
    failed = golden("job") | {"state": "failed", "reason": "\n".join([head, *lines])}
    ended = {"key": "reason.exit_code", "args": ["1"]}
    failed |= {"reason_texts": [{"key": "reason.last_printed", "args": [ended, "\n".join(lines)]}]}
    lab.has_jobs([failed])
    await run_command(page, "gpushare:jobs", {"job": failed["id"]})
    row = page.locator(".gpushare-job-row .gpushare-reason")
    # One reason is in one place: of the selected job in its detail, of others in their rows.
    await expect(row).to_have_text(failed["project"])
    told = page.get_by_role("region", name="Job night").get_by_role("status").first
    assert (await told.inner_text()).split("\n") == [head, *lines]
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    mine = page.locator(".gpushare-panel .gpushare-job")
    await expect(mine).to_contain_text("Failed")
    await expect(mine).not_to_contain_text(head)
    await in_themes(page, "jobs-failed", ".gpushare-jobs", themes=THEMES[:2])
    await run_command(page, "application:close")
    await expect(mine).to_contain_text(f"{head} ValueError: bad")
    await run_command(page, "gpushare:jobs")
    await expect(row).to_have_text(f"{head} ValueError: bad")
    await expect(mine).not_to_contain_text(head)


@pytest.mark.long
async def test_the_list_says_when_a_measured_job_ends(page, broker, golden):
    running, *others = golden("job_list")["jobs"]
    assert running["state"] == "running"
    running |= {
        "reason": "Ends in 2 to 4 h.",
        "reason_texts": [{"key": "job.ends_in", "args": [{"key": "range.hours", "args": ["2", "4"]}]}],
        "left_s": 9_000.0,
        "ends_in": {"low_s": 7_200.0, "high_s": 14_400.0},
    }
    broker.answer("GET jobs", {"jobs": [running, *others]})
    await run_command(page, "gpushare:jobs")
    row = page.locator(f"[data-job={running['id']}]")
    await expect(row).to_contain_text("Ends in 2 to 4 h.")
    # One message in one place: the progress beside it does not say it again.
    await expect(row.get_by_role("gridcell").last).to_have_text("3 of 10")
    await in_themes(page, "list", ".gpushare-jobs")


@pytest.mark.long
async def test_a_narrow_list_shows_a_whole_reason(page, lab, broker, golden):
    said = "Number 3. Needs 2 GPUs together; 1.25 are free. With 1 GPU it would start now."
    waiting = [job | {"reason": said, "reason_texts": []} for job in queue(golden, 40)]
    broker.answer("GET jobs", {"jobs": waiting})
    lab.say(golden("status_active") | {"jobs": []})
    await page.set_viewport_size({"width": 700, "height": 700})
    await run_command(page, "gpushare:jobs")
    reason = page.locator(".gpushare-job-row .gpushare-reason").first
    await expect(reason).to_have_text(said)
    whole = "reason => reason.scrollHeight <= reason.clientHeight && reason.scrollWidth <= reason.clientWidth"
    await page.wait_for_function(f"() => ({whole})(document.querySelector('.gpushare-reason'))")
    await in_themes(page, "jobs-narrow", themes=THEMES[:2])
    rows = page.locator(".gpushare-job-row")
    await rows.first.focus()
    await page.keyboard.press("End")
    await expect(rows.and_(page.locator('[aria-selected="true"]'))).to_contain_text("train 40")
    await expect(rows.and_(page.locator('[aria-selected="true"]'))).to_be_in_viewport()


async def test_a_job_shows_its_log_as_it_grows_its_timeline_and_what_can_be_done(page, lab, broker, golden):
    running = golden("job") | {"state": "running", "started_at": "2031-05-06T14:20:07Z"}
    running |= {"profile": "1g.10gb", "priority": 5}
    lab.has_jobs([running])
    broker.answer(f"GET jobs/{running['id']}/timeline", golden("timeline"))
    log = log_path(lab.folder, running["id"], 1)
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1 loss 0.9\n 10%|#\r 20%|##\n\x1b[31mred\x1b[0m\n")
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    detail = page.get_by_role("region", name="Job night")
    box = detail.locator(".gpushare-log")
    await expect(box).to_contain_text("epoch 1 loss 0.9\n 20%|##\nred")
    with log.open("a") as file:
        file.write("".join(f"epoch {n}\n" for n in range(2, 200)))
    await expect(box).to_contain_text("epoch 199")
    bottom = "box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2"
    assert await box.evaluate(bottom)
    await detail.get_by_label("Search the log").fill("EPOCH 19")
    await expect(detail.locator("mark")).to_have_count(11)
    await detail.get_by_label("Search the log").fill("")
    async with page.expect_download() as download:
        await detail.get_by_role("link", name="Download").click()
    assert "epoch 199" in Path(await (await download.value).path()).read_text()
    await picture(page, "jobs-log")
    # A log scrolled up stays there; Follow says so.
    follow = detail.get_by_label("Follow")
    await expect(follow).to_be_checked()
    await box.hover()
    await page.mouse.wheel(0, -300)
    await expect(follow).not_to_be_checked()
    top = await box.evaluate("box => box.scrollTop")
    with log.open("a") as file:
        file.write("".join(f"step {n}\n" for n in range(100)))
    await expect(box).to_contain_text("step 99")
    assert await box.evaluate("box => box.scrollTop") == top
    await follow.check()
    assert await box.evaluate(bottom)
    await box.focus()
    await page.keyboard.press("PageUp")
    await expect(follow).not_to_be_checked()
    await page.keyboard.press("End")
    await expect(follow).to_be_checked()
    with log.open("a") as file:
        file.write("".join(f"last {n}\n" for n in range(100)))
    await expect(box).to_contain_text("last 99")
    assert await box.evaluate(bottom)
    await page.set_viewport_size({"width": 1280, "height": 700})
    await page.wait_for_function(f"() => ({bottom})(document.querySelector('.gpushare-log'))")
    await page.set_viewport_size({"width": 1280, "height": 800})
    await expect(follow).to_be_checked()
    # Nothing is read in a tab that is hidden; shown again, it goes on where it was.
    await page.get_by_role("tab", name="train.ipynb").click()
    await expect(box).to_be_hidden()
    with log.open("a") as file:
        file.write("".join(f"back {n}\n" for n in range(100)))
    await run_command(page, "gpushare:jobs")
    await expect(box).to_contain_text("back 99")
    await expect(follow).to_be_checked()
    assert await box.evaluate(bottom)
    await detail.get_by_role("tab", name="Timeline").click()
    await expect(detail.locator(".gpushare-timeline li")).to_have_count(5)
    await expect(detail).to_contain_text("another project took back its guaranteed GPU")
    await expect(detail.locator(".gpushare-timeline b").nth(1)).to_have_text("Starting")
    await expect(detail.locator(".gpushare-timeline")).to_contain_text("Your job night (1 GPU) starts: ")
    await expect(detail.locator("time").first).to_contain_text("May 2031, ")
    await picture(page, "jobs-timeline")
    await in_themes(page, "jobs", ".gpushare-jobs")
    await detail.get_by_role("tab", name="Timeline").press("ArrowRight")
    await expect(detail.get_by_role("tab", name="About")).to_be_focused()
    await expect(detail).to_contain_text("lr = 0.1")
    await expect(detail).to_contain_text("WANDB_MODE")
    ended = running | {"state": "failed", "reason": "Ended with exit code 1.", "exit_code": 1}
    broker.answer(f"DELETE jobs/{running['id']}", ended)
    await detail.get_by_role("button", name="Stop").click()
    await page.get_by_role("dialog").get_by_role("button", name="Stop job").click()
    lab.say(golden("status_active") | {"jobs": [ended]})
    await expect(page.locator(".Toastify")).to_contain_text("night: Failed")
    broker.answer(f"POST jobs/{running['id']}/retry", golden("job"), 201)
    await detail.get_by_role("button", name="Retry").click()
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night")
    await detail.get_by_role("button", name="Duplicate").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("vision/train.ipynb")
    await expect(dialog.get_by_label("Parameters")).to_have_value("lr = 0.1")
    await expect(dialog.get_by_role("radio", name="MIG instance 1g.10gb")).to_be_checked()
    await expect(dialog).to_contain_text("Variables with the value that this server has: WANDB_MODE")
    await expect(dialog).to_contain_text("Priority in its project: 5")
    await accessible(page, ".gpushare-launch-dialog")
    await picture(page, "dialog-duplicate")
    await page.keyboard.press("Escape")


@pytest.mark.long
async def test_a_log_that_the_disk_does_not_take_is_shown_from_memory_with_the_reason(
    page, lab, golden, tmp_path
):
    running = golden("job") | {"id": secrets.token_hex(5), "state": "running"}
    lab.has_jobs([running])
    (tmp_path / "file").touch()
    log = BoundedLog(tmp_path / "file" / "attempt-1.log", Disk())
    log.write(b"epoch 1\n")
    async with HeldLog(running["id"], 1, log):
        await run_command(page, "gpushare:jobs", {"job": running["id"]})
        detail = page.get_by_role("region", name="Job night")
        await expect(detail.locator(".gpushare-log")).to_contain_text("epoch 1")
        log.write(b"epoch 2\n")
        await expect(detail.locator(".gpushare-log")).to_contain_text("epoch 2")
        await expect(detail).to_contain_text(f"16 bytes of this log were not written: {log.why}.")
    # The last words stay in sight when the runner has gone.
    await expect(detail.locator(".gpushare-log")).to_contain_text("epoch 2")


async def test_a_log_is_followed_on_when_its_height_changes_before_a_scroll_event(page, lab, broker, golden):
    running = golden("job") | {"state": "running"}
    lab.has_jobs([running])
    log = log_path(lab.folder, running["id"], 1)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"epoch {n}\n" for n in range(200)))
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    detail = page.get_by_role("region", name="Job night")
    box = detail.locator(".gpushare-log")
    await expect(box).to_contain_text("epoch 199")
    await detail.get_by_label("Search the log").fill("EPOCH 19")
    await expect(detail.locator("mark")).to_have_count(11)
    # Both before the next frame, as on a slow machine: the event of the first comes after the second.
    await box.evaluate(
        """box => new Promise(done => {
            requestAnimationFrame(() => setTimeout(() => {
                box.addEventListener("scroll", () => setTimeout(done), { once: true });
                box.scrollTop -= 1;
                box.style.height = "100px";
                box.style.flex = "none";
            }));
        })"""
    )
    await detail.get_by_label("Search the log").fill("")
    await expect(detail.locator("mark")).to_have_count(0)
    assert await detail.get_by_label("Follow").is_checked()
    await page.wait_for_function(
        "box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2", arg=await box.element_handle()
    )
    # The keyboard still scrolls up at that height.
    await box.focus()
    await page.keyboard.press("PageUp")
    await expect(detail.get_by_label("Follow")).not_to_be_checked()


async def test_a_stop_says_what_is_lost_and_two_clicks_are_one(page, lab, broker, golden):
    running = golden("job") | {"state": "running", "started_at": "2031-05-06T14:20:07Z", "done": 3.0}
    running |= {"ran_s": 4 * 3600.0, "total": 10.0}
    lab.has_jobs([running])
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    detail = page.get_by_role("region", name="Job night")
    stop = detail.get_by_role("button", name="Stop")
    place = await stop.bounding_box()
    await stop.dblclick()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Stop night?")
    await expect(dialog).to_contain_text("It ran for 4 h (3 of 10).")
    await expect(dialog).to_contain_text("Its last checkpoint is not known")
    await in_themes(page, "stop", ".jp-Dialog", themes=THEMES[:2])
    await dialog.get_by_role("button", name="Let it go on").click()
    await expect(dialog).to_have_count(0)
    assert broker.asked(f"DELETE jobs/{running['id']}") == []
    ended = running | {"state": "cancelled", "reason": "It was stopped on request."}
    broker.answer(f"DELETE jobs/{running['id']}", running | {"state": "stopping"})
    await stop.click()
    await expect(dialog.get_by_role("button", name="Let it go on")).to_be_focused()
    await dialog.get_by_role("button", name="Stop job").click()
    await expect(dialog).to_have_count(0)
    lab.say(golden("status_active") | {"jobs": [ended]})
    # While the stop is under way the button is disabled too, and that may end before these news arrive.
    await expect(detail).to_contain_text("It was stopped on request.")
    await expect(stop).to_have_attribute("aria-disabled", "true")
    assert await stop.bounding_box() == place
    await stop.click(force=True)
    await expect(dialog).to_have_count(0)
    assert len(broker.asked(f"DELETE jobs/{running['id']}")) == 1
    assert broker.asked(f"POST jobs/{running['id']}/retry") == []


@pytest.mark.long
async def test_a_job_that_has_not_begun_leaves_the_queue_and_comes_back(page, lab, broker, golden):
    queued = golden("job") | {"state": "queued", "attempt": 0, "started_at": None, "position": 2}
    lab.has_jobs([queued])
    broker.answer(f"DELETE jobs/{queued['id']}", queued | {"state": "cancelled"})
    await run_command(page, "gpushare:jobs", {"job": queued["id"]})
    stop = page.get_by_role("region", name="Job night").get_by_role("button", name="Stop")
    await stop.click()
    await expect(page.locator(".Toastify")).to_contain_text("night leaves the queue.")
    await expect(stop).to_have_attribute("aria-disabled", "true")
    await picture(page, "stop-undo")
    await page.locator(".Toastify").get_by_role("button", name="Undo").click()
    await expect(stop).to_have_attribute("aria-disabled", "false")
    assert broker.asked(f"DELETE jobs/{queued['id']}") == []
    await stop.click()
    # The page goes before the time to undo is over.
    await page.goto("about:blank")
    until(lambda: broker.asked(f"DELETE jobs/{queued['id']}"))


@pytest.mark.long
async def test_only_logs_that_are_kept_are_offered(page, lab, broker, golden):
    begun = golden("job") | {"state": "failed", "started_at": "2031-05-06T14:20:07Z"}
    kept, gone = begun | {"id": "kept000001", "attempt": 5}, begun | {"id": "gone000001", "name": "gone"}
    lab.has_jobs([kept, gone])
    for attempt in (3, 4, 5):
        log = log_path(lab.folder, kept["id"], attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"attempt {attempt}\n")
    broker.answer(f"GET jobs/{kept['id']}/timeline", golden("timeline"))
    await run_command(page, "gpushare:jobs", {"job": kept["id"]})
    detail = page.get_by_role("region", name="Job night")
    await expect(detail.locator(".gpushare-log")).to_contain_text("attempt 5")
    await expect(detail.get_by_label("Attempt").locator("option")).to_have_text(
        ["Newest attempt", "Attempt 3", "Attempt 4", "Attempt 5"]
    )
    await detail.get_by_label("Attempt").select_option("3")
    await expect(detail.locator(".gpushare-log")).to_contain_text("attempt 3")
    # Its timeline is asked for again when it began once more, in the same state.
    await detail.get_by_role("tab", name="Timeline").click()
    await expect(detail.locator(".gpushare-timeline li")).to_have_count(5)
    moments = golden("timeline")["moments"]
    broker.answer(f"GET jobs/{kept['id']}/timeline", {"moments": [*moments, moments[-1]]})
    lab.say(golden("status_active") | {"jobs": [kept | {"attempt": 6}, gone]})
    await expect(detail.locator(".gpushare-timeline li")).to_have_count(6)
    await run_command(page, "gpushare:jobs", {"job": gone["id"]})
    detail = page.get_by_role("region", name="Job gone")
    await expect(detail.locator(".gpushare-log")).to_have_text("Its log is not in your files any more.")
    moments = [
        moment | {"sentence": "/home/ada/" + "long_" * 100, "sentence_texts": []} for moment in moments
    ]
    broker.answer(f"GET jobs/{gone['id']}/timeline", {"moments": moments})
    await detail.get_by_role("tab", name="Timeline").click()
    await expect(detail.locator(".gpushare-timeline li").first).to_contain_text("long_")
    await picture(page, "timeline-long")
    assert await detail.get_by_role("tabpanel").evaluate("panel => panel.scrollWidth <= panel.clientWidth")
    await page.get_by_label("Filter jobs").fill("gone failed")
    await expect(page.locator(".gpushare-tools").first).to_contain_text("1 of 2 jobs")


@pytest.mark.long
async def test_a_job_that_knows_no_total_shows_what_is_done(page, lab, broker, golden):
    cell = [sys.executable, "-u", "-c", "train()"]
    counting = golden("job") | {"state": "running", "done": 1200.1234, "total": None, "command": cell}
    counting |= {"source": None, "started_at": "2031-05-06T14:20:07Z"}
    lab.has_jobs([counting])
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("1,200.123 done")
    await picture(page, "panel-done")
    await accessible(page, ".gpushare-panel")
    await run_command(page, "gpushare:jobs", {"job": counting["id"]})
    await expect(page.get_by_role("grid")).to_contain_text("1,200.123 done")
    detail = page.get_by_role("region", name="Job night")
    await detail.get_by_role("tab", name="About").click()
    await expect(detail.locator("dt:has-text('Environment') + dd")).to_have_text(sys.executable)
    await picture(page, "jobs-about")


@pytest.mark.long
async def test_a_list_that_is_empty_refused_or_silent_says_so(page, lab, broker, golden):
    broker.answer("GET jobs", {"jobs": []})
    lab.say(golden("status_empty"))
    await run_command(page, "gpushare:jobs")
    jobs = page.locator(".gpushare-jobs")
    await expect(jobs).to_contain_text("No training jobs yet.")
    await picture(page, "jobs-empty")
    await accessible(page, ".gpushare-jobs")
    broker.answer("GET status", golden("error"), 409)
    await expect(jobs).to_contain_text("No news from the GPU broker since")
    broker.answers.pop("GET status")
    await jobs.get_by_role("button", name="Ask again").click()
    await expect(jobs).to_contain_text("No training jobs yet.")


@pytest.mark.long
async def test_a_session_that_waits_is_listed_with_its_number_and_reason(page, lab, broker, golden):
    said = "Number 2. Needs 1 GPU; 0.25 are free."
    waits = {"user": "ada", "server": "big", "project": "vision", "size": "1 GPU", "position": 2}
    waits |= {"sentence": said}
    broker.answer("GET jobs", {"jobs": []})
    lab.say(golden("status_active") | {"waiting": [waits, waits | {"server": "", "position": 3}], "jobs": []})
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    mine = page.locator(".gpushare-panel").get_by_role("region", name="My sessions that wait")
    await expect(mine.get_by_role("listitem").first).to_contain_text("bigQueued, number 2")
    await expect(mine.get_by_role("listitem").last).to_contain_text("Default serverQueued, number 3")
    await expect(mine.get_by_role("listitem").first).to_contain_text(said)
    await run_command(page, "gpushare:jobs")
    listed = page.locator(".gpushare-jobs").get_by_role("region", name="My sessions that wait")
    await expect(listed.get_by_role("listitem").first).to_contain_text(said)
    await expect(page.locator(".gpushare-jobs")).to_contain_text("No training jobs yet.")
    await expect(mine).not_to_contain_text(said)  # in one place
    await in_themes(page, "jobs-sessions-wait", ".gpushare-jobs", ".gpushare-panel", themes=THEMES[:2])
    lab.say(golden("status_active") | {"jobs": []})
    await expect(page.locator(".gpushare-waiting")).to_have_count(0)
