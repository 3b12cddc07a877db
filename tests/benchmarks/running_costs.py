"""What an administrator sees of a running site: start-up, restarts, growth of database and log.

``.venv/bin/python -m tests.benchmarks.running_costs``

A demo Hub with 16 simulated GPUs.  The broker is killed and started again by its parent, which holds
its port: no request is refused, and the gap that a user sees lasts until all is well again.  Growth is
measured for one start and stop of a session, for one job, and for an hour in which nothing happens; a
day is 20 users with two starts and five jobs each.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.benchmarks.broker_footprint import SIMULATE, only
from tests.benchmarks.demo_hub import DemoHub, demo_hub, until
from tests.benchmarks.report import print_table, spread
from tests.simulator import Simulator

# A day, and what is measured of it.
USERS, STARTS, JOBS = 20, 2, 5
MEASURED_USERS, MEASURED_JOBS = 8, 2
RESTARTS = 10
JOB = {"command": ["true"], "gpus": "1/8"}


def stored_bytes(hub: DemoHub) -> int:
    """What the broker's database holds, with what is not yet in its main file."""
    database = hub.folder / "state/broker/broker.sqlite"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        (pages,), (free,), (size,) = (
            db.execute(f"pragma {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def sizes(hub: DemoHub) -> tuple[int, int]:
    """Bytes in the database and in the log of Hub, broker and helper."""
    return stored_bytes(hub), (hub.folder / "log").stat().st_size


def growth(hub: DemoHub, before: tuple[int, int], count: float) -> tuple[float, float]:
    now = sizes(hub)
    return (now[0] - before[0]) / count, (now[1] - before[1]) / count


def jobs(hub: DemoHub, users: list[str]) -> None:
    """Every user runs its jobs; returns when all have ended."""
    for user in users:
        with hub.broker(user) as broker:
            made = [
                broker.post("jobs", json=JOB).raise_for_status().json()["id"] for _ in range(MEASURED_JOBS)
            ]
            until(
                lambda made=made, broker=broker: all(
                    broker.get(f"jobs/{job}").json()["state"] == "succeeded" for job in made
                ),
                f"{user}'s jobs have ended",
                patience_s=300,
            )


def gaps_s(hub: DemoHub) -> list[float]:
    """Seconds from the end of a killed broker to the next answer that all is well; none is refused."""
    url = f"http://127.0.0.1:{hub.port + 3}/services/gpushare/api/v1/health"
    found = []
    for _ in range(RESTARTS):
        killed = only(hub.processes("broker"))
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(60)
        before = time.perf_counter()
        # 503: it answers, and has not yet heard of the device helper.
        until(lambda: httpx.get(url, timeout=60).status_code == 200, "the broker is at work", pause_s=0.01)
        found.append(time.perf_counter() - before)
    return found


def helper_starts_s() -> list[float]:
    """Seconds from the start of a device helper to its listening socket, the self-test left out."""
    found = []
    for _ in range(5):
        with tempfile.TemporaryDirectory(prefix="gpushare-start-") as name:
            socket = Path(name, "helper.sock")
            command = [sys.executable, "-m", "jupyter_gpushare.cli", "helper"]
            command += ["--state-dir", f"{name}/helper", "--socket", str(socket)]
            env = Simulator(Path(name), SIMULATE).env()
            before = time.perf_counter()
            helper = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until(lambda socket=socket: socket.exists(), "the helper listens", pause_s=0.005)
            found.append(time.perf_counter() - before)
            helper.terminate()
            helper.wait(60)
    return found


def main(idle_s: int) -> None:
    helper_s = helper_starts_s()
    with demo_hub(simulate=SIMULATE) as hub:
        users = [f"user{number}" for number in range(MEASURED_USERS)]
        for number, user in enumerate(users):
            hub.add_user(user, "vision" if number % 2 else "nlp")
        before = sizes(hub)
        for user in users:
            hub.start(user, {"gpushare": {"fraction": "0.125"}})
            hub.stop(user)
        session = growth(hub, before, MEASURED_USERS)
        before = sizes(hub)
        jobs(hub, users)
        job = growth(hub, before, MEASURED_USERS * MEASURED_JOBS)
        before = sizes(hub)
        time.sleep(idle_s)
        hour = growth(hub, before, idle_s / 3600)
        gaps = gaps_s(hub)
    day = [USERS * (STARTS * s + JOBS * j) + 24 * h for s, j, h in zip(session, job, hour, strict=True)]
    print_table(
        "tests.benchmarks.running_costs",
        ["KiB", "one session", "one job", f"an idle hour (from {idle_s} s)", "a day, 20 users"],
        [
            [name, *(f"{values[index] / 1024:.1f}" for values in (session, job, hour, day))]
            for index, name in enumerate(("database", "log (Hub, broker and helper)"))
        ],
    )
    print_table(
        "tests.benchmarks.running_costs",
        ["ms", "median and range"],
        [
            ["device helper: start to its socket", spread([1000 * value for value in helper_s])],
            [
                f"broker killed, until its health is good again ({RESTARTS} times)",
                spread([1000 * gap for gap in gaps]),
            ],
        ],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
