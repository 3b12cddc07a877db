"""Measure the cost of the JupyterLab extension: size, requests, memory, time to draw a thousand jobs.

    .venv/bin/python -m tests.benchmarks.lab_page

One JupyterLab runs with the built bundle, a broker in memory and one Chromium.  The
benchmark counts the page's requests, hidden and visible, and reads the heap after a
garbage collection, before and after 1,000 changes of state.  A list of 1,000 jobs
counts as drawn when its rows are in the page and it responds to a key.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright, expect

from tests.benchmarks.report import percentile, print_table
from tests.conftest import Chromium, find_chromium
from tests.ui.conftest import BUNDLE, TOKEN, fake_broker, start_lab_in
from tests.ui.pages import loaded

UPDATES = 1_000
COUNT_S = 60
HIDE = """hidden => {
    const set = (name, value) => Object.defineProperty(document, name, { value, configurable: true });
    set('visibilityState', hidden ? 'hidden' : 'visible');
    set('hidden', hidden);
    document.dispatchEvent(new Event('visibilitychange'));
}"""


async def requests_per_minute(page: Page, hidden: bool) -> float:
    asked: list[str] = []
    listen = lambda request: asked.append(request.url) if "/gpushare/" in request.url else None
    await page.evaluate(HIDE, hidden)
    await page.wait_for_timeout(6_000)
    page.on("request", listen)
    await page.wait_for_timeout(COUNT_S * 1000)
    page.remove_listener("request", listen)
    await page.evaluate(HIDE, False)
    return 60 * len(asked) / COUNT_S


async def busy_percent(page: Page) -> float:
    """Return the percentage of a core that the page's thread takes with the sidebar open (`COUNT_S`)."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")

    async def busy_s() -> float:
        found = (await session.send("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")

    before = await busy_s()
    await page.wait_for_timeout(COUNT_S * 1000)
    return 100 * (await busy_s() - before) / COUNT_S


async def heap_mib(page: Page) -> float:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("HeapProfiler.collectGarbage")
    used: float = (await session.send("Runtime.getHeapUsage"))["usedSize"]
    return used / 2**20


async def heap_growth_mib(page: Page, lab: Any) -> float:
    """Return the growth of the page's heap after `UPDATES` changes, all of which it drew."""
    states = [fake_broker.golden(name) for name in ("status_warned", "status_active")]
    model = "window.jupyterapp.commands.execute('gpushare:open')"
    await page.evaluate(f"() => void {model}")
    await page.wait_for_timeout(2_000)

    async def change(times: int) -> None:
        for n in range(times):
            lab.say(states[n % 2])
            wanted = ("Lent in", "Active")[n % 2]
            await expect(page.locator(".gpushare-status button")).to_contain_text(wanted, timeout=20_000)

    await change(50)  # until toasts, banners and fonts are loaded
    before = await heap_mib(page)
    await change(UPDATES)
    return await heap_mib(page) - before


async def list_ms(page: Page, lab: Any) -> float:
    """Return milliseconds from the command to a list of 1,000 jobs that answers a key."""
    job = fake_broker.golden("job")
    jobs = [job | {"id": f"j{n:09}", "name": f"train {n}"} for n in range(1_000)]
    lab.broker.answer("GET jobs", {"jobs": jobs})
    began = time.perf_counter()
    await page.evaluate("() => void window.jupyterapp.commands.execute('gpushare:jobs')")
    await page.locator(".gpushare-job-row").first.wait_for()
    await page.locator(".gpushare-job-row").first.focus()
    await page.keyboard.press("ArrowDown")
    await page.locator('.gpushare-job-row[aria-selected="true"]').wait_for()
    return (time.perf_counter() - began) * 1000


async def frames_ms(page: Page) -> list[float]:
    """Return the time between frames while the list is scrolled from end to end."""
    times: list[float] = await page.evaluate(
        """async () => {
            const box = document.querySelector('.gpushare-scroller');
            const times = [];
            let last = performance.now();
            for (let y = 0; y < box.scrollHeight; y += 200) {
                box.scrollTop = y;
                await new Promise(requestAnimationFrame);
                const now = performance.now();
                times.push(now - last);
                last = now;
            }
            return times;
        }"""
    )
    return times


async def measure(lab: Any, path: str) -> None:
    everything = sum(len(gzip.compress(path.read_bytes())) for path in (BUNDLE / "static").glob("*.js"))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(Chromium(path).args))
        page = await browser.new_page(viewport={"width": 1280, "height": 800}, locale="en-GB")
        await page.goto(f"{lab.url}/lab/tree/train.ipynb?token={TOKEN}&reset")
        await expect(page.locator(".gpushare-status button")).to_contain_text("Active", timeout=60_000)
        at_start = sum((await loaded(page)).values())
        rows = [
            ["bundle at start, gzip", f"**{at_start / 1024:.1f} KiB**", "40 KiB"],
            ["bundle with everything that is loaded later, gzip", f"{everything / 1024:.1f} KiB", ""],
        ]
        await page.locator(".gpushare-status button").click()
        visible = await requests_per_minute(page, hidden=False)
        busy = await busy_percent(page)
        hidden = await requests_per_minute(page, hidden=True)
        drawn = await list_ms(page, lab)
        frames = await frames_ms(page)
        rows += [
            ["1,000 jobs: command to a list that answers a key", f"**{drawn:.0f} ms**", "1 s"],
            ["1,000 jobs: frame while scrolling, p95", f"{percentile(frames, 95):.0f} ms", "50 ms"],
        ]
        rows += [
            ["requests a minute, page visible, sidebar open", f"**{visible:.0f}**", ""],
            ["requests a minute, page hidden", f"**{hidden:.0f}**", "0"],
        ]
        rows.append(["the page's thread, sidebar open, nothing to do", f"{busy:.2f} % of a core", ""])
        grown = await heap_growth_mib(page, lab)
        rows.append([f"heap after {UPDATES:,} changes of state", f"**{grown:+.1f} MiB**", "+5 MiB"])
        await browser.close()
    print_table("tests.benchmarks.lab_page", ["", "", "budget"], rows)


def main() -> int:
    path = find_chromium()
    if path is None or not (BUNDLE / "static").is_dir():
        print("needs a chromium and `make setup`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, start_lab_in(Path(folder)) as lab:
        asyncio.run(measure(lab, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
