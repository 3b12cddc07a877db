"""What a test does with a page of JupyterLab."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, async_playwright, expect
from playwright.sync_api import Browser as SyncBrowser
from playwright.sync_api import Page as SyncPage
from playwright.sync_api import sync_playwright

from tests.conftest import Chromium
from tests.waiting import becomes

UI = Path(__file__).parents[2] / "jupyter_gpushare" / "ui"
BUNDLE = UI.parent / "labextension"
AXE = UI / "node_modules" / "axe-core" / "axe.min.js"
TOKEN = "token-of-the-page"
THEMES = ("JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast")

# What sticks out of an area on the right.
TOO_WIDE = """area => {
    const edge = area.getBoundingClientRect().left + area.clientWidth;
    return [...area.querySelectorAll('*')]
        .filter(node => node.getBoundingClientRect().right > edge + 0.5)
        .map(node => node.outerHTML.slice(0, 120));
}"""

# What a page says on its console because of us.
_OURS = re.compile("gpushare|unsatisfied version", re.IGNORECASE)
# JupyterLab's warnings about a plugin that starts slowly: they measure the machine, not the plugin.
_SLOW_PLUGIN = re.compile(
    r"Plugin \S+ (is taking too long|\(with \d+ dependants\) took [\d.]+ms) to activate\."
)

needs_browser = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),  # that of `browser` (conftest.py)
    pytest.mark.skipif(not (BUNDLE / "package.json").is_file(), reason="not built: run `make setup`"),
]


@asynccontextmanager
async def launched(chromium: Chromium) -> AsyncIterator[Browser]:
    """Start a chromium that ends with the context; each test takes a context of its own in it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        yield browser
        await browser.close()


@contextmanager
def browser_of(chromium: Chromium) -> Iterator[SyncBrowser]:
    """Start a chromium for tests that are no coroutines; it ends with the context."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        yield browser
        browser.close()


def sign_in(page: SyncPage, url: str, name: str) -> None:
    """Open a page of a Hub that asks for the login first."""
    page.goto(url)
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill("any")
    page.get_by_role("button", name="Sign in").click()


def is_complaint(text: str) -> bool:
    """Return whether a line of a page's console is about our extension and fails its test."""
    return bool(_OURS.search(text)) and not _SLOW_PLUGIN.fullmatch(text)


async def picture(page: Page, name: str) -> None:
    """Keep a picture where GPUSHARE_PICTURES says, to be looked at."""
    if folder := os.environ.get("GPUSHARE_PICTURES"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


async def accessible(page: Page, *selectors: str) -> None:
    """Fail on what axe-core calls serious or critical in these areas of the page."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text() + "; undefined")
    # JupyterLab's body has no height and hides what is beyond: axe would not look at colours at all.
    await page.evaluate("document.body.style.height = '100vh'")
    for selector in selectors:  # axe passes over one that it does not find beside others
        await expect(page.locator(selector).first).to_be_attached()
    areas = [[selector] for selector in selectors]
    judge(await page.evaluate("include => axe.run({include}, {resultTypes: ['violations']})", areas))


def judge(found: dict[str, Any]) -> None:
    """Fail on what axe-core called serious or critical in an answer of ``axe.run``."""
    assert "color-contrast" in [rule["id"] for rule in found["passes"] + found["violations"]]
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    told = [(v["id"], [(n["target"], n["failureSummary"]) for n in v["nodes"]]) for v in grave]
    assert not told, json.dumps(told, indent=1)


async def run_command(page: Page, command: str, args: dict[str, Any] | None = None) -> None:
    """What a menu or the palette does."""
    await page.evaluate("([c, a]) => void window.jupyterapp.commands.execute(c, a)", [command, args or {}])


async def use_theme(page: Page, theme: str) -> None:
    await run_command(page, "apputils:change-theme", {"theme": theme})
    await page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
    # JupyterLab removes its splash a moment later, and throws where a second one came meanwhile.
    await expect(page.locator("#jupyterlab-splash")).to_have_count(0)


async def in_themes(page: Page, name: str, *selectors: str, themes: Sequence[str] = THEMES) -> None:
    """Judge areas of the page in each theme, keep a picture of each, and end in the light one."""
    for theme in themes:
        await use_theme(page, theme)
        if selectors:
            await accessible(page, *selectors)
        await picture(page, f"{name}-{theme.split()[-1].lower()}")
    await use_theme(page, THEMES[0])


async def loaded(page: Page) -> dict[str, int]:
    """The files of our bundle that the page has, by name: their size in bytes, compressed."""
    urls = await page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    names = {url.split("?")[0].rsplit("/", 1)[1] for url in urls if "/jupyter-gpushare/static/" in url}
    return {name: len(gzip.compress((BUNDLE / "static" / name).read_bytes())) for name in names}


async def arrived(held: list[Route], count: int) -> None:
    """Wait for so many requests, and fail on more."""
    await becomes(lambda: len(held) >= count)
    assert len(held) == count


def queue(golden: Any, count: int) -> list[dict[str, Any]]:
    """Jobs of one project that wait, the first to start first."""
    job = golden("job") | {"state": "queued", "attempt": 0, "started_at": None, "ran_s": 0.0, "priority": 0}
    return [job | {"id": f"wait{n}", "name": f"train {n}", "position": n} for n in range(1, count + 1)]
