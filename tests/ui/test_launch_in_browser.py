"""The dialog of a training job in a real JupyterLab."""

from __future__ import annotations

import re
import sys

import pytest
from playwright.async_api import Route, expect

from tests.ui.pages import arrived, in_themes, needs_browser, picture, run_command

pytestmark = needs_browser


async def test_a_notebook_becomes_a_job_from_its_toolbar(page, lab, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    await page.locator(
        '[data-jp-item-name="gpushare-launch"] button, jp-button[data-command="gpushare:launch"]'
    ).first.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("train.ipynb")
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("Number 3. Needs 2 GPUs")
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("With 1 GPU it would start now.")
    await picture(page, "dialog")
    gpus = dialog.get_by_label("Number or part")
    await gpus.fill("1.5")
    await expect(dialog).to_contain_text("A part of one GPU like 0.5 or 1/4")
    await dialog.get_by_role("button", name="Submit").click()
    await gpus.fill("2")
    await dialog.get_by_label("Parameters").fill("lr = 0.1")
    await dialog.get_by_label("May use borrowed GPUs").uncheck()
    await expect(dialog).to_contain_text("guaranteed to its project")
    await expect(dialog).to_contain_text("It has its GPUs to itself")
    await dialog.get_by_label("Share the GPU with another job").check()
    await expect(dialog).to_contain_text("is paused when that job needs it")
    await dialog.get_by_label("Notify me").uncheck()
    await dialog.locator("summary").click()
    retries = dialog.get_by_label("Tries after a failure")
    await dialog.get_by_label("May resume on another GPU").uncheck()
    await retries.fill("11")
    await dialog.get_by_label("Maximum run time").fill("4")
    await expect(dialog).to_contain_text("A number from 0 to 10")
    await retries.fill("0")
    await expect(dialog).to_contain_text("A time with its unit, like: 30 min, 4 h or 2 d")
    await picture(page, "dialog-max-run")
    await dialog.get_by_label("Maximum run time").fill("4 h")
    await expect(dialog).not_to_contain_text("A number from 0 to 10")
    await expect(retries).to_be_visible()
    await in_themes(page, "dialog", ".gpushare-launch-dialog")
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
    assert sent[0].json == sent[1].json
    asked = sent[1].json
    expected = [sys.executable, "-X", "utf8", "-P", "-m", "jupyter_gpushare.job.notebook"]
    assert asked["command"][:6] == expected
    assert asked["command"][6] == str(lab.work / "train.ipynb")
    assert asked["command"][8:] == ["--kernel", "python3", "-p", "lr", "0.1"]
    assert (asked["gpus"], asked["source"]["parameters"]) == ("2", {"lr": "0.1"})
    assert (asked["borrow"], asked["move"], asked["notify"]) == (False, False, False)
    assert asked["share"] is True
    await page.get_by_role("button", name="Show job").click()
    await expect(page.get_by_role("grid", name="My training jobs")).to_be_visible()


async def run_from_the_file_browser(page, name: str) -> None:
    """Choose the command in a file's context menu; it takes the file that JupyterLab has selected by then.

    JupyterLab finds the selected file by the position of the pressed row, which a refresh of
    the list in that moment may have given to another file: then the menu is opened again.
    """
    row = page.locator(".jp-DirListing-item", has_text=name)
    for _ in range(5):
        await row.click(button="right")
        await expect(page.get_by_role("menuitem", name="Run as training job")).to_be_visible()
        if "jp-mod-selected" in (await row.get_attribute("class") or ""):
            break
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("menuitem", name="Run as training job")).to_have_count(0)
    await page.get_by_role("menuitem", name="Run as training job").click()


@pytest.mark.long
async def test_the_dialog_is_reached_from_files_launcher_palette_and_menu(page, lab, broker):
    (lab.work / "run.sh").write_text("echo hello")
    (lab.work / "data.csv").write_text("1")
    (lab.work / "12:30.py").write_text("1")
    await run_command(page, "filebrowser:refresh")
    dialog = page.get_by_role("dialog")
    await run_from_the_file_browser(page, "12:30.py")
    await expect(dialog.get_by_label("Notebook or script")).to_have_value("12:30.py")
    await dialog.locator("summary").click()
    await expect(dialog.get_by_label("Environment")).to_be_visible()
    await dialog.get_by_label("Arguments").press("Escape")
    await expect(dialog).to_have_count(0)
    await run_from_the_file_browser(page, "run.sh")
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


@pytest.mark.long
async def test_a_job_that_was_cancelled_too_late_is_told(page, lab, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    held: list[Route] = []
    await run_command(page, "gpushare:launch", {"path": "train.ipynb"})
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("Number 3")
    await expect(dialog.get_by_label("Parameters")).to_be_visible()
    await page.route(re.compile("/gpushare/launch\\?[0-9]+$"), lambda route: held.append(route))
    await dialog.get_by_role("button", name="Submit").click()
    await expect(dialog).to_contain_text("Submitting.")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_have_count(0)
    await arrived(held, 1)
    await held[0].continue_()
    await expect(page.locator(".Toastify")).to_contain_text("Submitted night.")


@pytest.mark.long
async def test_a_duplicate_can_be_changed_when_its_project_and_environment_are_gone(
    page, lab, broker, golden
):
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
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("Number 3")
    await dialog.locator("summary").click()
    environment = dialog.get_by_label("Environment")
    await expect(environment).to_have_value("removed")
    await environment.select_option("")
    await page.keyboard.press("Escape")


@pytest.mark.long
async def test_the_code_of_a_cell_keeps_its_lines_in_a_duplicate(page, lab, broker, golden):
    code = "for n in range(2):\n    print(n)"
    cell = golden("job") | {"state": "failed", "source": None, "variables": []}
    cell |= {"command": ["python", "-c", code]}
    lab.has_jobs([cell])
    await run_command(page, "gpushare:jobs", {"job": cell["id"]})
    await page.get_by_role("region", name="Job night").get_by_role("button", name="Duplicate").click()
    command = page.get_by_role("dialog").get_by_label("Command")
    await expect(command).to_have_value(f"python -c '{code}'")
    await command.fill(f"python -c '{code}' ")
    broker.answer("POST jobs", golden("job"), 201)
    await page.get_by_role("dialog").get_by_role("button", name="Submit").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert broker.asked("POST jobs")[-1].json["command"] == ["python", "-c", code]


@pytest.mark.long
async def test_a_click_counts_although_the_outlook_arrives_in_it(page, lab, broker, golden):
    held: list[Route] = []
    await page.route(re.compile(r"/gpushare/offers\b"), lambda route: held.append(route))
    broker.answer("POST jobs", golden("job"), 201)
    await run_command(page, "gpushare:launch", {"path": "train.ipynb"})
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_label("Parameters")).to_be_visible()
    await expect(dialog.locator(".gpushare-outlook")).to_have_text("Asking what is free.")
    await arrived(held, 1)
    submit = dialog.get_by_role("button", name="Submit")
    place = await submit.bounding_box()
    await page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] - 2)
    await page.mouse.down()
    await held[0].continue_()
    await expect(dialog.locator(".gpushare-outlook")).to_contain_text("Number 3")
    assert await submit.bounding_box() == place
    await page.mouse.up()
    await expect(dialog).to_have_count(0)
    assert len(broker.asked("POST jobs")) == 1
