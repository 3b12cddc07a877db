"""A cancelled job with a program that ignores SIGTERM, on real processes and a simulated GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from tests.faults.site import HERE, Site, running
from tests.waiting import PATIENCE_S, until

GRACE_S = 3.0
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path.insert(0, sys.argv[1])
import worker
assert worker.init()[0] == 0 and worker.alloc(20_000) == 0
if os.fork() == 0:  # a daemon of its own, which holds no memory
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[2], "w").close()
    else:
        os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def site() -> Iterator[Site]:
    with running(Site) as site:
        yield site


def test_a_cancel_ends_at_most_a_second_after_its_grace(site: Site) -> None:
    took = []
    until(lambda: took.append(cancelled(site, len(took))) or min(took) <= GRACE_S + 1, str(took))
    print("seconds from cancel to the end:", took)
    assert min(took) >= GRACE_S


def cancelled(site: Site, number: int) -> float:
    """Seconds from the cancel of a job that runs to its end."""
    ready = site.folder / f"ready-{number}"
    job = {
        "command": [sys.executable, "-c", STUBBORN, str(HERE.parent / "gpu"), str(ready)],
        "gpus": "1/2",
        "grace_s": GRACE_S,
    }

    def submitted() -> str:
        answer = site.ask("POST", "jobs", "bo", json=job, headers={"Idempotency-Key": f"key-{number}"})
        return str(answer.json()["id"]) if answer is not None and answer.status_code == 201 else ""

    job_id = until(submitted, "the job is accepted")
    until(ready.exists, "the job runs", log=site.services["broker"].log)
    began = time.monotonic()
    assert site.answer("DELETE", f"jobs/{job_id}", "bo")["state"] == "stopping"
    while True:
        answer = site.ask("GET", f"jobs/{job_id}", "bo")
        took = time.monotonic() - began
        if answer is not None and answer.json()["ended_at"]:
            break
        assert took < PATIENCE_S, site.services["broker"].tail()
        time.sleep(0.02)
    assert answer.json()["state"] == "cancelled"
    assert not site.processes_of(f"j{job_id}-1"), "the daemon is gone too"
    assert not site.sim.device_used(0) + site.sim.device_used(1)
    return took
