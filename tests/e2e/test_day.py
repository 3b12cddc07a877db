"""A day with gpushare, by clicks alone: two people, two browsers, one demo hub.

Set GPUSHARE_PICTURES to a folder to keep a picture of each step there, in the light and in
the dark theme; the pictures of docs/a-day.md are made so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.e2e.demo import DemoHub, until
from tests.ui.pages import is_complaint, sign_in
from tests.waiting import PATIENCE_S

PICTURES = os.environ.get("GPUSHARE_PICTURES")

# Sessions sleep later for pictures.
PAGE_MS = 150_000 if PICTURES else 1000 * PATIENCE_S
expect.set_options(timeout=PAGE_MS)

ALLOCATE = """from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
weights = gpu.allocate("6GiB")
weights.fill(seed=42)"""
TOO_MUCH = '%xmode Minimal\ngpu.allocate("40GiB")'
UNTIL_LUNCH = """from pathlib import Path
import time
while not Path("lunch").exists():
    time.sleep(0.1)"""
MEMORY = re.compile(r"^6\.\d of \d+ GiB$")
INTACT = 'print("intact:", weights.is_intact())'

TRAIN = [
    "steps = 3",
    """from pathlib import Path
from jupyter_gpushare import demo_gpu
gpus = [demo_gpu.open(number) for number in range(demo_gpu.device_count())]
buffers = [gpu.allocate("10GiB") for gpu in gpus]
for buffer in buffers:
    buffer.fill(seed=1)""",
    """done = 0
while done < steps or not Path("enough").exists():
    demo_gpu.train(buffers, 1, 0.1)
    done += 1
    print("step", done)""",
    """print("ran on", len(gpus), "GPUs")""",
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    # Longer for pictures: a warning comes a third of it before.
    demo = DemoHub(tmp_path, idle_timeout_s=60.0 if PICTURES else 18.0)
    try:
        demo.start()
        yield demo
    finally:
        demo.stop()
        until("everything has ended", lambda: not demo.processes(), 60)


class Visitor:
    """A user with a browser."""

    def __init__(self, browser: Browser, hub: DemoHub, name: str) -> None:
        self.hub = hub
        self.name = name
        self.page: Page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        self.page.set_default_timeout(PAGE_MS)
        self.new = True
        self.complaints: list[str] = []
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if is_complaint(said.text) else None,
        )

    @property
    def home(self) -> Path:
        return self.hub.folder / "state" / "home" / self.name

    @property
    def theme(self) -> str:
        return str(self.page.evaluate("document.body.dataset.jpThemeName"))

    @property
    def panel(self) -> Locator:
        return self.page.get_by_role("region", name="Shared GPU")

    @property
    def toasts(self) -> Locator:
        return self.page.locator(".Toastify")

    def start(self, label: str) -> None:
        """Log in, pick a card, wait for JupyterLab, open the sidebar."""
        page = self.page
        sign_in(page, f"{self.hub.url}/hub/spawn", self.name)
        page.get_by_role("radio", name=label, exact=True).first.check()
        for theme in ("dark", "light") if PICTURES and label != "No GPU" else ():
            page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)
            page.wait_for_timeout(1_000)  # colours fade
            page.screenshot(path=Path(str(PICTURES)) / f"spawn-page-{theme}.png")
        page.get_by_role("button", name="Start").click()
        page.wait_for_url(f"**/user/{self.name}/lab**")
        self.settle()

    def settle(self) -> None:
        """Wait until the page is there, after a start or a reload; open the sidebar if it is closed."""
        page = self.page
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        expect(page.locator(".gpushare-status button")).to_contain_text("GPU")
        if self.new:
            # JupyterLab asks each user once.
            self.toasts.get_by_role("button", name="No", exact=True).click()
            self.new = False
        if not self.panel.is_visible():
            page.locator(".gpushare-status button").click()
        expect(self.panel).to_be_visible()

    def run_cell(self, code: str) -> None:
        """Type into the last cell and run it."""
        self.page.locator(".jp-Notebook:visible .jp-Cell .cm-content").last.click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")

    def use_theme(self, theme: str) -> None:
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile("^Theme$")).hover()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^JupyterLab {theme}$")).click()
        self.page.wait_for_function(
            "theme => document.body.dataset.jpThemeName === theme", arg=f"JupyterLab {theme}"
        )
        self.page.wait_for_timeout(800)  # colours fade

    def picture(self, name: str) -> None:
        """Keep a picture in both themes, where pictures are wanted."""
        if not PICTURES:
            return
        # A notification goes when its bar, which is not shown, has run down.
        still = ".Toastify__progress-bar { animation-play-state: paused !important; }"
        style = self.page.add_style_tag(content=still)
        for theme in ("Dark", "Light"):
            self.use_theme(theme)
            self.page.wait_for_timeout(1_000)  # bars move
            self.page.screenshot(path=Path(PICTURES) / f"{name}-{theme.lower()}.png")
        style.evaluate("style => style.remove()")


def picture_of_the_admin_page(browser: Browser, hub: DemoHub) -> None:
    for scheme in ("dark", "light"):
        context = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)
        page = context.new_page()
        sign_in(page, f"{hub.url}/services/gpushare/", "admin")
        expect(page.locator("body")).to_contain_text("Asleep, GPU lent")
        page.screenshot(path=Path(str(PICTURES)) / f"admin-page-{scheme}.png", full_page=True)
        context.close()


def ask_for_a_job(page: Page) -> Locator:
    """Open the dialog for the notebook and fill it in for both GPUs; return it."""
    page.locator(".jp-NotebookPanel-toolbar").get_by_role(
        "button", name="Run a notebook or a script on a GPU"
    ).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Parameters")).to_have_value("steps = 3")
    expect(dialog.locator(".gpushare-outlook")).to_contain_text("Would start now")
    dialog.get_by_label("Parameters").fill("steps = 5")
    expect(dialog.get_by_label("May use borrowed GPUs")).to_be_checked()
    dialog.get_by_label("Number or part").fill("2")
    expect(dialog.locator(".gpushare-outlook")).to_contain_text(
        "Number 1. Needs 2 GPUs together; 1.5 are free."
    )
    return dialog


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_two_people_share_two_gpus_by_clicks_alone(hub: DemoHub, browser: Browser) -> None:
    ada, bo = Visitor(browser, hub, "ada"), Visitor(browser, hub, "bo")
    settings = ada.home / ".jupyter/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text('{"theme": "JupyterLab Dark"}')

    # Ada picks half a GPU, fills a part of it, and meets its limit as an error of her own.
    ada.start("1/2 GPU")
    ada.page.locator('.jp-LauncherCard[data-category="Notebook"]').first.click()
    expect(ada.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    ada.run_cell(ALLOCATE)
    ada.run_cell(TOO_MUCH)
    expect(ada.page.locator(".jp-OutputArea-output").last).to_contain_text("GpuOutOfMemory")
    expect(ada.panel.get_by_role("meter", name="GPU memory")).to_have_attribute("aria-valuetext", MEMORY)
    ada.picture("day-limit")
    ada.run_cell(UNTIL_LUNCH)

    # Bo starts without a GPU, and sends his notebook off as a job that needs both.
    bo.home.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in TRAIN])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, bo.home / "train.ipynb")
    bo.start("No GPU")
    page = bo.page
    page.locator(".jp-DirListing-item", has_text="train.ipynb").dblclick()
    for theme in ("Dark", "Light") if PICTURES else ():
        bo.use_theme(theme)
        dialog = ask_for_a_job(page)
        expect(page.locator("#jp-main-statusbar")).not_to_contain_text("Saving")
        page.screenshot(path=Path(PICTURES) / f"day-dialog-{theme.lower()}.png")
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_have_count(0)
    dialog = ask_for_a_job(page)
    dialog.get_by_role("button", name="Submit").click()
    bo.toasts.get_by_role("button", name="Show job").click()
    detail = page.get_by_role("region", name="Job train.ipynb")
    expect(detail).to_contain_text("Queued, number 1")
    expect(detail).to_contain_text("Needs 2 GPUs together; 1.5 are free.")
    bo.picture("day-queued")

    (ada.home / "lunch").touch()

    # Ada is at lunch: a warning, then sleep.  She keeps her page open; that keeps nothing awake.
    banner = ada.page.locator(".gpushare-banner:visible")
    expect(banner).to_contain_text("Your variables stay.")
    expect(banner.get_by_role("button", name="Keep it 30 min")).to_be_visible()
    # Said once: the sidebar beside it has the badge and the same buttons.
    expect(ada.panel).to_contain_text("Lent in")
    expect(ada.panel).not_to_contain_text("Your variables stay.")
    expect(ada.toasts).not_to_contain_text("Your GPU is lent in")
    ada.picture("day-warned")
    expect(ada.page.locator(".gpushare-banner:visible")).to_contain_text("Asleep")
    ada.picture("day-asleep")

    # Bo sees it run, cell by cell; his page may be loaded again at any time.
    expect(detail).to_contain_text("Running")
    expect(detail.locator(".gpushare-log")).to_contain_text("step 5")
    expect(page.get_by_role("grid")).to_contain_text("3 of 5")
    bo.picture("day-running")
    if PICTURES:
        picture_of_the_admin_page(browser, hub)
    page.reload()
    bo.settle()
    page.get_by_role("grid").get_by_text("train.ipynb").click()
    expect(detail.locator(".gpushare-log")).to_contain_text("step 5")

    # Ada is back: a GPU cell runs within seconds, on what she had.
    ada.run_cell(INTACT)
    expect(ada.page.locator(".jp-OutputArea-output").last).to_contain_text("intact: True")
    expect(ada.toasts).to_contain_text("Your GPU is back")
    expect(ada.panel.get_by_role("meter", name="GPU memory")).to_have_attribute("aria-valuetext", MEMORY)
    ada.picture("day-back")
    expect(detail).to_contain_text("Paused")
    expect(detail).to_contain_text("the session that lent the GPU needs it")
    bo.picture("day-paused")

    # The broker is killed and comes back: nothing is lost, and both pages hear of it again.
    hub.kill_broker()

    # She idles again; his job goes on where it was, and ends.
    expect(ada.page.locator(".gpushare-status button")).to_contain_text("Asleep")
    expect(detail.locator("header")).to_contain_text("Running")
    bo.picture("day-resumed")
    (bo.home / "enough").touch()
    expect(detail).to_contain_text("Done")
    expect(bo.toasts).to_contain_text("train.ipynb: Done")
    detail.get_by_role("tab", name="Timeline").click()
    expect(detail.locator(".gpushare-timeline")).to_contain_text("Resumed")
    whats = detail.locator(".gpushare-timeline li").evaluate_all("all => all.map(one => one.dataset.what)")
    assert whats == ["submitted", "grant", "started", "suspend", "resume", "ended"]
    bo.picture("day-timeline")
    detail.get_by_role("button", name="Open output").click()
    output = page.locator(".jp-NotebookPanel:visible")
    expect(output).to_contain_text("ran on 2 GPUs")
    expect(output).to_contain_text("steps = 5")
    bo.picture("day-output")
    if not PICTURES:
        assert (ada.theme, bo.theme) == ("JupyterLab Dark", "JupyterLab Light")
    assert ada.complaints == bo.complaints == []
