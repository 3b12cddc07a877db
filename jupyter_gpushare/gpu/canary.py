"""The self-test of one device: which rungs hold, and does a process survive suspension?

A child of our own holds 64 MiB in a lease of its own, asks for more than its limit,
goes through a full cycle of suspension, and reads its memory back:

* the library's level is claimed only where the excess was denied;
* the driver's cgroup limit only where a second child, in a cgroup and without the
  library, was denied it; a MIG instance where the hardware denied it;
* suspending is offered only where the bytes came back the same, because a driver
  that breaks them (or a platform that cannot: MIG, MPS, some virtual GPUs) would
  break a user's kernel next.

A verdict holds for one boot and one driver.  A helper that starts again while the
devices are full uses the kept one: there may be no room to test.  It is made again
after an error of the driver (`health`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import native
from ..errors import DeviceError, GpuShareError, InvalidRequest
from . import verbs
from .bounded import TIMED_OUT
from .cgroups import Cgroups
from .checkpoint import Checkpoint
from .isolation import LeaseDirectory, PagePhase
from .ladder import ladder_of, strongest
from .nvml import NOT_OFFERED, Gpu, Nvml
from .verbs import Level, Rung

log = logging.getLogger(__name__)

CANARY_BYTES = 64 << 20
# Within the limit once, not twice.
LIMIT_BYTES = CANARY_BYTES + CANARY_BYTES // 2
# A context, the pattern, and some air.
ROOM_BYTES = 1 << 30
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
# The driver's list of processes may lag behind an allocation, or a checkpoint.
SHOWN_TIMEOUT_S = 2.0
NO_ROOM = "no room on the device for its self-test"
# Nobody could tell then what is to be suspended, nor when its memory is gone.
NO_PIDS = "the driver does not show processes by their pids here (a container without the host's?)"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the self-test found on one device."""

    suspendable: bool
    reason: str = ""
    works: bool = True  # a process could use the device at all
    ladder: tuple[Rung, ...] = ()
    suspend_bytes_per_s: int = 0
    resume_bytes_per_s: int = 0
    grown_bytes: int = 0  # what the child held more after the cycle than before
    final: bool = True  # False: it could not be tested now, ask again

    @property
    def level(self) -> Level:
        """The strongest level for a part of the device."""
        return strongest(self.ladder)

    def offers(self, level: Level) -> bool:
        """Whether a level passed its test."""
        return any(rung.level is level and rung.offered for rung in self.ladder)


def kept(verdicts: dict[str, Any], key: str, uuid: str) -> Verdict | None:
    """The verdict that was kept for this boot and driver (``key``), if there is one."""
    if verdicts.get("key") != key:
        return None
    try:
        return verbs.build(Verdict, verdicts["devices"][uuid])
    except (KeyError, TypeError, InvalidRequest):
        return None


def keep(key: str, verdicts: dict[str, Verdict]) -> dict[str, Any]:
    """What to keep for `kept`."""
    return {"key": key, "devices": {uuid: asdict(each) for uuid, each in verdicts.items() if each.final}}


class Canary:
    """Tests devices, one child at a time."""

    def __init__(
        self, nvml: Nvml, checkpoint: Checkpoint, cgroups: Cgroups, leases: Path, ours: Callable[[int], None]
    ) -> None:
        """``leases`` is where lease directories are made; ``ours`` is told the children's pids."""
        self._nvml = nvml
        self._checkpoint = checkpoint
        self._cgroups = cgroups
        self._leases = leases
        self._ours = ours

    def examine(self, gpu: Gpu) -> Verdict:
        """The verdict on one device; takes seconds on a real one."""
        try:
            if self._nvml.free_bytes(gpu.uuid) < min(ROOM_BYTES, gpu.memory_bytes // 4):
                return Verdict(
                    suspendable=False,
                    reason="no room on the device for the self-test",
                    ladder=ladder_of(gpu, {}),
                    final=False,
                )
            return self._mig(gpu) if gpu.mig else self._whole(gpu)
        except (DeviceError, OSError, _Failed) as error:
            log.warning("device=%s self-test failed: %s", gpu.uuid, error)
            hung = isinstance(error, DeviceError) and error.code == TIMED_OUT
            reason = f"self-test failed: {error}"
            tested = dict.fromkeys((Level.WHOLE_GPU, Level.MIG, Level.CGROUP, Level.PRELOAD), reason)
            return Verdict(
                suspendable=False, reason=reason, works=False, ladder=ladder_of(gpu, tested), final=not hung
            )

    def _mig(self, gpu: Gpu) -> Verdict:
        """An instance: more than it has is denied by the hardware."""
        with self._child(gpu, gpu.memory_bytes, None) as (_, _digest, denied):
            why_not = "" if denied else "more than the instance's memory was granted"
        return Verdict(
            suspendable=False,
            reason="the driver cannot checkpoint on MIG",
            ladder=ladder_of(gpu, {Level.MIG: why_not}),
        )

    def _whole(self, gpu: Gpu) -> Verdict:
        files = LeaseDirectory(self._leases, f"canary-{secrets.token_hex(8)}")
        try:
            files.create(os.geteuid(), {gpu.uuid: LIMIT_BYTES}, PagePhase.RUNNING)
            with self._child(gpu, CANARY_BYTES, files) as (child, digest, denied):
                cycle = self._cycle(child, digest, gpu)
        finally:
            files.revoke()
        preload = "" if denied else "the library did not keep the child within its limit"
        why_not = self._cgroup(gpu)
        tested = {Level.WHOLE_GPU: "", Level.CGROUP: why_not, Level.PRELOAD: preload}
        return replace(cycle, ladder=ladder_of(gpu, tested), final=cycle.final and why_not != NO_ROOM)

    def _cgroup(self, gpu: Gpu) -> str:
        """Why the driver does not limit cgroups here; "" where it was seen to do so."""
        if self._cgroups.unavailable:
            return self._cgroups.unavailable
        if gpu.memory_bytes < 4 * ROOM_BYTES:
            return "the device is too small for its self-test"
        if self._nvml.free_bytes(gpu.uuid) < 3 * ROOM_BYTES:
            return NO_ROOM
        name = f"canary-{secrets.token_hex(8)}"
        try:
            # A context and the pattern fit once; as much again does not, though the device has it.
            path = self._cgroups.make(name, {gpu.uuid: ROOM_BYTES}, {})
            with self._child(gpu, ROOM_BYTES, None, str(path)) as (_, _digest, denied):
                return "" if denied else "the driver granted a cgroup more than its limit"
        except DeviceError as error:
            if error.code == NOT_OFFERED:
                return "not offered by this driver (r615 or later limits cgroups)"
            return f"the driver refused to limit a cgroup: {error}"
        except (OSError, _Failed) as error:
            return f"self-test failed: {error}"
        finally:
            self._cgroups.remove(name, [gpu.uuid])

    @contextlib.contextmanager
    def _child(
        self, gpu: Gpu, excess_bytes: int, files: LeaseDirectory | None, cgroup: str = ""
    ) -> Iterator[tuple[subprocess.Popen[bytes], str, bool]]:
        """A child that holds the pattern; with its digest, and whether the excess was denied.

        Raises:
            _Failed: it could not use the device.
        """
        child = _start(gpu, excess_bytes, files, cgroup)
        self._ours(child.pid)
        try:
            _, digest, code, denied = _answer(child, START_TIMEOUT_S, "ready", 4)
            if code != "0":
                raise _Failed(f"the child could not write its memory (code {code})")
            yield child, digest, denied == "2"  # CUDA_ERROR_OUT_OF_MEMORY
        finally:
            child.kill()
            child.communicate()

    def _cycle(self, child: subprocess.Popen[bytes], digest: str, gpu: Gpu) -> Verdict:
        """Suspend and resume the child, and compare what it holds."""
        nvml, checkpoint = self._nvml, self._checkpoint
        if checkpoint.unavailable:
            return Verdict(suspendable=False, reason=checkpoint.unavailable)
        held = self._shown(gpu, child.pid)
        if held is None:
            return Verdict(suspendable=False, reason=NO_PIDS)
        try:
            checkpoint.lock(child.pid, CALL_TIMEOUT_S)
            began = time.monotonic()
            checkpoint.checkpoint(child.pid, CALL_TIMEOUT_S)
            parked = time.monotonic()
            if not self._gone(gpu, child.pid):
                raise _Failed("the driver still shows its memory after the checkpoint")
            halfway = time.monotonic()
            checkpoint.restore(child.pid, CALL_TIMEOUT_S)
            restored = time.monotonic()
            checkpoint.unlock(child.pid)
            assert child.stdin is not None
            child.stdin.write(b"check\n")
            child.stdin.flush()
            if _answer(child, CALL_TIMEOUT_S, "", 1) != [digest]:
                raise _Failed("its memory came back changed")
            grown = nvml.processes(gpu.uuid).get(child.pid, held) - held
        except (DeviceError, OSError, _Failed) as error:
            log.warning("device=%s self-test failed: %s", gpu.uuid, error)
            return Verdict(suspendable=False, reason=f"self-test failed: {error}")
        return Verdict(
            suspendable=True,
            suspend_bytes_per_s=int(held / max(parked - began, 1e-6)),
            resume_bytes_per_s=int(held / max(restored - halfway, 1e-6)),
            grown_bytes=max(0, grown),
        )

    def _shown(self, gpu: Gpu, pid: int) -> int | None:
        """What the driver shows of the child; None: nothing, though it holds memory."""
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        while (held := self._nvml.processes(gpu.uuid).get(pid)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return held

    def _gone(self, gpu: Gpu, pid: int) -> bool:
        """Whether the driver shows no memory of the child any more."""
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        while (held := self._nvml.processes(gpu.uuid).get(pid, 0)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not held


class _Failed(Exception):
    pass


def _start(gpu: Gpu, excess_bytes: int, files: LeaseDirectory | None, cgroup: str) -> subprocess.Popen[bytes]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LD_LIBRARY_PATH") or name.startswith("GPUSHARE_SIM")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, "PYTHONPATH": str(PACKAGE_ROOT)}
    if files is not None:
        environment |= {"GPUSHARE_LEASE": files.path.name, "GPUSHARE_LEASE_DIR": str(files.path)}
        with contextlib.suppress(GpuShareError):  # not built: the limit is not enforced, and the test says so
            environment["LD_PRELOAD"] = str(native.preload_path())
    module = ["-m", "jupyter_gpushare.gpu.checkpoint", str(CANARY_BYTES), str(excess_bytes)]
    return subprocess.Popen(
        [sys.executable, "-s", "-P", *module, *([cgroup] if cgroup else [])],
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _answer(child: subprocess.Popen[bytes], timeout_s: float, first: str, words: int) -> list[str]:
    """The words of the child's next line."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    poll = select.poll()  # select() takes no descriptor beyond 1023
    poll.register(child.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise _Failed(f"the child did not answer within {timeout_s:g} s")
        more = os.read(child.stdout.fileno(), 4096)
        if not more:
            raise _Failed(f"the child ended with {child.wait(timeout=CALL_TIMEOUT_S)}")
        line += more
    found = line.decode(errors="replace").split()
    if len(found) != words or (first and found[0] != first):
        raise _Failed(f"the child said {line[:80]!r}")
    return found
