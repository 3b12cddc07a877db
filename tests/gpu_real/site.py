"""A machine with a device helper for the scenarios: a real one, or the simulated driver.

Needs pytest, psutil and nvidia-ml-py beside the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_gpushare import native
from tests.gpu.machine import GIB, Client, Worker, until

ROOT = Path(__file__).resolve().parents[2]
WORKERS = {
    "driver": ROOT / "tests/gpu/worker.py",
    "torch": Path(__file__).with_name("torch_worker.py"),
    "cupy": Path(__file__).with_name("cupy_worker.py"),
    "jax": Path(__file__).with_name("jax_worker.py"),
}
PATIENCE_S = 120.0


class Report:
    """Rows of one table, printed at the end; they go into docs/benchmarks.md."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def add(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))

    def text(self, title: str) -> str:
        rows = [f"| {what} | {figure} |" for what, figure in self.rows]
        return "\n".join(["", title, "", "| what | measured |", "|---|---|", *rows, ""])


class Site:
    """The helper, the largest device of the machine, and processes of leases."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], *, scale_bytes: int = GIB, sample_s: float = 0.5
    ) -> None:
        """``scale_bytes`` is what a scenario means by a GiB where memory is really filled."""
        self.folder = folder
        self.socket = folder / "h.sock"
        self.environment = dict(environment)
        self.scale_bytes = scale_bytes
        self.sample_s = sample_s
        self.report = Report()
        self._log = (folder / "helper.log").open("wb")
        self._workers: list[Worker] = []
        command = [
            sys.executable, "-m", "jupyter_gpushare.gpu.helper",
            "--state-dir", str(folder / "state"), "--socket", str(self.socket), "--sample-s", str(sample_s),
        ]  # fmt: skip
        self.helper = subprocess.Popen(command, stderr=self._log, cwd=ROOT, env=self.environment)
        until(self.socket.exists, "the helper listens", PATIENCE_S)
        self.client = Client(self.socket)
        self.device = until(self._examined, "the self-test ends", PATIENCE_S)

    def _examined(self) -> dict[str, Any] | None:
        devices = self.client.ask("inventory")["devices"]
        best: dict[str, Any] = max(devices, key=lambda device: device["memory_bytes"])
        return best if "not finished" not in best["suspend_reason"] else None

    @property
    def uuid(self) -> str:
        uuid: str = self.device["uuid"]
        return uuid

    @property
    def grantable_bytes(self) -> int:
        grantable: int = self.device["memory_bytes"] - self.device["reserve_bytes"]
        return grantable

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """A request that may take long, on a connection of its own."""
        client = Client(self.socket, patience_s=600.0)
        try:
            return client.ask(verb, **fields)
        finally:
            client.close()

    def lease(self, name: str, limit_bytes: int, *, preload: bool = True) -> dict[str, str]:
        """The environment of a process of a new lease."""
        made = self.client.ask("set_limit", lease=name, uid=os.geteuid(), limits={self.uuid: limit_bytes})
        environment = {
            **self.environment,
            "GPUSHARE_LEASE": name,
            "GPUSHARE_LEASE_DIR": made["directory"],
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "PYTHONPATH": str(ROOT),
        }
        return environment | ({"LD_PRELOAD": str(native.preload_path())} if preload else {})

    def worker(self, kind: str, environment: Mapping[str, str], mib: int = 0) -> Worker:
        """A process that does on the GPU what it is told."""
        return self.program([sys.executable, str(WORKERS[kind])], environment, mib)

    def program(self, command: Sequence[str], environment: Mapping[str, str], mib: int = 0) -> Worker:
        process = subprocess.Popen(
            [*command],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        worker = Worker(process)
        self._workers.append(worker)
        assert worker.answer(PATIENCE_S) == "ready 0"
        if mib:
            assert do(worker, f"alloc {mib}") == "0"
        return worker

    def of(self, name: str) -> dict[str, Any]:
        """A lease as the last sample shows it."""
        found: dict[str, Any] = next(
            each for each in self.client.ask("sample")["leases"] if each["lease"] == name
        )
        return found

    def sees(self, name: str, pid: int) -> bool:
        return pid in [process["pid"] for process in self.of(name)["processes"]]

    def rests(self, name: str) -> str:
        """The counters of a lease once they come to rest."""
        seen = ""
        for _ in range(60):
            now = self.of(name)["calls"]
            if now == seen and self.of(name)["used_bytes"]:
                return seen
            seen = now
            time.sleep(self.sample_s + 0.1)
        raise AssertionError("the counters do not come to rest")

    def free_bytes(self) -> int:
        """What the driver shows free on the device."""
        used = next(d["used_bytes"] for d in self.client.ask("sample")["devices"] if d["uuid"] == self.uuid)
        free: int = self.device["memory_bytes"] - used
        return free

    def end(self, *workers: Worker) -> None:
        """End processes and wait until the driver shows their memory free."""
        for worker in workers:
            worker.process.kill()
            worker.process.communicate()
        pids = {worker.pid for worker in workers}
        until(
            lambda: (
                not any(
                    pids & {process["pid"] for process in lease["processes"]}
                    for lease in self.client.ask("sample")["leases"]
                )
            ),
            "they are gone",
            PATIENCE_S,
        )
        time.sleep(2 * self.sample_s)

    def close(self) -> None:
        self.client.close()
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()
        self.helper.send_signal(signal.SIGTERM)
        self.helper.wait(30)
        self._log.close()


def do(worker: Worker, command: str) -> str:
    """The answer to a command that may take long."""
    worker.tell(command)
    answer = worker.answer(PATIENCE_S)
    assert answer, f"no answer to {command}"
    return answer.split(" ", 1)[1]
