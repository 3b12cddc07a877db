"""Measure the time until JupyterLab, behind the Hub's proxy, shows a change in the broker.

    .venv/bin/python -m tests.benchmarks.decision_to_pixel [COUNT]

The benchmark has a demo hub and one page with the sidebar open.  It submits jobs that have
to wait over REST.  One time runs from the request, one from the broker's answer, until the
page shows the job (a MutationObserver sees it; all clocks are the machine's).  The broker
decides between request and answer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.benchmarks.report import percentile, print_table
from tests.conftest import Chromium, find_chromium
from tests.e2e.demo import DemoHub

WATCH = """() => {
    window.seen = {};
    const look = () => {
        for (const job of document.querySelectorAll('.gpushare-job .gpushare-name')) {
            window.seen[job.textContent] ??= Date.now();
        }
    };
    const all = { childList: true, subtree: true, characterData: true };
    new MutationObserver(look).observe(document.body, all);
}"""


def measure(hub: DemoHub, count: int, path: str) -> list[tuple[float, float]]:
    """Return the milliseconds of each change: from the request, and from the answer."""
    ada, cy = hub.person("ada"), hub.person("cy")
    ada.start_server(fraction="0.5")
    cy.start_server(gpus=0)
    took = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(Chromium(path).args))
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{hub.url}/hub/login")
        page.get_by_label("Username").fill("cy")
        page.get_by_label("Password").fill("any")
        page.get_by_role("button", name="Sign in").click()
        page.goto(f"{hub.url}/user/cy/lab?reset")
        page.locator(".gpushare-status button").click(timeout=120_000)
        page.get_by_role("region", name="Shared GPU").wait_for()
        page.evaluate(WATCH)
        for n in range(count):
            name = f"change {n}"
            body = {"command": ["true"], "gpus": "2", "name": name}
            asked_ms = time.time() * 1000
            job = cy.ask("jobs", "POST", json=body)
            answered_ms = time.time() * 1000
            page.wait_for_function("name => window.seen[name]", arg=name, timeout=20_000)
            seen_ms = page.evaluate("name => window.seen[name]", name)
            took.append((seen_ms - asked_ms, seen_ms - answered_ms))
            cy.ask(f"jobs/{job['id']}", "DELETE")
            page.wait_for_timeout(300 + 37 * (n % 10))
        browser.close()
    return took


def main() -> int:
    path = find_chromium()
    if path is None:
        print("needs a chromium", file=sys.stderr)
        return 1
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as folder:
        # No session is suspended meanwhile.
        hub = DemoHub(Path(folder), idle_timeout_s=3600)
        try:
            hub.start()
            took = measure(hub, count, path)
        finally:
            hub.stop()
            hub.kill_leftovers()
    rows = []
    for name, times in zip(("request", "answer"), zip(*took, strict=True), strict=True):
        p50, p95, most = (f"{percentile(list(times), p):.0f} ms" for p in (50, 95, 100))
        rows.append([f"{name} to pixel, through the Hub's proxy ({count})", p50, f"**{p95}**", most])
    print_table("tests.benchmarks.decision_to_pixel", ["", "p50", "p95", "max"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
