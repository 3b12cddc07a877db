"""A suspended job resumes on the other GPU while its own is held: real Hub, helper, processes and browser.

Set GPUSHARE_PICTURES to a folder to keep the pictures of its timeline that docs/jobs.md shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.demo import DemoHub, Person, until
from tests.e2e.test_day import Visitor
from tests.e2e.test_story import allocations

GIB = 1 << 30

# Holds most of a GPU until the file that its argument names is there.
HOLD = """
import sys, time
from pathlib import Path
from jupyter_gpushare import demo_gpu
buffer = demo_gpu.open().allocate("70GiB")
print("holds", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""
# Keeps one buffer and computes on another; the file `moved` is there once it was seen on the other GPU.
TRAIN = '''
import os, subprocess, sys
from pathlib import Path
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
kept, trained = gpu.allocate("6GiB"), gpu.allocate("4GiB")
kept.fill(seed=42)
trained.fill(seed=7)
def look(when):
    print(when, kept.checksum(), gpu.memory()[1], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
def train_until(file):
    while not Path(file).exists():
        demo_gpu.train([trained], 1, 0.05)
        print("step", trained.steps, flush=True)
print("pid", os.getpid())
look("before")
train_until("moved")
look("after")
print("intact", kept.is_intact() and trained.is_intact())
try:
    gpu.allocate("35GiB")
except demo_gpu.GpuOutOfMemory as error:
    print("denied:", error)
more = gpu.allocate("20GiB")
child = """
import os
from jupyter_gpushare import demo_gpu
demo_gpu.open().allocate("2GiB")
print("child", os.getpid(), flush=True)
"""
subprocess.run([sys.executable, "-c", child], check=True)
print("tried", flush=True)
train_until("done")
'''


def submit(person: Person, folder: Path, name: str, gpus: str, program: str, *arguments: str) -> str:
    """Submit a Python program as a job that runs in ``folder``; return the job's id."""
    (folder / f"{name}.py").write_text(program)
    command = ["--cwd", str(folder), "--", sys.executable, f"{name}.py", *arguments]
    done = person.gpushare("submit", "--json", "--gpus", gpus, "--name", name, *command)
    return str(json.loads(done.stdout)["id"])


def log_of(person: Person, job: str) -> list[list[str]]:
    """Return the words of each whole line that a job has printed."""
    home = person.hub.folder / "state" / "home" / person.name
    path = home / ".local/share/gpushare/jobs" / job / "attempt-1.log"
    return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def said(person: Person, job: str, word: str) -> list[str]:
    """Return what follows ``word`` where a line of a job's log begins with it, once it does."""

    def look() -> list[list[str]]:
        return [line[1:] for line in log_of(person, job) if line[:1] == [word]]

    return until(f"{job} prints {word}", look)[0]


def steps(person: Person, job: str) -> int:
    return sum(line[:1] == ["step"] for line in log_of(person, job))


def used_gib(person: Person) -> list[int]:
    return [each["used_bytes"] // GIB for each in person.ask("devices")["devices"]]


def devices_of(person: Person, job: str) -> list[int]:
    """Return the numbers of the GPUs that `gpushare status` says a job has."""
    status = json.loads(person.gpushare("status", "--json").stdout)
    numbers = [each["uuid"] for each in person.ask("devices")["devices"]]
    (lease,) = [each for each in status["leases"] if each["server"].startswith(f"j{job}-")]
    return [numbers.index(uuid) for uuid in lease["devices"]]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(300)
def test_a_suspended_job_moves_to_the_other_gpu_while_its_own_is_held(
    hub: DemoHub, browser: Browser, tmp_path: Path
) -> None:
    ada, bo = hub.person("ada"), hub.person("bo")
    assert all(device["movable"] for device in bo.ask("devices")["devices"])

    # Bo's project has one GPU of its own, and borrows half of the other for the job that will move.
    first = submit(bo, tmp_path, "first", "1", HOLD, "first-done")
    said(bo, first, "holds")
    job = submit(bo, tmp_path, "train", "0.5", TRAIN)
    pid = int(said(bo, job, "pid")[0])
    before = said(bo, job, "before")
    (home,) = devices_of(bo, job)
    other = 1 - home
    until("it computes", lambda: steps(bo, job) > 3)
    until("its memory is seen", lambda: 10 <= used_gib(bo)[home] < 20)

    # Ada's project claims that GPU: the job is suspended, and its bytes make way for hers.
    owner = submit(ada, tmp_path, "owner", "1", HOLD, "owner-done")
    said(ada, owner, "holds")
    assert bo.job(job)["state"] == "suspended"
    assert devices_of(bo, job) == [home]

    # The other GPU comes free while its own stays held.
    (tmp_path / "first-done").touch()
    until("the job runs again", lambda: bo.job(job)["state"] == "running")
    assert ada.job(owner)["state"] == "running"
    assert devices_of(bo, job) == [other]
    assert devices_of(ada, owner) == [home]
    seen = steps(bo, job)
    until("it computes again", lambda: steps(bo, job) > seen + 3)
    (tmp_path / "moved").touch()
    said(bo, job, "tried")

    # Its memory is as it was, and so are its limit and its variable; what it makes now is there too.
    assert said(bo, job, "after") == before
    assert said(bo, job, "intact") == ["True"]
    assert "35 GiB" in " ".join(said(bo, job, "denied:"))
    assert allocations(hub, pid) == [(home, 6 * GIB), (home, 4 * GIB), (other, 20 * GIB)]
    assert allocations(hub, int(said(bo, job, "child")[0])) == [(other, 2 * GIB)]
    (move,) = [e for e in hub.ledger() if e["event"] == "move" and e["pid"] == pid]
    assert (move["from_device"], move["device"], move["bytes"] // GIB) == (home, other, 10)
    until("the pages show it there", lambda: 30 <= used_gib(bo)[other] < 40)
    assert 70 <= used_gib(bo)[home] < 75
    assert "It resumed on another GPU." in bo.job(job)["reason"]
    assert "It resumed on another GPU." in bo.gpushare("jobs").stdout

    visitor = Visitor(browser, hub, "bo")
    visitor.start("No GPU")
    visitor.panel.get_by_role("button", name="All jobs").click()
    visitor.page.get_by_role("grid").get_by_text("train", exact=True).click()
    detail = visitor.page.get_by_role("region", name="Job train")
    detail.get_by_role("tab", name="Timeline").click()
    resumed = detail.locator(".gpushare-timeline li[data-what=resume]")
    expect(resumed.last).to_contain_text("resumed on another GPU")
    visitor.picture("job-moved")
    assert visitor.complaints == []

    (tmp_path / "done").touch()
    (tmp_path / "owner-done").touch()
    until("both end", lambda: {bo.job(job)["state"], ada.job(owner)["state"]} == {"succeeded"})
    assert bo.job(job)["attempt"] == 1
