"""Two kernels of 1/4 and 3/4 of one GPU compute at once, and their owners read what each got.

A real Hub, real kernels and JupyterLab in a browser.  Set GPUSHARE_PICTURES to a folder to keep the
pictures that docs/concepts.md shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.conftest import running
from tests.e2e.demo import DemoHub, until
from tests.e2e.test_day import Visitor

# Steps of 20 ms, until the file `stop` is there.
TRAIN = """
from pathlib import Path
from jupyter_gpushare import demo_gpu
buffers = [demo_gpu.open().allocate("4GiB")]
while not Path("stop").exists():
    demo_gpu.train(buffers, 10, 0.02)"""
GENEROUS = 12.0  # percent: all of it runs beside a browser on the same processors


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    spec = "1xH100-80GB,host=512GiB,checkpoint=any-uid"
    with running(DemoHub(tmp_path, idle_timeout_s=600.0, simulate=spec)) as demo:
        yield demo


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_quarter_and_three_quarters_of_a_gpu_compute_at_once(hub: DemoHub, browser: Browser) -> None:
    bo = hub.person("bo")
    bo.start_server(fraction="0.75")
    ada = Visitor(browser, hub, "ada")
    ada.start("1/4 GPU")
    ada.page.locator('.jp-LauncherCard[data-category="Notebook"]').first.click()
    expect(ada.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    row = ada.panel.get_by_role("meter", name="GPU time")
    ada.run_cell(TRAIN)
    bo.kernel().send(TRAIN)

    def measured() -> tuple[float, float] | None:
        shares = (hub.person("ada").lease(), bo.lease())
        a, b = (each["measured_share_percent"] for each in shares)
        return None if a is None or b is None else (a, b)

    until("both compete", measured)
    # The start is in it: a minute in which both run shows the shares.
    ada.page.wait_for_timeout(20_000)
    found = measured()
    assert found == (pytest.approx(25, abs=GENEROUS), pytest.approx(75, abs=GENEROUS))
    expect(row).to_have_attribute("aria-valuetext", re.compile("25 % granted"))
    expect(ada.panel).to_contain_text(re.compile(r"2\d % measured|3\d % measured|1\d % measured"))
    expect(ada.panel).to_contain_text("a kernel of 300 ms is never cut")
    ada.picture("shares")
    (ada.home / "stop").touch()
    (hub.folder / "state" / "home" / "bo" / "stop").touch()
    expect(ada.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
