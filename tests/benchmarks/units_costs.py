"""Measure a site with systemd: processor time at rest, and the bytes that a day of 20 users writes.

``.venv/bin/python -m tests.benchmarks.units_costs [seconds]``   (as root)

The units and configurations of docs/admin.md run under a separate systemd (tests/setup/machine.py), with
simulated GPUs and the wheel of this checkout.  20 sessions with an eighth of a GPU each hold GPU memory
and idle; a stub replaces JupyterLab.  Then every user starts a second session and runs five jobs.  A day
consists of this use and 24 hours at rest.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

import jupyter_gpushare
from tests.benchmarks.broker_footprint import cpu_s
from tests.benchmarks.demo_hub import CONFIG, Users, until
from tests.benchmarks.report import print_table
from tests.setup.conftest import ROOT, build
from tests.setup.machine import SERVICES, Site, installed

USERS, STARTS, JOBS = 20, 2, 5
GROUPS = ("vision", "nlp")
OPTIONS = {"gpushare": {"fraction": "0.125"}}


def services(site: Site) -> dict[str, psutil.Process]:
    """Return the working processes by their names in the table."""
    hub = [psutil.Process(pid) for pid in site.pids("jupyterhub.service")]  # servers and proxy as well
    (broker,) = site.pids("gpushare-broker.service")
    (helper,) = site.pids("gpushare-helper.service")
    return {
        "broker": psutil.Process(broker),
        "helper": psutil.Process(helper),
        "Hub": next(each for each in hub if "jupyterhub_config.py" in " ".join(each.cmdline())),
        "proxy": next(each for each in hub if "configurable-http-proxy" in " ".join(each.cmdline())),
        "systemd": psutil.Process(site.pid),
    }


def sizes(site: Site) -> tuple[int, int]:
    """Return the bytes of the broker's database, and of the logs of Hub, broker and helper."""
    query = "pragma page_count; pragma freelist_count; pragma page_size"
    said = site.shell(f"sqlite3 -readonly /var/lib/gpushare/broker.sqlite '{query}'")
    pages, free, size = (int(line) for line in said.splitlines()[:3])
    logs = [site.folder / f"{name}.log" for name in SERVICES]
    return (pages - free) * size, sum(path.stat().st_size for path in logs if path.exists())


def use(hub: Users, users: list[str]) -> None:
    """Run what every user does on a day, except the first start of a session."""
    for user in users:
        hub.stop(user)
        hub.start(user, OPTIONS)
        with hub.broker(user) as broker:
            job = {"command": ["true"], "gpus": "1/8"}
            made = [broker.post("jobs", json=job).raise_for_status().json()["id"] for _ in range(JOBS)]
            until(
                lambda made=made, broker=broker: all(
                    broker.get(f"jobs/{job}").json()["state"] == "succeeded" for job in made
                ),
                f"{user}'s jobs have ended",
                patience_s=300,
            )


def measure(site: Site, seconds: int) -> tuple[dict[str, float], list[list[float]]]:
    """Return percent of a core by process at rest; KiB of database and logs: active, per hour, per day."""
    hub = Users(site.url, site.port)
    users = [f"user{number}" for number in range(USERS)]
    for number, user in enumerate(users):
        hub.add(user, GROUPS[number % len(GROUPS)])
    before = sizes(site)
    for user in users:
        hub.start(user, OPTIONS)
        hub.hold(user)
    started = sizes(site)
    time.sleep(10)  # until the effects of the last start have settled
    watched = services(site)
    rest, used_s, begun = (
        sizes(site),
        {name: cpu_s([each]) for name, each in watched.items()},
        time.monotonic(),
    )
    time.sleep(seconds)
    took_s = time.monotonic() - begun
    percent = {name: 100 * (cpu_s([each]) - used_s[name]) / took_s for name, each in watched.items()}
    hours = [(now - then) / took_s * 3600 for now, then in zip(sizes(site), rest, strict=True)]
    again = sizes(site)
    use(hub, users)
    active = [(b - a) + (d - c) for a, b, c, d in zip(before, started, again, sizes(site), strict=True)]
    return percent, [
        [value / 1024 for value in (done, hour, done + 24 * hour)]
        for done, hour in zip(active, hours, strict=True)
    ]


def main(seconds: int) -> None:
    if os.geteuid() != 0:
        raise SystemExit("needs root: systemd is process 1 of a namespace")
    with tempfile.TemporaryDirectory(prefix="gpushare-wheel-") as name:
        done = build("wheel", ROOT, Path(name))
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        (wheel,) = Path(name).glob("*.whl")
        with installed(wheel, jupyter_gpushare.__version__, CONFIG) as site:
            percent, (database, logs) = measure(site, seconds)
    module = "tests.benchmarks.units_costs"
    print_table(
        module,
        [f"CPU, % of one core, {USERS} idle sessions ({seconds} s)", *percent, "together"],
        [["", *(f"{value:.2f}" for value in percent.values()), f"{sum(percent.values()):.2f}"]],
    )
    print_table(
        module,
        ["KiB", f"{USERS} users: {STARTS} sessions and {JOBS} jobs each", "an hour at rest", "a day"],
        [
            ["database", *(f"{value:,.0f}" for value in database)],
            ["logs of Hub, broker and helper", *(f"{value:,.0f}" for value in logs)],
        ],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
