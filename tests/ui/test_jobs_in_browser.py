"""Training jobs in a real JupyterLab: the dialog, the list, the log, waiting cells, and no harm done."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, Route, expect

from jupyter_gpushare.jobfiles import log_path
from tests.server.fake_broker import eventually
from tests.ui.pages import BUNDLE, THEMES, accessible, needs_browser, picture, run_command, use_theme

pytestmark = needs_browser


@pytest.fixture
async def page(lab, broker, open_page) -> AsyncIterator[Page]:
    async with open_page(lab) as page:
        await expect(page.locator(".gps-status button")).to_contain_text("Active")
        yield page


async def test_a_notebook_becomes_a_job_from_its_toolbar(page, lab, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    await page.locator(
        '[data-jp-item-name="gpushare-launch"] button, jp-button[data-command="gpushare:launch"]'
    ).first.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("train.ipynb")
    await expect(dialog.locator(".gps-outlook")).to_contain_text("Number 3. Needs 2 GPUs")
    await picture(page, "dialog")
    gpus = dialog.get_by_label("Number or part")
    await gpus.fill("1.5")
    await expect(dialog).to_contain_text("A part of one GPU like 0.5 or 1/4")
    await dialog.get_by_role("button", name="Submit").click()
    await gpus.fill("2")
    await dialog.get_by_label("Parameters").fill("lr = 0.1")
    await dialog.get_by_label("May use borrowed GPUs").uncheck()
    await expect(dialog).to_contain_text("guaranteed to its project")
    await dialog.get_by_label("Notify me").uncheck()
    await dialog.locator("summary").click()
    retries = dialog.get_by_label("Tries after a failure")
    await retries.fill("11")
    await expect(dialog).to_contain_text("A number from 0 to 10")
    await retries.fill("0")
    await expect(dialog).not_to_contain_text("A number from 0 to 10")
    await expect(retries).to_be_visible()
    for theme in THEMES:
        await use_theme(page, theme)
        await accessible(page, ".gps-launch-dialog")
    await use_theme(page, THEMES[0])
    refused = golden("error")
    broker.answer("POST jobs", refused, 409)
    await dialog.get_by_role("button", name="Submit").click()
    await expect(dialog.get_by_role("alert")).to_have_text(refused["message"])
    broker.answer("POST jobs", golden("job"), 201)
    await page.keyboard.press("Tab")
    await dialog.get_by_role("button", name="Submit").focus()
    await page.keyboard.press("Enter")
    await expect(dialog).to_have_count(0)
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night.")
    sent = broker.asked("POST jobs")
    assert len(sent) == 2
    assert sent[0].headers["Idempotency-Key"] == sent[1].headers["Idempotency-Key"]
    asked = sent[1].json
    assert asked["command"][:4] == [sys.executable, "-P", "-m", "jupyter_gpushare.job.notebook"]
    assert asked["command"][4] == str(lab.work / "train.ipynb")
    assert asked["command"][6:] == ["--kernel", "python3", "-p", "lr", "0.1"]
    assert (asked["gpus"], asked["source"]["parameters"]) == ("2", {"lr": "0.1"})
    assert (asked["borrow"], asked["notify"]) == (False, False)
    await page.get_by_role("button", name="Show job").click()
    await expect(page.get_by_role("grid", name="My training jobs")).to_be_visible()


async def test_the_dialog_is_reached_from_files_launcher_palette_and_menu(page, lab, broker):
    (lab.work / "run.sh").write_text("echo hello")
    (lab.work / "data.csv").write_text("1")
    (lab.work / "12:30.py").write_text("1")
    await run_command(page, "filebrowser:refresh")
    dialog = page.get_by_role("dialog")
    await page.locator(".jp-DirListing-item", has_text="12:30.py").click(button="right")
    await page.get_by_role("menuitem", name="Run as training job").click()
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("12:30.py")
    await dialog.locator("summary").click()
    await expect(dialog.get_by_label("Environment")).to_be_visible()
    await dialog.get_by_label("Arguments").press("Escape")
    await expect(dialog).to_have_count(0)
    await page.locator(".jp-DirListing-item", has_text="run.sh").click(button="right")
    await page.get_by_role("menuitem", name="Run as training job").click()
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("run.sh")
    await dialog.locator("summary").click()
    await expect(dialog.get_by_label("Folder")).to_be_visible()
    await expect(dialog.get_by_label("Environment")).to_have_count(0)
    await dialog.get_by_label("Arguments").press("Escape")
    await expect(dialog).to_have_count(0)
    await page.locator(".jp-DirListing-item", has_text="data.csv").click(button="right")
    await expect(page.get_by_role("menuitem", name="Download", exact=True)).to_be_visible()
    await expect(page.get_by_role("menuitem", name="Run as training job")).to_have_count(0)
    await page.keyboard.press("Escape")
    await page.get_by_role("menuitem", name="Run", exact=True).click()
    await page.get_by_role("menuitem", name="Run as training job").click()
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("train.ipynb")
    await dialog.get_by_label("Parameters").press("Escape")
    await run_command(page, "launcher:create")
    await page.locator(".jp-LauncherCard", has_text="Training job").click()
    await dialog.get_by_label("Command").press("Escape")
    await run_command(page, "apputils:activate-command-palette")
    await page.keyboard.type("Run as training")
    await expect(page.locator(".lm-CommandPalette-item", has_text="Run as training job")).to_be_visible()
    await page.keyboard.press("Escape")


async def arrived(held: list[Route], count: int) -> None:
    """Wait for so many requests, and fail on more."""
    while len(held) < count:
        await asyncio.sleep(0.05)
    assert len(held) == count


async def test_a_job_that_was_cancelled_too_late_is_told(page, lab, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    held: list[Route] = []
    await run_command(page, "gpushare:launch", {"path": "train.ipynb"})
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".gps-outlook")).to_contain_text("Number 3")
    await expect(dialog.get_by_label("Parameters")).to_be_visible()
    await page.route(re.compile("/gpushare/launch\\?[0-9]+$"), lambda route: held.append(route))
    await dialog.get_by_role("button", name="Submit").click()
    await expect(dialog).to_contain_text("Submitting.")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_have_count(0)
    await arrived(held, 1)
    await held[0].continue_()
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night.")


async def test_a_duplicate_whose_project_and_environment_are_gone_can_be_changed(page, lab, broker, golden):
    old = golden("job") | {"state": "failed", "project": "gone"}
    old["source"] |= {"path": "train.ipynb", "kernel": "removed"}
    broker.answer("GET jobs", {"jobs": [old]})
    broker.answer("GET offers", golden("error"), 403)
    lab.say(golden("status_active") | {"jobs": [old]})
    await run_command(page, "gpushare:jobs", {"job": old["id"]})
    await page.get_by_role("region", name="Job night").get_by_role("button", name="Duplicate").click()
    dialog = page.get_by_role("dialog")
    project = dialog.get_by_label("Project", exact=True)
    await expect(project).to_have_value("gone")
    broker.answer("GET offers", golden("offers"))
    await project.select_option(golden("status_active")["projects"][0]["name"])
    await expect(dialog.locator(".gps-outlook")).to_contain_text("Number 3")
    await dialog.locator("summary").click()
    environment = dialog.get_by_label("Environment")
    await expect(environment).to_have_value("removed")
    await environment.select_option("")
    await page.keyboard.press("Escape")


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
TOO_WIDE = """area => {
    const edge = area.getBoundingClientRect().left + area.clientWidth;
    return [...area.querySelectorAll('*')]
        .filter(node => node.getBoundingClientRect().right > edge + 0.5)
        .map(node => node.outerHTML.slice(0, 120));
}"""


async def loaded(page: Page) -> dict[str, int]:
    """The files of our bundle that the page has, by name: their size in bytes, compressed."""
    urls = await page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    names = {url.split("?")[0].rsplit("/", 1)[1] for url in urls if "/jupyter-gpushare/static/" in url}
    return {name: len(gzip.compress((BUNDLE / "static" / name).read_bytes())) for name in names}


async def test_a_thousand_jobs_are_one_list_that_is_loaded_when_it_is_opened(page, broker, golden):
    at_start = await loaded(page)
    assert "jupyter-gpushare:status-bar" in "".join((BUNDLE / "static" / n).read_text() for n in at_start)
    assert sum(at_start.values()) < 40_000
    broker.answer("GET jobs", many(golden, 1000))
    await run_command(page, "gpushare:jobs")
    grid = page.get_by_role("grid", name="My training jobs")
    rows = grid.locator(".gps-job-row")
    await expect(page.locator(".gps-jobs .gps-tools").first).to_contain_text("1003 jobs")
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
    await expect(page.locator(".gps-jobs .gps-tools").first).to_contain_text("of 1003 jobs")
    await page.get_by_label("Filter jobs").fill("no such job")
    await expect(grid).to_contain_text("No job is like that.")
    # Narrow, it keeps what matters.
    await page.get_by_label("Filter jobs").fill("")
    await page.set_viewport_size({"width": 700, "height": 700})
    await expect(rows.first.get_by_role("gridcell")).to_have_count(2)
    await expect(rows.first.locator(".gps-state")).to_be_in_viewport()
    assert await page.locator(".gps-jobs").evaluate(TOO_WIDE) == []
    assert len(await loaded(page)) > len(at_start)


async def test_a_job_shows_its_log_as_it_grows_its_timeline_and_what_can_be_done(page, lab, broker, golden):
    running = golden("job") | {"state": "running", "started_at": "2031-05-06T14:20:07Z"}
    running |= {"profile": "1g.10gb", "priority": 5}
    broker.answer("GET jobs", {"jobs": [running]})
    lab.say(golden("status_active") | {"jobs": [running]})
    broker.answer(f"GET jobs/{running['id']}/timeline", golden("timeline"))
    log = log_path(lab.folder, running["id"], 1)
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1 loss 0.9\n 10%|#\r 20%|##\n\x1b[31mred\x1b[0m\n")
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    detail = page.get_by_role("region", name="Job night")
    box = detail.locator(".gps-log")
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
    # Who reads further up is left there; Follow says so.
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
    await page.wait_for_function(f"() => ({bottom})(document.querySelector('.gps-log'))")
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
    await expect(detail.locator(".gps-timeline li")).to_have_count(5)
    await expect(detail).to_contain_text("another project took back its guaranteed GPU")
    await expect(detail.locator("time").first).to_contain_text("May 2031, ")
    await picture(page, "jobs-timeline")
    for theme in THEMES:
        await use_theme(page, theme)
        await accessible(page, ".gps-jobs")
        await picture(page, f"jobs-{theme.split()[-1].lower()}")
    await use_theme(page, THEMES[0])
    await detail.get_by_role("tab", name="Timeline").press("ArrowRight")
    await expect(detail.get_by_role("tab", name="About")).to_be_focused()
    await expect(detail).to_contain_text("lr = 0.1")
    await expect(detail).to_contain_text("WANDB_MODE")
    ended = running | {"state": "failed", "reason": "Ended with exit code 1.", "exit_code": 1}
    broker.answer(f"DELETE jobs/{running['id']}", ended)
    await detail.get_by_role("button", name="Stop").click()
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
    await accessible(page, ".gps-launch-dialog")
    await picture(page, "dialog-duplicate")
    await page.keyboard.press("Escape")


async def test_only_logs_that_are_kept_are_offered(page, lab, broker, golden):
    begun = golden("job") | {"state": "failed", "started_at": "2031-05-06T14:20:07Z"}
    kept, gone = begun | {"id": "kept000001", "attempt": 5}, begun | {"id": "gone000001", "name": "gone"}
    broker.answer("GET jobs", {"jobs": [kept, gone]})
    lab.say(golden("status_active") | {"jobs": [kept, gone]})
    for attempt in (3, 4, 5):
        log = log_path(lab.folder, kept["id"], attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"attempt {attempt}\n")
    broker.answer(f"GET jobs/{kept['id']}/timeline", golden("timeline"))
    await run_command(page, "gpushare:jobs", {"job": kept["id"]})
    detail = page.get_by_role("region", name="Job night")
    await expect(detail.locator(".gps-log")).to_contain_text("attempt 5")
    await expect(detail.get_by_label("Attempt").locator("option")).to_have_text(
        ["Newest attempt", "Attempt 3", "Attempt 4", "Attempt 5"]
    )
    await detail.get_by_label("Attempt").select_option("3")
    await expect(detail.locator(".gps-log")).to_contain_text("attempt 3")
    # Its timeline is asked for again when it began once more, in the same state.
    await detail.get_by_role("tab", name="Timeline").click()
    await expect(detail.locator(".gps-timeline li")).to_have_count(5)
    moments = golden("timeline")["moments"]
    broker.answer(f"GET jobs/{kept['id']}/timeline", {"moments": [*moments, moments[-1]]})
    lab.say(golden("status_active") | {"jobs": [kept | {"attempt": 6}, gone]})
    await expect(detail.locator(".gps-timeline li")).to_have_count(6)
    await run_command(page, "gpushare:jobs", {"job": gone["id"]})
    detail = page.get_by_role("region", name="Job gone")
    await expect(detail.locator(".gps-log")).to_have_text("Its log is not in your files any more.")
    moments = [moment | {"sentence": "/home/ada/" + "long_" * 100} for moment in moments]
    broker.answer(f"GET jobs/{gone['id']}/timeline", {"moments": moments})
    await detail.get_by_role("tab", name="Timeline").click()
    await expect(detail.locator(".gps-timeline li").first).to_contain_text("long_")
    await picture(page, "timeline-long")
    assert await detail.get_by_role("tabpanel").evaluate("panel => panel.scrollWidth <= panel.clientWidth")
    await page.get_by_label("Filter jobs").fill("gone failed")
    await expect(page.locator(".gps-tools").first).to_contain_text("1 of 2 jobs")


async def test_the_code_of_a_cell_keeps_its_lines_in_a_duplicate(page, lab, broker, golden):
    code = "for n in range(2):\n    print(n)"
    cell = golden("job") | {"state": "failed", "source": None, "variables": []}
    cell |= {"command": ["python", "-c", code]}
    broker.answer("GET jobs", {"jobs": [cell]})
    lab.say(golden("status_active") | {"jobs": [cell]})
    await run_command(page, "gpushare:jobs", {"job": cell["id"]})
    await page.get_by_role("region", name="Job night").get_by_role("button", name="Duplicate").click()
    command = page.get_by_role("dialog").get_by_label("Command")
    await expect(command).to_have_value(f"python -c '{code}'")
    await command.press("Control+End")
    await command.press_sequentially(" ")
    broker.answer("POST jobs", golden("job"), 201)
    await page.get_by_role("dialog").get_by_role("button", name="Submit").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert broker.asked("POST jobs")[-1].json["command"] == ["python", "-c", code]


async def test_a_job_that_knows_no_total_shows_what_is_done(page, lab, broker, golden):
    cell = [sys.executable, "-u", "-c", "train()"]
    counting = golden("job") | {"state": "running", "done": 1200.1234, "total": None, "command": cell}
    counting |= {"source": None, "started_at": "2031-05-06T14:20:07Z"}
    broker.answer("GET jobs", {"jobs": [counting]})
    lab.say(golden("status_active") | {"jobs": [counting]})
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("1,200.123 done")
    await picture(page, "panel-done")
    await accessible(page, ".gps-panel")
    await run_command(page, "gpushare:jobs", {"job": counting["id"]})
    await expect(page.get_by_role("grid")).to_contain_text("1,200.123 done")
    detail = page.get_by_role("region", name="Job night")
    await detail.get_by_role("tab", name="About").click()
    await expect(detail.locator("dt:has-text('Environment') + dd")).to_have_text(sys.executable)
    await picture(page, "jobs-about")


async def test_a_list_that_is_empty_refused_or_silent_says_so(page, lab, broker, golden):
    broker.answer("GET jobs", {"jobs": []})
    lab.say(golden("status_empty"))
    await run_command(page, "gpushare:jobs")
    jobs = page.locator(".gps-jobs")
    await expect(jobs).to_contain_text("No training jobs yet.")
    await picture(page, "jobs-empty")
    await accessible(page, ".gps-jobs")
    broker.answer("GET status", golden("error"), 409)
    await expect(jobs).to_contain_text("No news from the GPU broker since")
    broker.answers.pop("GET status")
    await jobs.get_by_role("button", name="Ask again").click()
    await expect(jobs).to_contain_text("No training jobs yet.")


async def narrow(page: Page, panel: Locator) -> None:
    """Make the sidebar 240 px wide."""
    wide = await panel.bounding_box()
    assert wide is not None
    await page.mouse.move(wide["x"] - 2, 400)
    await page.mouse.down()
    await page.mouse.move(wide["x"] + wide["width"] - 240, 400, steps=5)
    await page.mouse.up()
    await page.wait_for_function("() => document.querySelector('.gps-panel').offsetWidth <= 250")


# What of ours moves by itself.
MOVING = """() => [...document.querySelectorAll('[class*="gps-"], [class*="gps-"] *')].filter(node => {
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
    status["jobs"] = [job | {"name": name, "reason": reason} for job in status["jobs"]]
    status["events"] = [event | {"sentence": reason} for event in status["events"]]
    return status


async def test_the_sidebar_is_accessible_in_every_theme_narrow_and_still(page, lab, broker, golden):
    await page.emulate_media(reduced_motion="reduce")
    await page.locator(".jp-Notebook .cm-content").first.click()
    await page.keyboard.type("1")
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("You used 14 GPU-hours.")
    # Who came by mouse needs no ring around it; with the first key there is one.
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
        await accessible(page, ".gps-panel")
        await accessible(page, ".gps-status")
        assert await panel.evaluate(TOO_WIDE) == []
        await picture(page, f"panel-narrow-{theme.split()[-1].lower()}")
        lab.say(golden("status_warned"))
        await expect(panel).to_contain_text("2 jobs are waiting")
        await expect(page.locator(".gps-banner")).to_contain_text("Lent in 5 min")
        for selector in (".gps-panel", ".gps-banner", ".gps-status"):
            await accessible(page, selector)
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


CHARTED = "() => document.querySelector('.gps-days canvas')?.toDataURL()"


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


async def test_days_are_drawn_when_they_are_wanted_in_the_colours_of_the_theme(page, lab, broker, golden):
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("You used 14 GPU-hours.")
    at_start = await loaded(page)
    asked = len(broker.asked("GET history"))
    await page.route("**/jupyter-gpushare/static/**", lambda route: route.abort())
    button = panel.get_by_role("button", name="Show days")
    await button.focus()
    await expect(button).to_have_attribute("aria-expanded", "false")
    assert (await loaded(page)).keys() == at_start.keys()
    await page.keyboard.press("Enter")
    await expect(panel.get_by_role("alert")).to_have_text("The chart could not be loaded.")
    await accessible(page, ".gps-panel")
    await page.unroute_all()
    await page.keyboard.press("Tab")
    await expect(panel.get_by_role("button", name="Try again")).to_be_focused()
    await page.keyboard.press("Enter")
    chart = panel.get_by_role("img", name="GPU-hours a day.")
    canvas = chart.locator("canvas")
    await expect(canvas).to_be_visible()
    assert ": 2.0 used, 2.4 given to others" in await chart.get_attribute("aria-label")
    assert (await loaded(page)).keys() > at_start.keys()
    assert len(broker.asked("GET history")) == asked

    await narrow(page, panel)
    await page.wait_for_function("""() => {
        const host = document.querySelector('.gps-days');
        return host.querySelector('.uplot').offsetWidth === host.clientWidth;
    }""")
    for theme in [*THEMES[1:], THEMES[0]]:
        before = await page.evaluate(CHARTED)
        await use_theme(page, theme)
        await page.wait_for_function(f"before => ({CHARTED})() !== before", arg=before)
        await accessible(page, ".gps-panel")
        assert await panel.evaluate(TOO_WIDE) == []
        await canvas.scroll_into_view_if_needed()
        await picture(page, f"days-{theme.split()[-1].lower()}")

    # Nothing is drawn where nobody sees it.
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    await expect(canvas).to_have_count(0)
    await page.locator('.lm-TabBar-tab[data-id="gpushare-panel"]').click()
    await expect(canvas).to_be_visible()
    await panel.get_by_role("button", name="Hide days").press("Enter")
    await expect(canvas).to_have_count(0)
    await expect(button).to_be_focused()


UNTIL_TOLD = """from pathlib import Path
import time
while not Path("told").exists():
    time.sleep(0.1)"""


async def test_a_cell_that_waits_says_so_below_itself_and_only_on_the_page(page, lab, broker, golden):
    await page.locator(".jp-Notebook .jp-Cell").first.click()
    await page.locator(".jp-Notebook .cm-content").first.click()
    await page.keyboard.insert_text(UNTIL_TOLD)
    lab.say(golden("status_asleep"))
    await expect(page.locator(".gps-banner")).to_contain_text("Asleep")
    await page.keyboard.press("Shift+Enter")
    lab.say(golden("status_waking"))
    line = page.locator(".jp-Cell .gps-cell-line")
    await expect(page.locator(".gps-banner")).to_contain_text("s so far")
    await expect(line).to_contain_text("Waking up: step")
    for theme in THEMES:
        await use_theme(page, theme)
        await accessible(page, ".gps-banner")
        await accessible(page, ".gps-cell-line")
    await use_theme(page, THEMES[0])
    await picture(page, "cell-waits")
    await run_command(page, "docmanager:save")
    (lab.work / "told").touch()
    await expect(line).to_have_count(0)
    assert "Waking up" not in (lab.work / "train.ipynb").read_text()

    # What was cancelled by a restart of the kernel does not wait for anything.
    (lab.work / "told").unlink()
    lab.say(golden("status_asleep"))
    await expect(page.locator(".gps-banner")).to_contain_text("Asleep")
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    await cell.click()
    await page.keyboard.press("Control+Enter")
    lab.say(golden("status_waking"))
    await expect(line).to_contain_text("Waking up: step")
    await run_command(page, "kernelmenu:restart")
    await page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    await expect(line).to_have_count(0)
    await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=60_000)
    (lab.work / "told").touch()
    lab.say(golden("status_active"))
    await expect(page.locator(".gps-banner")).to_be_hidden()


async def test_a_gpu_whose_memory_is_lost_is_never_said_to_be_back(page, lab, golden):
    banner, toasts = page.locator(".gps-banner"), page.locator(".Toastify")
    lab.say(golden("status_waking"))
    await expect(banner).to_contain_text("Getting the GPU back")
    lab.say(golden("status_lost"))
    lost = "Your GPU memory could not be brought back"
    await expect(banner).to_contain_text(f"GPU state lost. {lost} (the driver refused: CUDA error 46), so ")
    await expect(banner).to_contain_text("Files are safe. Reference ")
    told = f"{lost}: the kernels that used it have to restart. Your files are safe."
    await expect(toasts).to_contain_text(told)
    await expect(page.locator(".gps-status button.gps-attention")).to_contain_text("GPU state lost")
    await accessible(page, ".gps-banner")
    await picture(page, "banner-lost")
    lab.say(golden("status_active"))
    await expect(banner).to_be_hidden()
    await expect(toasts).not_to_contain_text(told)


async def test_what_happened_while_no_page_was_open_is_told_by_the_next(lab, broker, golden, open_page):
    living = golden("job") | {"state": "running"}
    lab.say(golden("status_active") | {"jobs": [living]})
    async with open_page(lab) as page:
        await expect(page.locator(".gps-status button")).to_contain_text("Active")
        # The state database of JupyterLab saves with a delay.
        saved = f'"newest": "{living["submitted_at"]}"'
        await asyncio.to_thread(eventually, lambda: saved in workspaces(lab), 60)
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
    "status-bar": ".gps-status button",
    "panel": ".gps-panel",
    "banner": ".gps-banner b",
    "notifications": ".Toastify__toast",
    "jobs": '[data-jp-item-name="gpushare-launch"]',
}
IN_USE = ".gps-status button:has-text('Active'), .gps-panel:has-text('is in use')"


async def test_each_plugin_can_be_disabled_alone(lab, broker, golden, open_page):
    page_config = lab.folder / "config" / "labconfig" / "page_config.json"
    page_config.parent.mkdir()
    async with open_page(lab) as page:
        for disabled in SIGNS:
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
            await expect(page.locator(SIGNS[disabled])).to_have_count(0)
    page_config.unlink()


async def test_what_is_set_holds(lab, broker, golden, open_page):
    mine = lab.folder / "config" / "jupyter-gpushare" / "model.jupyterlab-settings"
    mine.parent.mkdir()
    mine.write_text(json.dumps({"keepMinutes": 45, "banner": False, "toasts": False, "refreshSeconds": 300}))
    async with open_page(lab) as page:
        await page.locator(".gps-status button").click()
        panel = page.get_by_role("region", name="Shared GPU")
        await expect(panel.get_by_role("button", name="Keep it 45 min")).to_be_visible()
        broker.seen.clear()
        lab.say(golden("status_warned"))
        await expect(panel).to_contain_text("Lent in 5 min")
        await expect(page.locator(".gps-banner")).to_be_hidden()
        await expect(page.locator(".Toastify__toast")).to_have_count(0)
        lease = golden("status_warned")["leases"][0]
        broker.answer(f"POST leases/{lease['id']}/keep", lease)
        await panel.get_by_role("button", name="Keep it 45 min").click()
        await asyncio.to_thread(eventually, lambda: broker.asked(f"POST leases/{lease['id']}/keep"), 30)
        assert broker.asked(f"POST leases/{lease['id']}/keep")[0].json == {"minutes": 45.0}
    mine.unlink()


async def test_a_hidden_page_asks_nothing_and_a_visible_one_in_turn(page, lab, broker, golden):
    running = golden("job") | {"id": "hidden0001", "state": "running", "started_at": "2031-05-06T14:20:07Z"}
    broker.answer("GET jobs", {"jobs": [running]})
    lab.say(golden("status_active") | {"jobs": [running]})
    log = log_path(lab.folder, running["id"], 1)
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1\n")
    await run_command(page, "gpushare:jobs", {"job": running["id"]})
    await expect(page.locator(".gps-log")).to_contain_text("epoch 1")
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
