"""A JupyterLab with our bundle, a broker that the test controls, and a page in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.ports import free_ports
from tests.server import fake_broker
from tests.ui.pages import BUNDLE, TOKEN, is_complaint, launched
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]

# A wait ends as soon as its condition holds; a slow machine needs the rest.
PAGE_MS = 1000 * PATIENCE_S
expect.set_options(timeout=PAGE_MS)

PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
NOTEBOOK = {"cells": [], "metadata": PYTHON, "nbformat": 4, "nbformat_minor": 5}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    url: str
    folder: Path  # the user's home
    broker: Any

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def say(self, status: dict[str, Any]) -> None:
        """Let the broker send a newer status."""
        self.broker.say_status(status | {"seq": self.broker.status["seq"] + 1})

    def has_jobs(self, jobs: list[dict[str, Any]]) -> None:
        """Let the broker list these jobs, and a session in use."""
        self.broker.answer("GET jobs", {"jobs": jobs})
        self.say(fake_broker.golden("status_active") | {"jobs": jobs})


@pytest.fixture(scope="session")
def start_lab() -> Callable[..., AbstractContextManager[Lab]]:
    return start_lab_in


@pytest.fixture(scope="session")
def lab(start_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield a JupyterLab that tests share if they leave it unchanged."""
    with start_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def broker(lab: Lab, golden: Any) -> Any:
    """Return the broker of `lab`, with answers to the requests of every page."""
    lab.broker.answers.clear()
    for name, path in [("offers", "offers"), ("job_list", "jobs"), ("history", "history")]:
        lab.broker.answer(f"GET {path}", golden(name))
    lab.say(golden("status_active"))
    lab.broker.seen.clear()
    return lab.broker


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: Any) -> AsyncIterator[Browser]:
    """Yield one chromium for all tests; each test has separate pages, storage and cookies."""
    async with launched(chromium) as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Callable[..., AbstractAsyncContextManager[Page]]:
    """Return a function that opens a notebook; a page that reports errors on its console fails the test."""

    @asynccontextmanager
    async def opened(
        lab: Lab, path: str = "lab/tree/train.ipynb", *, reset: bool = True, script: str = "", **options: Any
    ) -> AsyncIterator[Page]:
        options = {"viewport": {"width": 1280, "height": 800}, "locale": "en-GB"} | options
        page = await browser.new_page(**options)
        page.set_default_timeout(PAGE_MS)
        await page.add_init_script(script)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if is_complaint(said.text) else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        try:
            await page.goto(f"{lab.url}/{path}?token={TOKEN}{'&reset' if reset else ''}")
            if path.startswith("lab/"):
                await expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=PAGE_MS)
            yield page
        finally:
            await page.context.close()
        assert not complaints

    return opened


@pytest_asyncio.fixture(loop_scope="session")
async def page(lab, broker, open_page) -> AsyncIterator[Page]:
    """Yield a page with a GPU in use."""
    async with open_page(lab) as page:
        await expect(page.locator(".gpushare-status button")).to_contain_text("Active")
        yield page


@contextmanager
def start_lab_in(
    folder: Path, app: str = "jupyterlab", packages: Path | None = None, **more: str
) -> Iterator[Lab]:
    """Start JupyterLab or ``notebook`` from a folder of packages that override those of the tests.

    ``more`` is added to its environment.
    """
    broker = fake_broker.FakeBroker()
    broker.start()
    with _jupyterlab(folder, broker, app, packages, more) as url:
        yield Lab(url, folder, broker)
    broker.stop()


@contextmanager
def _jupyterlab(
    tmp_path: Path, broker: Any, app: str, packages: Path | None, more: Mapping[str, str]
) -> Iterator[str]:
    """Yield the address of a JupyterLab with our bundle and our server extension."""
    for name in ("config", "data", "runtime", "work", "labextensions"):
        (tmp_path / name).mkdir()
    (tmp_path / "labextensions" / "jupyter-gpushare").symlink_to(BUNDLE)
    (tmp_path / "work" / "train.ipynb").write_text(json.dumps(NOTEBOOK))
    no_news = tmp_path / "config" / "@jupyterlab" / "apputils-extension"
    no_news.mkdir(parents=True)
    (no_news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    port = free_ports()
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
    if packages is not None:
        mine["PYTHONPATH"] = f"{packages}:{ROOT}"
        mine["JUPYTERLAB_DIR"] = str(packages / "share" / "jupyter" / "lab")
    with (tmp_path / "lab.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *[sys.executable, "-m", app, f"--port={port}", "--no-browser", "--allow-root"],
                "--ServerApp.jpserver_extensions={'jupyterlab': True, 'jupyter_gpushare.server': True}",
                "--LabApp.expose_app_in_browser=True",
                f"--LabServerApp.extra_labextensions_path={tmp_path / 'labextensions'}",
                f"--IdentityProvider.token={TOKEN}",
                f"--ServerApp.root_dir={tmp_path / 'work'}",
            ],
            env=kept | mine | dict(more),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/api", trust_env=False, timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, "JupyterLab answers", process=process, log=tmp_path / "lab.log")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            last = (tmp_path / "lab.log").read_text(errors="replace")[-4_000:]
            pytest.fail(f"JupyterLab did not end after SIGTERM; its log ends with:\n{last}")


@pytest.fixture
def golden() -> Callable[[str], dict[str, Any]]:
    return fake_broker.golden
