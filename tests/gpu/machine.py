"""A simulated machine with a device helper and the processes of leases, for one test."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jupyter_gpushare import native
from jupyter_gpushare.gpu.leases.devices import Verdict
from jupyter_gpushare.procfs import boot_id
from jupyter_gpushare.protocol.helper import Level, Rung
from tests.forks import Forked, Forks
from tests.simulator import Simulator
from tests.waiting import PATIENCE_S, until

WORKER = Path(__file__).with_name("worker.py")
DRIVER = "580.00.00-simulated"
GIB = 1 << 30
MIB = 1 << 20


class Refused(Exception):
    """The helper answered ``ok: false``."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['kind']}: {error['message']}")
        self.kind = error["kind"]
        self.message = error["message"]


class Client:
    """A client of the helper's protocol: one line of JSON each way."""

    def __init__(self, path: Path, epoch: int | None = None, patience_s: float = PATIENCE_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(patience_s)
        self._patience_s = patience_s
        patient_until = time.monotonic() + 10.0
        try:
            # The backlog may be full for a moment, when many clients connect.
            while self._socket.connect_ex(str(path)) == errno.EAGAIN and time.monotonic() < patient_until:
                time.sleep(0.01)
            self._socket.getpeername()
        except OSError:
            self._socket.close()
            raise
        self._rest = b""
        self.epoch = epoch

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def line(self, timeout_s: float = PATIENCE_S) -> bytes:
        """Return the next line, or an empty one if the helper closed the connection or was too slow."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return b""
            try:
                more = self._socket.recv(65536)
            except ConnectionResetError:
                return b""
            if not more:
                return b""
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        reads = verb in ("hello", "inventory", "sample", "watch")
        epoch = self.epoch if self.epoch is not None else None if reads else 1
        sent = {"verb": verb, **fields} | ({} if epoch is None else {"epoch": epoch})
        self.send(json.dumps(sent).encode() + b"\n")
        line = self.line(self._patience_s)
        assert line, f"no answer to {verb}"
        answer = json.loads(line)
        if not answer["ok"]:
            raise Refused(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def event(self, kind: str, lease: str = "", timeout_s: float = PATIENCE_S) -> dict[str, Any] | None:
        """Return the next event of this kind (and this lease), or None if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            line = self.line(left)
            if not line:
                return None
            event: dict[str, Any] = json.loads(line)
            if event.get("kind") == kind and (not lease or event["lease"] == lease):
                return event
        return None

    def close(self) -> None:
        self._socket.close()


def asked(path: Path, verb: str, patience_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
    """Return the helper's answer to one request, sent on a new connection."""
    with contextlib.closing(Client(path, patience_s=patience_s)) as client:
        return client.ask(verb, **fields)


class Worker:
    """A process of a lease (worker.py)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, command: str) -> None:
        """Send a command without waiting."""
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> str:
        """Return the next line of the worker, or an empty one if none came in time."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return ""
        return self.process.stdout.readline().strip()

    def do(self, command: str) -> str:
        """Return the answer to a command, without the command's name."""
        self.tell(command)
        answer = self.answer()
        assert answer, f"no answer to {command}"
        return answer.split(" ", 1)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Machine:
    """Simulated devices, one helper at a time, and workers."""

    # In the tests of this folder helpers are forks (conftest.py); elsewhere each is a separate program.
    forks: Forks | None = None

    def __init__(self, folder: Path, spec: str = "1xH100-80GB,host=512GiB") -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.socket = folder / "h.sock"
        self.sim = Simulator(folder, spec)
        run = os.environ.get("GPUSHARE_TEST_RUN", "")
        self.environment = self.sim.env(GPUSHARE_TEST_RUN=run)
        self.helper: subprocess.Popen[bytes] | Forked | None = None
        self.log = folder / "helper.log"
        self._clients: list[Client] = []
        self.workers: list[Worker] = []
        self._workers: list[Worker] = []
        self._directories: dict[str, str] = {}
        # The levels of the devices without a self-test.
        self.offered: tuple[Level, ...] = (Level.WHOLE_GPU, Level.PRELOAD, Level.HINTS)
        self.movable = False  # whether a move has passed it

    def start(
        self, *arguments: str, die: str = "", wait: bool = True, examine: bool = False, before: str = ""
    ) -> None:
        """Start a helper; with ``die`` it kills itself (-9) at that point.

        A point is ``after restore 2`` (the second of these driver calls), ``before unlock 1``,
        ``after phase suspended`` (the event of this phase), ``after kept 1`` (the first write of the bytes
        that a lease keeps for another) or ``before save 1`` (of a lease to the journal).

        The helper uses the verdicts of an earlier self-test, because a test takes a second, unless it has to
        ``examine`` the devices itself.  It runs ``before`` first.
        """
        if not examine:
            self.keep_verdicts()
        code = before + "\n" + _HELPER
        argv = [
            die, "--state-dir", str(self.state_dir), "--socket", str(self.socket), "--sample-s", "0.2",
            *arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            if self.forks is not None and self.forks.can_start(self.environment):
                self.helper = self.forks.start(code, argv, env=self.environment, stderr=log)
            else:
                command = [sys.executable, "-c", code, *argv]
                self.helper = subprocess.Popen(command, env=self.environment, stderr=log)
        if wait:
            until(self._answers, f"the helper answers: {self.log.read_text()}")
            until(self._examined, "the self-tests end")

    def knows(self, lease: str, directory: str) -> None:
        """Record a lease that was created with `ask`."""
        self._directories[lease] = directory

    def keep_verdicts(self) -> None:
        private = self.state_dir / "private"
        private.mkdir(parents=True, exist_ok=True)
        ladder = tuple(Rung(level=level, offered=True) for level in self.offered)
        passed = asdict(Verdict(suspendable=True, ladder=ladder, movable=self.movable))
        kept = {"key": f"{boot_id()} {DRIVER} True", "devices": dict.fromkeys(self.uuids(), passed)}
        (private / "canary").write_text(json.dumps(kept))

    def _answers(self) -> bool:
        assert self.helper is not None
        assert self.helper.poll() is None, f"the helper ended: {self.log.read_text()}"
        with contextlib.suppress(OSError):
            self.ask("hello")
            return True
        return False

    def _examined(self) -> bool:
        devices = self.ask("inventory")["devices"]
        return not any("not finished" in device["suspend_reason"] for device in devices)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the helper; return its exit status."""
        assert self.helper is not None
        self.helper.send_signal(number)
        status = self.helper.wait(PATIENCE_S)
        self.helper = None
        return status

    def fails(self) -> str:
        """Start a helper that ends with status 1; return its output."""
        self.start(wait=False)
        assert self.helper is not None
        assert self.helper.wait(PATIENCE_S) == 1
        self.helper = None
        return self.log.read_text()

    def died(self) -> None:
        """Wait until the helper has killed itself."""
        assert self.helper is not None
        assert self.helper.wait(PATIENCE_S) == -signal.SIGKILL
        self.helper = None

    def client(self, epoch: int | None = None) -> Client:
        client = Client(self.socket, epoch)
        self._clients.append(client)
        return client

    def watch(self) -> Client:
        """Return a client that already receives events."""
        client = self.client()
        client.ask("watch")
        return client

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        return asked(self.socket, verb, **fields)

    def uuids(self) -> list[str]:
        return [self.sim.uuid(index) for index in range(int(self.sim.spec.split("x")[0]))]

    def hears(self) -> None:
        """Wait until the helper receives events that devices report by themselves."""
        until(lambda: "device(s) are heard" in self.log.read_text(), "events are heard")

    def lease(
        self, name: str, limit_bytes: int = 40 * GIB, devices: tuple[int, ...] = (0,), **fields: Any
    ) -> Path:
        """Create a lease; return its directory."""
        limits = {self.uuids()[device]: limit_bytes for device in devices}
        made = self.ask("set_limit", lease=name, uid=os.geteuid(), limits=limits, **fields)
        self._directories[name] = made["directory"]
        return Path(made["directory"])

    def of(self, name: str) -> dict[str, Any]:
        """Return a lease as the last sample shows it."""
        found: dict[str, Any] = next(each for each in self.ask("sample")["leases"] if each["lease"] == name)
        return found

    def settled(self, name: str) -> str:
        """Return the counters of a lease from a sample that began after this call."""
        seen = {self.ask("sample")["at"]}
        # The running sample may have read the counters already.
        until(lambda: seen.add(self.ask("sample")["at"]) or len(seen) > 2, "two more samples")
        calls: str = self.of(name)["calls"]
        return calls

    def worker(
        self,
        lease: str = "",
        *,
        device: int = 0,
        devices: tuple[int, ...] = (),
        preload: bool = True,
        wait: bool = True,
        mib: int = 0,
        command: Sequence[str] = (),
        changes: Mapping[str, str | None] = {},
    ) -> Worker:
        """Start worker.py, or another ``command``, as a process of a lease (or of none), and let it allocate.

        It sees one ``device``, or several ``devices`` in this order.  ``changes`` apply to its environment;
        None removes a variable.
        """
        seen = [self.uuids()[index] for index in devices or (device,)]
        environment = self.environment | {"CUDA_VISIBLE_DEVICES": ",".join(seen)}
        if lease:
            environment |= {"GPUSHARE_LEASE": lease, "GPUSHARE_LEASE_DIR": self._directories[lease]}
        if lease and preload:
            environment["LD_PRELOAD"] = str(native.preload_path())
        environment = {name: value for name, value in (environment | changes).items() if value is not None}
        worker = Worker(
            subprocess.Popen(
                [*(command or (sys.executable, str(WORKER)))],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        self._workers.append(worker)
        if wait:
            assert worker.answer() == "ready 0"
        if mib:
            assert worker.do(f"alloc {mib}") == "0"
        if wait and lease:
            until(lambda: self._sees(lease, worker.pid), f"the helper sees {worker.pid}")
        return worker

    def session(
        self, lease: str, limit_bytes: int = 40 * GIB, *, mib: int = 64, preload: bool = True, **fields: Any
    ) -> Worker:
        """Create a lease, and start a process in it that holds memory."""
        self.lease(lease, limit_bytes, **fields)
        return self.worker(lease, mib=mib, preload=preload)

    def resume(self, lease: str, worker: Worker) -> None:
        """Wake a lease, and check that a process of it has its memory back unchanged."""
        moved = self.ask("resume", lease=lease)
        assert moved["done"], moved
        assert worker.do("check") == "ok"

    def _sees(self, lease: str, pid: int) -> bool:
        return pid in [process["pid"] for process in self.of(lease)["processes"]]

    def close(self) -> None:
        """End all started processes."""
        for client in self._clients:
            client.close()
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.process.communicate()
        if self.helper is not None:
            self.helper.kill()
            self.helper.wait()


IMPORTS = """
import itertools, os, signal, sys
from jupyter_gpushare.gpu.service import helper
from jupyter_gpushare.gpu.checks import self_tests
from jupyter_gpushare.gpu.checks import health
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.files import LeaseDirectory
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.service import sampler
"""
_HELPER = (
    IMPORTS
    + """
self_tests.RETRY_S = health.RETRY_S = 0.5
self_tests.MAX_RETRY_S = health.MAX_RETRY_S = 1.0
self_tests.DRAINED_POLL_S = 0.1
sampler.SETTLE_EVERY_S = 0.5
def die_at(when, name, which):
    owner, method = {
        "phase": (Events, "publish"), "kept": (LeaseDirectory, "set_kept"), "save": (StateDirectory, "save"),
    }.get(name, (Checkpoint, name))
    call, count = getattr(owner, method), itertools.count(1)
    def dying(self, *arguments, **named):
        reached = named.get("fields", {}).get("to") if name == "phase" else str(next(count))
        if reached == which and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = call(self, *arguments, **named)
        if reached == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(owner, method, dying)
if point := sys.argv.pop(1):
    die_at(*point.split())
sys.exit(helper.main(sys.argv[1:]))
"""
)


def open_machine(**options: str) -> Iterator[Machine]:
    """Yield a machine whose simulated state every user can open."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-open-"))
    folder.chmod(0o777)
    try:
        for machine in machine_in(folder, **options):
            machine.sim.ledger()
            for path in folder.glob("gpu-state*"):
                path.chmod(0o666)
            yield machine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine_in(folder: Path, **options: str) -> Iterator[Machine]:
    """Yield a machine that ends with its test."""
    machine = Machine(folder, **options)
    try:
        yield machine
    finally:
        machine.close()
