"""A job appears as a guest on what another job leaves of its GPU, and leaves when that one needs it.

A real Hub, real processes on the simulated driver, and JupyterLab in a browser.  Set GPUSHARE_PICTURES to a
folder to keep the pictures that docs/jobs.md shows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.e2e.conftest import running
from tests.e2e.demo import DemoHub, Person, until
from tests.e2e.test_day import Visitor
from tests.e2e.test_move import said, steps

# Uses a quarter of its GPU and computes half of the time; from the file `grow` on it uses nearly all of it.
HOST = """
import time
from pathlib import Path
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
kept, trained = gpu.allocate("16GiB"), gpu.allocate("4GiB")
kept.fill(seed=42)
print("holds", flush=True)
def train_until(file):
    while not Path(file).exists():
        demo_gpu.train([trained], 1, 0.1)
        print("step", trained.steps, flush=True)
        time.sleep(0.1)
train_until("grow")
began = time.monotonic()
more = gpu.allocate("50GiB")
print("grown", round(time.monotonic() - began, 2), kept.is_intact(), flush=True)
train_until("done")
"""
# Keeps one buffer and computes on another, until the file `done` is there.
GUEST = """
from pathlib import Path
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
kept, trained = gpu.allocate("6GiB"), gpu.allocate("4GiB")
kept.fill(seed=7)
while not Path("done").exists():
    demo_gpu.train([trained], 1, 0.005)
    print("step", trained.steps, flush=True)
print("intact", kept.is_intact(), flush=True)
"""
# A host is watched and tried for seconds instead of minutes.
SOON = """
(service,) = c.JupyterHub.services
service["command"][-1] = f"--config={__file__}"  # the broker reads this file too
from jupyter_gpushare.broker.state import observations
from jupyter_gpushare.core import pairs
observations.WATCHED_S = pairs.ALONE_S = 10.0
pairs.TRIAL_S, pairs.REVIEW_S = 20.0, 40.0
pairs._ALONE_SPANS, pairs._BESIDE_SPANS = (5.0, 12), (5.0, 10)
"""
COPY_S = 1.0  # of the guest's 10 GiB
GRACE_S = 10.0  # a browser, a Hub and four jobs run on the same processors


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    spec = "1xH100-80GB,host=512GiB,copy=10GiB/s,checkpoint=any-uid"
    with running(DemoHub(tmp_path, idle_timeout_s=600.0, simulate=spec, site=SOON)) as demo:
        yield demo


def submit(person: Person, folder: Path, name: str, program: str) -> str:
    """Submit a Python program as a job of one GPU that may share it; return the job's id."""
    (folder / f"{name}.py").write_text(program)
    options = ["--json", "--share", "yes", "--name", name, "--cwd", str(folder)]
    done = person.gpushare("submit", *options, "--", sys.executable, f"{name}.py")
    return str(json.loads(done.stdout)["id"])


def selected(visitor: Visitor, name: str) -> Locator:
    """Return the detail of a job that was selected in the list."""
    visitor.page.get_by_role("grid").get_by_text(name, exact=True).click()
    return visitor.page.get_by_role("region", name=f"Job {name}")


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_guest_appears_and_leaves_when_its_host_needs_the_memory(
    hub: DemoHub, browser: Browser, tmp_path: Path
) -> None:
    bo, folder = hub.person("bo"), tmp_path
    night = submit(bo, folder, "night", HOST)
    said(bo, night, "holds")
    assert "It may share its GPU with another job." in bo.job(night)["reason"]
    sweep = submit(bo, folder, "sweep", GUEST)
    assert "It may also run as a guest on the GPU of another job." in bo.job(sweep)["reason"]

    # It appears, and both owners read it.
    until("the second job is a guest", lambda: bo.job(sweep)["shared"] == "guest", 120)
    until("it computes", lambda: steps(bo, sweep) > 3)
    guest, host = bo.job(sweep), bo.job(night)
    assert (guest["shared_with"], host["shared"], host["shared_with"]) == (night, "host", sweep)
    (device,) = bo.ask("devices")["devices"]
    assert device["held_milli"] == 1000
    assert "as a guest" in bo.gpushare("jobs").stdout
    assert f"shares its GPU with job {sweep}" in bo.gpushare("show", night).stdout
    visitor = Visitor(browser, hub, "bo")
    visitor.start("No GPU")
    visitor.panel.get_by_role("button", name="All jobs").click()
    expect(visitor.page.get_by_role("grid")).to_contain_text("Running as a guest")
    detail = selected(visitor, "night")
    expect(detail).to_contain_text(re.compile(r"another job; it keeps \d+ % of its speed"))
    visitor.picture("guest")

    # Its host allocates: that waits for the guest's copy, and is never refused.
    before = steps(bo, sweep)
    (folder / "grow").touch()
    took_s, intact = said(bo, night, "grown")
    assert intact == "True"
    assert float(took_s) <= COPY_S + 0.1 + GRACE_S
    until("the guest has left", lambda: bo.job(sweep)["state"] == "suspended")
    assert "needed the memory" in bo.job(sweep)["reason"]
    assert bo.job(night)["shared"] == ""
    expect(detail).not_to_contain_text("Shares its GPU with another job")
    detail.get_by_role("tab", name="Timeline").click()
    left = detail.locator(".gpushare-timeline li[data-what=guest]").last
    expect(left).to_contain_text(re.compile(r"left after \d+\.\d s: the job needed the memory"))
    visitor.picture("guest-left")
    assert visitor.complaints == []

    # It goes on where it was, once the GPU is free.
    (folder / "done").touch()
    until("both end", lambda: {bo.job(night)["state"], bo.job(sweep)["state"]} == {"succeeded"})
    assert said(bo, sweep, "intact") == ["True"]
    assert steps(bo, sweep) >= before
    assert bo.job(sweep)["attempt"] == 1
