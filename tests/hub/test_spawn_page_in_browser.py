"""The spawn page of a real Hub in a real browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.conftest import Chromium
from tests.hub.conftest import Hub
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.browser


def test_the_spawn_page_says_in_how_long_a_size_may_start(hub: Hub, chromium: Chromium) -> None:
    hub.broker.starts_in = {"low_s": 1_200.0, "high_s": 3_000.0}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(1_000 * PATIENCE_S)
        page.goto(f"{hub.url}/hub/spawn")
        page.get_by_label("Username").fill("ada")
        page.get_by_label("Password").fill("x")
        page.get_by_role("button", name="Sign in").click()
        now = page.get_by_role("radio", name="1/2 GPU", exact=True)
        expect(now).to_be_enabled()
        card = page.locator("label", has_text="2 GPUs")
        expect(card).to_contain_text("may start in 20 to 50 min")
        expect(card).to_contain_text("Only 1 GPU is free.")
        expect(page.locator("label", has_text="1/2 GPU")).to_contain_text("starts now")
        if folder := os.environ.get("GPUSHARE_PICTURES"):
            for theme in ("dark", "light"):
                page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)
                page.wait_for_timeout(1_000)  # colours fade
                page.screenshot(path=Path(folder) / f"spawn-estimate-{theme}.png")
        browser.close()
