"""Actions and checks on a page of JupyterLab."""

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

# Elements that extend beyond the right edge of an area.
TOO_WIDE = """area => {
    const edge = area.getBoundingClientRect().left + area.clientWidth;
    return [...area.querySelectorAll('*')]
        .filter(node => node.getBoundingClientRect().right > edge + 0.5)
        .map(node => node.outerHTML.slice(0, 120));
}"""

# Axe's answers, one for each area: a single run would pass over an area that it does not find
# beside others.
JUDGED = """async areas => {
    const found = [];
    for (const area of areas) found.push(await axe.run(area, {resultTypes: ['violations']}));
    return found;
}"""

# Console messages that our extension causes.
_OURS = re.compile("gpushare|unsatisfied version", re.IGNORECASE)
# JupyterLab's warnings about a slow plugin measure the machine, not the plugin.
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
    """Start a chromium that ends with the context; each test uses a separate browser context."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        yield browser
        await browser.close()


@contextmanager
def browser_of(chromium: Chromium) -> Iterator[SyncBrowser]:
    """Start a chromium for tests without coroutines; it ends with the context."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        yield browser
        browser.close()


def sign_in(page: SyncPage, url: str, name: str) -> None:
    """Open a page of a Hub that requires a login first."""
    page.goto(url)
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill("any")
    page.get_by_role("button", name="Sign in").click()


def is_complaint(text: str) -> bool:
    """Return whether a line of a page's console is about our extension and fails its test."""
    return bool(_OURS.search(text)) and not _SLOW_PLUGIN.fullmatch(text)


async def picture(page: Page, name: str) -> None:
    """Save a picture in the folder GPUSHARE_PICTURES, for people to look at."""
    if folder := os.environ.get("GPUSHARE_PICTURES"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


async def accessible(page: Page, *selectors: str) -> None:
    """Fail on findings in these areas of the page that axe-core calls serious or critical.

    It fails also on an area that is absent, or in which axe found no text whose colours it can check.
    """
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text() + "; undefined")
    # JupyterLab's body has no height and hides its overflow, so axe would check no colours.
    await page.evaluate("document.body.style.height = '100vh'")
    for selector, found in zip(selectors, await page.evaluate(JUDGED, selectors), strict=True):
        judge(found, selector)


def judge(found: dict[str, Any], area: str = "the area") -> None:
    """Fail on serious or critical findings in an answer of ``axe.run``, and on one without text."""
    checked = [rule["id"] for rule in found["passes"] + found["violations"]]
    assert "color-contrast" in checked, f"axe checked no colours in {area}: is it hidden or empty?"
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    told = [(v["id"], [(n["target"], n["failureSummary"]) for n in v["nodes"]]) for v in grave]
    assert not told, json.dumps(told, indent=1)


async def run_command(page: Page, command: str, args: dict[str, Any] | None = None) -> None:
    """Run a command, as a menu or the palette does."""
    await page.evaluate("([c, a]) => void window.jupyterapp.commands.execute(c, a)", [command, args or {}])


async def use_theme(page: Page, theme: str) -> None:
    await run_command(page, "apputils:change-theme", {"theme": theme})
    await page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
    # JupyterLab removes its splash a moment later, and throws if a second one appeared meanwhile.
    await expect(page.locator("#jupyterlab-splash")).to_have_count(0)


async def in_themes(page: Page, name: str, *selectors: str, themes: Sequence[str] = THEMES) -> None:
    """Check areas of the page in each theme, save a picture of each, and end in the light theme."""
    for theme in themes:
        await use_theme(page, theme)
        if selectors:
            await accessible(page, *selectors)
        await picture(page, f"{name}-{theme.split()[-1].lower()}")
    await use_theme(page, THEMES[0])


async def loaded(page: Page) -> dict[str, int]:
    """Return the compressed sizes in bytes of our bundle's files that the page has loaded, by name."""
    urls = await page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    names = {url.split("?")[0].rsplit("/", 1)[1] for url in urls if "/jupyter-gpushare/static/" in url}
    return {name: len(gzip.compress((BUNDLE / "static" / name).read_bytes())) for name in names}


async def arrived(held: list[Route], count: int) -> None:
    """Wait for this number of requests, and fail on more."""
    await becomes(lambda: len(held) >= count)
    assert len(held) == count


def queue(golden: Any, count: int) -> list[dict[str, Any]]:
    """Return waiting jobs of one project, in the order in which they start."""
    job = golden("job") | {"state": "queued", "attempt": 0, "started_at": None, "ran_s": 0.0, "priority": 0}
    return [job | {"id": f"wait{n}", "name": f"train {n}", "position": n} for n in range(1, count + 1)]
