"""Measure one user's requests while another user submits as fast as the broker answers.

``.venv/bin/python -m tests.benchmarks.submit_fairness [requests]``

The broker, with SQLite on disk and one GPU, and the Hub of a site in memory run in one process on the
first core; the load runs in separate processes, niced, on the last core.  Ada submits and reads her
status, one request after the other: alone, beside 2,000 sequential submits of bo, and beside six threads
of bo that submit all the time, with and without the rate limit of each user.  Before each run bo has 900
jobs in the queue, so that the queue is always long.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from jupyter_gpushare.broker.http.listener import Rate
from jupyter_gpushare.broker.state.store import Store
from tests.benchmarks.report import percentile, print_table
from tests.broker import brokers
from tests.broker.http_site import Http
from tests.broker.site import Site

QUEUED = 900
SUBMITS = 2_000  # of one thread
SUBMITTERS = 6
JOB = {"command": ["true"], "gpus": "1"}


def _serve(pipe: Connection, limited: bool) -> None:
    os.sched_setaffinity(0, {0})
    # As in production: commits to the disk, in a thread.
    brokers.SteppingStore = lambda url, boot_id, _broker: Store(url, boot_id)
    brokers._at_once = asyncio.to_thread

    async def serve() -> None:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            site = Site(Path(folder), gpus=1)
            site.policy = replace(site.policy, max_jobs_per_user=10_000)
            http = Http(site)
            await http.open()
            http.broker.begin()
            if not limited:
                http.service.limits.changes = Rate(per_s=10_000, burst=10_000)
            gc.collect()
            gc.freeze()
            for _ in range(QUEUED):
                await site.submit("bo", "1")
            pipe.send(http.api)
            await asyncio.to_thread(pipe.recv)
            await http.close()

    asyncio.run(serve())


def _submit_all_the_time(api: str, stop: threading.Event, done: list[int], most: int) -> None:
    headers = {"Authorization": "token bo"}
    with httpx.Client(base_url=api, headers=headers, trust_env=False, timeout=30) as client:
        while not stop.is_set() and len(done) < most:
            done.append(client.post("/jobs", json=JOB).status_code)


def _load(api: str, pipe: Connection, count: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(19)
    stop, done = threading.Event(), []
    most = SUBMITS if count == 1 else sys.maxsize
    threads = [
        threading.Thread(target=_submit_all_the_time, args=(api, stop, done, most)) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    pipe.recv()
    stop.set()
    for thread in threads:
        thread.join()
    pipe.send((done.count(201), done.count(429)))


def _measure(
    requests: int, *, submitters: int, limited: bool
) -> tuple[list[float], list[float], tuple[int, int]]:
    """Return seconds of submits and of reads, and the numbers of bo's accepted and refused submits."""
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(theirs, limited), daemon=True)
    server.start()
    api = mine.recv()
    submits, reads, answered = [], [], (0, 0)
    here, there = multiprocessing.Pipe()
    load = multiprocessing.Process(target=_load, args=(api, there, submitters), daemon=True)
    if submitters:
        load.start()
    headers = {"Authorization": "token ada"}
    with httpx.Client(base_url=api, headers=headers, trust_env=False, timeout=30) as client:
        for _ in range(requests):
            for took, method, path in ((submits, "POST", "/jobs"), (reads, "GET", "/status")):
                begun = time.perf_counter()
                client.request(method, path, json=JOB if took is submits else None).raise_for_status()
                took.append(time.perf_counter() - begun)
            time.sleep(0.2)  # below the rate that is allowed to each user
    if submitters:
        here.send("stop")
        answered = here.recv()
        load.join()
    mine.send("end")
    server.join()
    return submits, reads, answered


def main(requests: int) -> None:
    rows = []
    for name, submitters, limited in (
        ("alone", 0, True),
        ("beside one submitter", 1, True),
        ("beside six submitters", SUBMITTERS, True),
        ("the same without the limit of 10 changes a second", SUBMITTERS, False),
        ("alone again", 0, True),
    ):
        submits, reads, (accepted, refused) = _measure(requests, submitters=submitters, limited=limited)
        figures = [f"{1000 * percentile(took, p):.1f}" for took in (submits, reads) for p in (50, 95)]
        rows.append([name, *figures, f"{accepted} / {refused}"])
    head = ["", "submit p50, ms", "p95", "status p50, ms", "p95", "bo accepted / refused"]
    print_table("tests.benchmarks.submit_fairness", head, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
