"""The extension in a real JupyterLab and a real browser, against a broker that the test drives."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, async_playwright, expect

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "jupyter_gpushare" / "labextension"
TOKEN = "token-of-the-page"

_spec = importlib.util.spec_from_file_location(
    "gpushare_fake_broker", ROOT / "tests" / "server" / "fake_broker.py"
)
assert _spec is not None
assert _spec.loader is not None
fake_broker = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = fake_broker
_spec.loader.exec_module(fake_broker)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (BUNDLE / "package.json").is_file(), reason="not built: run `make setup`"),
]

PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
NOTEBOOK = {"cells": [], "metadata": PYTHON, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def broker() -> Iterator[Any]:
    broker = fake_broker.FakeBroker()
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def lab(broker, tmp_path) -> Iterator[str]:
    """The address of a JupyterLab with our bundle and our server extension."""
    for name in ("config", "data", "runtime", "work", "labextensions"):
        (tmp_path / name).mkdir()
    (tmp_path / "labextensions" / "jupyter-gpushare").symlink_to(BUNDLE)
    (tmp_path / "work" / "train.ipynb").write_text(json.dumps(NOTEBOOK))
    no_news = tmp_path / "config" / "@jupyterlab" / "apputils-extension"
    no_news.mkdir(parents=True)
    (no_news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUSHARE_API", "JUPYTER"))}
    mine = {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "config"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "GPUSHARE_API_URL": broker.url,
        "JUPYTERHUB_API_TOKEN": fake_broker.TOKEN,
    }
    with (tmp_path / "lab.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *[sys.executable, "-m", "jupyterlab", f"--port={port}", "--no-browser", "--allow-root"],
                "--ServerApp.jpserver_extensions={'jupyter_gpushare.server': True}",
                f"--LabApp.extra_labextensions_path={tmp_path / 'labextensions'}",
                f"--IdentityProvider.token={TOKEN}",
                f"--ServerApp.root_dir={tmp_path / 'work'}",
            ],
            env=kept | mine,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (tmp_path / "lab.log").read_text()
        try:
            return httpx.get(f"{url}/api", trust_env=False, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    try:
        fake_broker.eventually(answers, 60)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.fixture
async def page(lab, chromium) -> Any:
    """A notebook, open in JupyterLab; fails the test when the page complained on its console."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        page = await browser.new_page(viewport={"width": 1280, "height": 800}, locale="en-GB")
        page.set_default_timeout(60_000)
        complaints: list[str] = []
        page.on(
            "console", lambda said: complaints.append(said.text) if "gpushare" in said.text.lower() else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{lab}/lab/tree/train.ipynb?token={TOKEN}")
        await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=60_000)
        yield page
        await browser.close()
    assert not complaints


async def picture(page: Page, name: str) -> None:
    """Keep a picture where GPUSHARE_PICTURES says, to be looked at."""
    if folder := os.environ.get("GPUSHARE_PICTURES"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


async def test_story_of_a_suspension_is_seen_in_status_bar_panel_banner_and_notifications(page, broker):
    golden = fake_broker.golden
    status = page.locator(".gps-status button")
    await expect(status).to_contain_text("1/2 GPU 6.8/40 GB Active", timeout=60_000)
    await status.focus()
    await page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
    memory = panel.get_by_role("meter", name="GPU memory")
    await expect(memory).to_have_attribute("aria-valuetext", "6.8 of 40 GB")
    await expect(panel).to_contain_text("Queued, number 3")
    await picture(page, "panel-active")

    broker.answer("POST leases/b7q2mzk4x9/keep", golden("status_active")["leases"][0])
    broker.say_status(golden("status_warned"))
    banner = page.locator(".gps-banner")
    await expect(banner).to_contain_text("Lent in 5 min", timeout=2_000)
    await picture(page, "panel-warned")
    await banner.get_by_role("button", name="Keep it 30 min").click()
    await expect(banner.get_by_role("button", name="Keep it 30 min")).to_be_enabled()
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[0].json == {"minutes": 30.0}

    broker.say_status(golden("status_asleep"))
    await expect(banner).to_contain_text("Run any GPU cell to wake it", timeout=2_000)
    await expect(memory).to_have_attribute("aria-valuetext", "6.8 GB kept in RAM")
    toasts = page.locator(".Toastify")
    await expect(toasts).to_contain_text("Asleep since 14:20")
    await expect(toasts).not_to_contain_text("Idle for 10 min")
    await picture(page, "panel-asleep")
    broker.answer("POST leases/b7q2mzk4x9/resume", golden("error"), 409)
    await banner.get_by_role("button", name="Wake now").click()
    await expect(page.locator(".Toastify")).to_contain_text("No half GPU is free just now")

    broker.say_status(golden("status_waking"))
    await expect(banner).to_contain_text("Getting the GPU back", timeout=2_000)
    broker.say_status(golden("status_active") | {"seq": 46})
    await expect(page.locator(".Toastify")).to_contain_text("Your GPU is back after")
    await expect(banner).to_be_hidden()
    await picture(page, "panel-back")


async def test_silence_of_the_broker_is_shown_without_old_numbers(page, broker):
    await expect(page.locator(".gps-status button")).to_contain_text("6.8/40 GB", timeout=60_000)
    await page.locator(".gps-status button").click()
    broker.stop()
    panel = page.get_by_role("region", name="Shared GPU")
    await expect(panel).to_contain_text("No news from the GPU broker since")
    await expect(panel.get_by_role("meter")).to_have_count(0)
    await expect(page.locator(".gps-status button")).to_have_text("GPU: no data")
    await picture(page, "panel-silent")
    broker.start()
    await expect(panel).to_contain_text("Your 1/2 GPU is in use.")
