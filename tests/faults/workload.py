"""Work that continues while processes of a `Site` are killed, and the checks afterwards."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_gpushare.protocol.jobfiles import AttemptRecord, log_path, read_record
from tests.faults.site import SESSION_MIB, Site
from tests.waiting import until

TRAIN = Path(__file__).with_name("train.py")
SETTLED = ("pending", "running", "suspended")
# The number of jobs that wait or run at once.
IN_FLIGHT = 4
MIB = 1 << 20


@dataclass
class Workload:
    """Submits jobs of bo, with retries until each gets a 201, and runs cells in the session of ada."""

    site: Site
    chance: random.Random
    accepted: dict[str, str] = field(default_factory=dict)  # idempotency keys by job id
    cells: int = 0
    # By (job id, attempt), as they were written: the runner keeps only those of the newest attempts.
    records: dict[tuple[str, str], AttemptRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.site.folder / "jobs"
        self.folder.mkdir()
        self.home = self.site.folder / "home" / "ada"
        self._stop = threading.Event()
        self._is_abandoned = False
        self._error: BaseException | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        answer = self.site.hub.start_server("ada", {"fraction": "1"})
        assert answer.status_code in (201, 202), answer.text
        self.cell()
        until(lambda: self.answers() == ["ok"], "the first cell ran")
        self._thread.start()

    def end(self) -> None:
        """Stop submitting; the last request is retried until it is answered."""
        self._stop.set()
        until(lambda: not self._thread.is_alive(), "the last request is answered")
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop all work; call this before the site is closed, also after a failure."""
        self._is_abandoned = True
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- work

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def _work(self) -> None:
        number = 0
        while not self._stop.is_set():
            ended = [(job, attempt) for job, attempt, what in self.notes() if what == "end"]
            self._keep_records(ended)
            if len(self.accepted) - len(ended) < IN_FLIGHT:
                number += 1
                self._submit(f"key-{number}")
            if self.chance.random() < 0.1 and len(self.answers()) == self.cells:
                self.cell()
            time.sleep(0.2)

    def _submit(self, key: str) -> None:
        size, mib = self.chance.choice((("1", [SESSION_MIB]), ("2", [SESSION_MIB] * 2), ("1/2", [20_000])))
        seconds = self.chance.choice((0, 0.5, 2, 4))
        job = {
            "command": [sys.executable, str(TRAIN), str(self.folder), str(seconds), *map(str, mib)],
            "gpus": size,
            "checkpoint": self.chance.choice(("suspend", "sigterm", "none")),
        }
        while not self._is_abandoned:
            answer = self.site.ask("POST", "jobs", "bo", json=job, headers={"Idempotency-Key": key})
            if answer is not None and answer.status_code == 201:
                self.accepted[answer.json()["id"]] = key
                return
            # The broker has not measured yet, or cannot reach the Hub (for the token) or the helper.
            assert answer is None or answer.status_code == 503 or "devices_unknown" in answer.text, (
                answer.text
            )
            time.sleep(0.5)

    def cell(self) -> None:
        """Run a cell in the session of ada."""
        self.cells += 1
        (self.home / "cells").write_text(str(self.cells))

    # ---- results

    def notes(self) -> list[tuple[str, str, str]]:
        """Return (job id, attempt, event) for every line that a job wrote."""
        path = self.folder / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(job, attempt, what) for job, attempt, what in map(str.split, lines)]

    def _keep_records(self, attempts: Iterable[tuple[str, str]]) -> None:
        """Keep the records that runners wrote of ended attempts."""
        for job, attempt in attempts:
            if (job, attempt) not in self.records:
                record = self.record(job, attempt)
                if record is not None and record.state == "ended":
                    self.records[job, attempt] = record

    def record(self, job: str, attempt: str) -> AttemptRecord | None:
        """Return the record that the runner of an attempt wrote, or None without the file."""
        if (job, attempt) in self.records:
            return self.records[job, attempt]
        return read_record(log_path(self.site.folder / "home" / "bo", job, int(attempt)).with_suffix(".json"))

    def answers(self) -> list[str]:
        path = self.home / "answers"
        return [line.split()[2] for line in path.read_text().splitlines()] if path.exists() else []

    def moves(self) -> bool:
        """Return whether a job has begun and a lease is suspended."""
        return any(what == "begin" for *_, what in self.notes()) and "suspended" in self.leases().values()

    def leases(self) -> dict[str, str]:
        """Return the states of all leases by id."""
        return until(self._leases, "the broker answers")[0]

    def _leases(self) -> list[dict[str, str]]:
        answer = self.site.ask("GET", "leases?all=1")
        if answer is None or answer.status_code != 200:
            return []
        return [{lease["id"]: lease["state"] for lease in answer.json()["leases"]}]

    def job(self, job_id: str) -> dict[str, Any]:
        def answered() -> dict[str, Any] | None:
            answer = self.site.ask("GET", f"jobs/{job_id}", "bo")
            if answer is None or answer.status_code == 503:
                return None
            assert answer.status_code == 200, f"job {job_id} was lost: {answer.text}"
            return dict(answer.json())

        return until(answered, "the broker answers")

    def settle(self) -> float:
        """Wait until each current lease has been seen in a lasting state; return the seconds that took."""
        began = time.monotonic()
        waiting = set(self.leases())

        def all_seen() -> bool:
            now = self.leases()
            waiting.difference_update([each for each in waiting if now.get(each, "running") in SETTLED])
            return not waiting

        until(all_seen, "every lease settles", log=self.site.services["broker"].log)
        return time.monotonic() - began

    def judge(self) -> None:
        """Check all promises; call this after the last fault and after `end`."""
        site = self.site
        until(site.is_healthy, "the broker is healthy")
        for job_id in self.accepted:
            until(
                lambda job_id=job_id: self.job(job_id)["ended_at"],
                f"job {job_id} ends",
                log=self.folder / "runs",
            )
        states = {job_id: self.job(job_id)["state"] for job_id in self.accepted}
        assert set(states.values()) <= {"succeeded"}, (states, self.notes())
        counted = Counter(self.notes())
        assert not [each for each in counted if each[2] in ("twice", "memory")], counted
        assert max(counted.values()) == 1, f"an attempt ran twice: {counted}"
        last = {job: str(max(int(n) for each, n, _ in counted if each == job)) for job, _, _ in counted}
        wrong = [job for job in self.accepted if (job, last.get(job, ""), "end") not in counted]
        assert not wrong, (
            f"the last attempt did not end: {[each for each in self.notes() if each[0] in wrong]}"
        )
        for job, attempt, _ in [each for each in counted if each[2] == "end" and each[1] != last[each[0]]]:
            record = self.record(job, attempt)
            # SIGTERM came after the last line, while the interpreter ended, so its exit was no success.
            was_stopped = record is not None and record.stopped and record.exit_code != 0
            assert was_stopped, (
                f"attempt {attempt} of {job} had ended and ran again: {record}, {self.notes()}"
            )
        self.cell()
        until(lambda: len(self.answers()) == self.cells, "the last cell ran")
        assert set(self.answers()) == {"ok"}
        until(lambda: list(self.leases().values()) == ["running"], "only the session is left")
        for job_id, attempt in {(job, attempt) for job, attempt, _ in counted}:
            gone = f"j{job_id}-{attempt}"
            until(lambda gone=gone: not site.processes_of(gone), f"no process of {gone} lives")
        held = sum(site.sim.device_used(device) for device in range(2))
        assert SESSION_MIB * MIB <= held < (SESSION_MIB + 2048) * MIB, "only the session's memory is left"
        site.hub.stop_server("ada")
        until(lambda: not self.leases(), "no lease is left")
        until(lambda: not sum(map(site.sim.device_used, range(2))), "all memory is free")
