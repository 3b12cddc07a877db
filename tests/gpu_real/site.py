"""A machine with a device helper for scenarios, with a real GPU or the simulated driver.

Needs psutil and nvidia-ml-py in addition to the standard library.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from jupyter_gpushare import native
from jupyter_gpushare.gpu.checks.canary import NO_WATCHDOG
from jupyter_gpushare.gpu.leases.journal import SELF_TEST_PREFIX
from tests.gpu.machine import GIB, Client, Worker, asked, until
from tests.gpu_real.overhead import MOST, Added

ROOT = Path(__file__).resolve().parents[2]
WORKERS = {
    "driver": ROOT / "tests/gpu/worker.py",
    "calls": Path(__file__).with_name("calls_worker.py"),
    "facts": Path(__file__).with_name("facts_worker.py"),
    "time": Path(__file__).with_name("time_worker.py"),
    "held": Path(__file__).with_name("held_worker.py"),
    "torch": Path(__file__).with_name("torch_worker.py"),
    "torch-life": Path(__file__).with_name("torch_life_worker.py"),
    "torch-time": Path(__file__).with_name("torch_time_worker.py"),
    "cupy": Path(__file__).with_name("cupy_worker.py"),
    "jax": Path(__file__).with_name("jax_worker.py"),
    "numba": Path(__file__).with_name("numba_worker.py"),
}
PATIENCE_S = 120.0
# The maximum seconds of one driver call.
CALL_S = 30.0
# A killed process that still exists after these seconds hangs in the driver.
KILLED_S = 10.0
# Counters that change for longer than these seconds without a command do not come to rest.
REST_S = 30.0


class Skip(Exception):
    """Raised with the reason if a scenario cannot run on this machine."""


def need(module: str) -> None:
    """Skip if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skip(f"{module} is not installed")


class Report:
    """Rows of one table, printed and stored as soon as they are measured: a later step may hang."""

    def __init__(self, path: Path | None = None) -> None:
        """Append each row as a line of JSON to ``path``."""
        self.rows: list[tuple[str, str]] = []
        self._path = path

    def add(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))
        print(f"| {what} | {figure} |", flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([what, figure]) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _package(folder: Path) -> Path:
    """Copy the package without its pages: the self-test's user cannot reach a checkout below /root."""
    copy = folder / "package"
    if not copy.exists():
        left_out = shutil.ignore_patterns("ui", "labextension", "__pycache__")
        shutil.copytree(ROOT / "jupyter_gpushare", copy / "jupyter_gpushare", ignore=left_out)
    return copy


class Helper:
    """A device helper with its state and its log in a folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str], sample_s: float) -> None:
        self.socket = folder / "h.sock"
        self.sample_s = sample_s
        self.log = folder / "helper.log"
        self._leases = folder / "state" / "leases"
        command = [
            sys.executable, "-m", "jupyter_gpushare.gpu.service.helper",
            "--state-dir", str(folder / "state"), "--socket", str(self.socket), "--sample-s", str(sample_s),
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, cwd=_package(folder), env=dict(environment))
        try:
            self.inventory = until(self._examined, "the self-test ends", PATIENCE_S)
        except BaseException:
            self.close()
            raise

    def _examined(self) -> dict[str, Any] | None:
        assert self._process.poll() is None, f"the helper ended: {self.log.read_text()[-2000:]}"
        with contextlib.suppress(OSError):
            inventory: dict[str, Any] = self.ask("inventory")
            reasons = [device["suspend_reason"] for device in inventory["devices"]]
            return inventory if not any("not finished" in reason for reason in reasons) else None
        return None

    def ask(self, verb: str, patience_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
        return asked(self.socket, verb, patience_s, **fields)

    def clear(self, within_s: float) -> bool:
        """End all processes of its leases and drop the leases; return False if the helper does not answer.

        A self-test continues, because its failure would make a device unfit for every later scenario.
        """
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Found by its directory: another run on this machine has leases of the same names.
                directory = Path(process.environ().get("GPUSHARE_LEASE_DIR", ""))
                if directory.parent == self._leases and not directory.name.startswith(SELF_TEST_PREFIX):
                    process.kill()
        try:
            for lease in self.ask("sample", within_s)["leases"]:
                self.ask("drop", within_s, lease=lease["lease"])
        except (OSError, AssertionError):
            return False
        return True

    @property
    def device(self) -> dict[str, Any]:
        """Return the largest device."""
        return max(self.inventory["devices"], key=lambda each: int(each["memory_bytes"]))

    def ill(self) -> str:
        """Return why the device is out of service, or "" if it is not."""
        devices = self.ask("sample")["devices"]
        reason: str = next(each["reason"] for each in devices if each["uuid"] == self.device["uuid"])
        return reason

    def ended(self) -> bool:
        """Return whether its process is gone."""
        return self._process.poll() is not None

    def kill(self) -> None:
        end(self._process)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class Site:
    """The site of one scenario: a helper, the largest device of the machine, and processes of leases."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        report: Report,
        *,
        scale_bytes: int = GIB,
        sample_s: float = 0.5,
    ) -> None:
        """Use the helper's ``folder``; ``scale_bytes`` replaces a GiB where memory is really filled."""
        self.folder = folder
        self.socket = folder / "h.sock"
        self.environment = dict(environment)
        self.scale_bytes = scale_bytes
        self.sample_s = sample_s
        self.report = report
        self._workers: list[Worker] = []
        self.client = Client(self.socket)
        devices = self.client.ask("inventory")["devices"]
        self.device: dict[str, Any] = max(devices, key=lambda device: device["memory_bytes"])

    @property
    def simulated(self) -> bool:
        """Whether the driver is simulated."""
        return "GPUSHARE_SIM_STATE" in self.environment

    @property
    def uuid(self) -> str:
        uuid: str = self.device["uuid"]
        return uuid

    @property
    def grantable_bytes(self) -> int:
        grantable: int = self.device["memory_bytes"] - self.device["reserve_bytes"]
        return grantable

    def needs_suspending(self) -> None:
        if not self.device["suspendable"]:
            raise Skip(f"this machine cannot suspend: {self.device['suspend_reason']}")

    @property
    def blind(self) -> str:
        """Return why the driver's list has no bytes of processes (likely a container), or "" if it has.

        Without them the level is ``hints``, because the watchdog cannot compare; the library still denies.
        """
        rung = next(each for each in self.device["ladder"] if each["level"] == "preload")
        return str(rung["reason"]) if rung["reason"] == NO_WATCHDOG else ""

    def needs_a_limit(self) -> None:
        if self.device["level"] not in ("preload", "cgroup") and not self.blind:
            reasons = [
                f"{each['level']}: {each['reason']}" for each in self.device["ladder"] if each["reason"]
            ]
            raise Skip(f"nothing limits memory here ({'; '.join(reasons)})")

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Send a request that may take long, on a new connection; return the answer."""
        return asked(self.socket, verb, 600.0, **fields)

    def lease(
        self,
        name: str,
        limit_bytes: int,
        *,
        preload: bool = True,
        share: float | None = None,
        guest: Mapping[str, object] | None = None,
    ) -> dict[str, str]:
        """Return the environment of a process of a new lease.

        ``share`` is its part of the device's time, by turns; ``guest`` has fields of `SetLimit` for a guest.
        """
        turns = {} if share is None else {"compute_share": "fair", "share": share}
        made = self.client.ask(
            "set_limit",
            lease=name,
            uid=os.geteuid(),
            limits={self.uuid: limit_bytes},
            **turns,
            **(guest or {}),
        )
        environment = {
            **self.environment,
            "GPUSHARE_LEASE": name,
            "GPUSHARE_LEASE_DIR": made["directory"],
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), self.environment.get("PYTHONPATH")))),
        }
        return environment | ({"LD_PRELOAD": str(native.preload_path())} if preload else {})

    def judge(self, what: str, found: Added) -> None:
        """Report the overhead of the library; fail beyond the bound, and skip if the noise is too large.

        The simulated driver answers in nanoseconds, so a percentage says nothing there.
        """
        self.report.add(what, "not judged on the simulated driver" if self.simulated else str(found))
        if not self.simulated and found.within is None:
            raise Skip(f"{what}: {found}")
        assert self.simulated or found.within, f"{what}: {found}, more than {MOST:.0%}"

    def worker(self, kind: str, environment: Mapping[str, str], mib: int = 0) -> Worker:
        """Start a process that runs commands on the GPU; skip if its framework has no GPU."""
        complaints = self.folder / f"{kind}.err"
        with complaints.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, str(WORKERS[kind])],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        worker = Worker(process)
        self._workers.append(worker)
        said = worker.answer(PATIENCE_S)
        if said.startswith("skip "):
            raise Skip(said.removeprefix("skip "))
        assert said == "ready 0", f"the {kind} process said {said!r}: {complaints.read_text()[-2000:]}"
        if mib:
            assert do(worker, f"alloc {mib}") == "0"
        return worker

    def of(self, name: str) -> dict[str, Any]:
        """Return a lease as the last sample shows it."""
        leases = self.client.ask("sample")["leases"]
        found: dict[str, Any] = next(each for each in leases if each["lease"] == name)
        return found

    def used_bytes(self, name: str) -> int:
        """Return the driver's bytes of a lease; skip if it does not show memory by process."""
        if self.blind:
            raise Skip(self.blind)
        used: dict[str, int] = until(
            lambda: self.of(name)["used_bytes"], f"the driver shows memory of {name}", PATIENCE_S
        )
        self.fresh()
        return used[self.uuid]

    def shown(self, name: str, limit_bytes: int) -> str:
        """Return the driver's bytes of a lease, which must be within its limit, or why it shows none."""
        if self.blind:
            return self.blind
        used = self.used_bytes(name)
        assert used <= limit_bytes, f"{used / GIB:.2f} GiB are shown"
        return f"{used / GIB:.2f} GiB"

    def sees(self, name: str, pid: int) -> bool:
        return pid in [process["pid"] for process in self.of(name)["processes"]]

    def fresh(self) -> None:
        """Wait for a sample that began after this call."""
        seen = {self.client.ask("sample")["at"]}
        # The running sample may have read the values already.
        until(lambda: seen.add(self.client.ask("sample")["at"]) or len(seen) > 2, "two samples", PATIENCE_S)

    def rests(self, name: str) -> str:
        """Return the counters of a lease once they come to rest."""
        counters = [""]

        def at_rest() -> bool:
            self.fresh()
            counters.append(self.of(name)["calls"])
            return counters[-1] == counters[-2] and bool(self.of(name)["used_bytes"])

        until(at_rest, "the counters come to rest", REST_S)
        return counters[-1]

    def free_bytes(self) -> int:
        """Return the free bytes of the device that the driver shows now."""
        self.fresh()
        used = next(d["used_bytes"] for d in self.client.ask("sample")["devices"] if d["uuid"] == self.uuid)
        free: int = self.device["memory_bytes"] - used
        return free

    def needs_memory(self, size: int) -> None:
        """Skip if the device or the host cannot hold these bytes and their overhead."""
        free, host = self.free_bytes(), psutil.virtual_memory().available
        if free < size + 2 * GIB or self.device["memory_bytes"] // 2 < size:
            raise Skip(f"not so much free on the device ({free / GIB:.1f} GiB)")
        if host < size + 2 * GIB and not self.simulated:
            raise Skip(f"not so much host memory available ({host / GIB:.1f} GiB)")

    def rate(self, moved_bytes: int, took_s: float) -> str:
        """Return the duration and the rate of a move as text."""
        bytes_per_s = moved_bytes / max(took_s, 1e-6)
        limit = pcie_bytes_per_s(self.uuid)
        share = f", {bytes_per_s / limit:.0%} of its PCIe link" if limit else ""
        return f"{took_s:.2f} s ({bytes_per_s / 1e9:.1f} GB/s{share})"

    def end(self, *workers: Worker) -> None:
        """End processes and wait until the driver shows their memory free."""
        for worker in workers:
            end(worker.process)
        pids = {worker.pid for worker in workers}

        def gone() -> bool:
            leases = self.client.ask("sample")["leases"]
            return not any(pids & {each["pid"] for each in lease["processes"]} for lease in leases)

        until(gone, "they are gone", PATIENCE_S)
        self.fresh()

    def close(self) -> None:
        self.client.close()
        for worker in self._workers:
            end(worker.process)
            for pipe in (worker.process.stdin, worker.process.stdout):
                with contextlib.suppress(OSError):  # what was told to one that is gone
                    pipe.close()  # type: ignore[union-attr]


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process; ignore one that hangs in the driver."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def without_library(leased: Mapping[str, str]) -> dict[str, str]:
    """Return the same environment without the lease."""
    return {name: value for name, value in leased.items() if name not in ("LD_PRELOAD", "GPUSHARE_LEASE")}


def pcie_bytes_per_s(uuid: str) -> float | None:
    """Return the maximum bytes per second of a device's link in one direction; None without NVML's data.

    Generation and width as NVML shows them; bytes per lane and second after the encoding
    from the PCI Express base specification (128b/130b from generation 3 on).
    """
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        lane = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return lane[generation] * int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)) or None
    except (pynvml.NVMLError, KeyError):
        return None


def persistence_mode(uuid: str) -> str:
    """``on`` or ``off``, or the error of NVML.

    A driver may refuse to checkpoint without it (cuda-checkpoint issue 25).  It is never set.
    """
    try:
        pynvml.nvmlInit()
        return "on" if pynvml.nvmlDeviceGetPersistenceMode(pynvml.nvmlDeviceGetHandleByUUID(uuid)) else "off"
    except pynvml.NVMLError as error:
        return str(error)


def do(worker: Worker, command: str) -> str:
    """Return the answer to a command that may take long."""
    worker.tell(command)
    answer = worker.answer(PATIENCE_S)
    assert answer, f"no answer to {command}"
    return answer.split(" ", 1)[1]


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program and return its output."""
    done = subprocess.run(
        [*command], env=dict(environment), capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout
