"""kill -9 of the broker, the device helper and the Hub while leases move and jobs run.

At sampled system calls: one thread of the process reaches its N-th call of one of `site.SYSTEM_CALLS`,
and the kernel ends the process before the call has an effect.  At random times: whenever.  The first kill
comes when a job has begun and a lease is suspended.  What must be true afterwards is in
`workload.Workload.judge`.

GPUSHARE_TEST_KILLS sets how many kills at system calls of broker and helper there are (2 by default:
one of each, after its start), a fifth of it at those of the Hub (1 by default), and half of it within 30
minutes at random times (5 within 25 s by default: two of the broker, two of the helper, one of the Hub).
The default kill of the Hub at a system call comes some 10 s after its start, when it answers and servers
of jobs start and end; kills in its own start are in the long form.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.faults import site
from tests.faults.workload import Workload
from tests.waiting import until

LONG = "GPUSHARE_TEST_KILLS" in os.environ
KILLS = int(os.environ.get("GPUSHARE_TEST_KILLS", "2"))
HUB_KILLS = max(4, KILLS // 5) if LONG else 1
RANDOM_KILLS, RANDOM_S = (KILLS // 2, 1800.0) if LONG else (5, 25.0)
# So many calls a process makes within seconds.
MOST_CALLS = 500
# The broker and the helper make fewer calls of one kind in one thread until they are healthy.
BROKER_STARTED, HELPER_STARTED = 200, 40
# The Hub makes about 200 until it answers, and 40 a second when servers start.
MOST_HUB_CALLS = 800
SEED = random.randrange(1 << 32) if LONG else 20261122
INSTALL_STRACE = "apt-get update && apt-get install -y strace"


@pytest.fixture(scope="session")
def strace(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips the test, saying why, where a process cannot be killed at a system call."""
    if shutil.which("strace") is None:
        pytest.skip(f"no strace; install it with: {INSTALL_STRACE}")
    trace = site.Trace(tmp_path_factory.mktemp("strace") / "calls")
    tried = subprocess.run([*trace.command(1, "-f"), "ls", "/"], capture_output=True, text=True)
    if tried.returncode != -9:
        pytest.skip(f"this machine does not let strace trace its own child (ptrace): {tried.stderr[-300:]}")


@pytest.fixture
def workload() -> Iterator[Workload]:
    with site.running(site.Site) as whole:
        print(f"seed {SEED}")
        workload = Workload(whole, random.Random(SEED))
        try:
            workload.begin()
            log = whole.services["broker"].log
            until(workload.moves, "a lease is suspended while jobs run", log=log)
            yield workload
        finally:
            workload.abandon()


def settled(workload: Workload) -> None:
    took_s = workload.settle()
    workload.end()
    print(f"settled {took_s:.1f} s after the last fault; {len(workload.accepted)} jobs")
    if LONG:
        assert took_s <= 30
    workload.judge()


@pytest.mark.long_form
@pytest.mark.timeout(7200 if LONG else 1800)
def test_killed_at_sampled_system_calls(strace: None, workload: Workload) -> None:
    chance, services = random.Random(SEED), list(workload.site.services.values())
    points = [BROKER_STARTED, HELPER_STARTED]  # the helper is started first
    if LONG:
        points = [int(MOST_CALLS ** chance.random()) for _ in range(KILLS)]
    print("kills at calls", points)
    for service in services:
        service.kill()
    while points or any(service.trace for service in services):
        for service in services:
            if service.has_ended():
                service.start(points.pop() if points else 0)
            elif service.trace:
                service.trace.check()
        time.sleep(0.05)
    settled(workload)


@pytest.mark.long_form
@pytest.mark.timeout(7200 if LONG else 1800)
def test_the_hub_killed_at_sampled_system_calls(strace: None, workload: Workload) -> None:
    chance, hub = random.Random(SEED), workload.site.hub
    # Of its first thread alone, which does nearly everything: servers and jobs are its children.
    points = [int(MOST_HUB_CALLS ** chance.uniform(0.7, 1)) for _ in range(HUB_KILLS)]
    print("kills at calls", points)
    trace = site.Trace(workload.site.folder / "calls-hub")
    hub.kill()
    for point in points:
        hub.launch(trace.command(point, "-D"))
        began = time.monotonic()
        while hub.alive():
            trace.check()
            time.sleep(0.05)
        print("killed at call", point, f"after {time.monotonic() - began:.0f} s")
        hub.kill()
    hub.start()
    settled(workload)


@pytest.mark.long_form
@pytest.mark.timeout(7200 if LONG else 1800)
def test_killed_at_random_times(workload: Workload) -> None:
    processes, chance = workload.site, random.Random(SEED)
    # Each as often.
    services = [name for _ in range(RANDOM_KILLS) for name in chance.sample(("broker", "helper"), 2)]
    for number in range(RANDOM_KILLS):
        time.sleep(chance.uniform(0, 2 * RANDOM_S / RANDOM_KILLS))
        # A Hub takes seconds to start.
        name = "hub" if number % 12 == 3 else services.pop()
        print("kill", number, name)
        if name == "hub":
            processes.hub.kill()
            processes.hub.start()
        else:
            processes.services[name].kill()
            until(processes.services[name].has_ended, "it has ended")
            processes.services[name].start()
    settled(workload)
