"""The self-test of one device: which limits hold, and whether a process survives suspension.

A child process (`driver.probe`) uses the device as frameworks do.  It is no descendant of the
helper, and runs as another user if possible.  It holds at least 64 MiB in its own lease, requests more
than its limit, goes through a full cycle of suspension, and reads its memory back:

* The library's level is offered only if the excess was denied and the driver reports the
  bytes of processes, without which the watchdog cannot compare.
* The driver's cgroup limit is offered only if a second child, in a cgroup and without the
  library, was denied the excess.  A MIG instance is offered only if the hardware denied it.
* Suspending is offered only if the driver showed the child's bytes held and then gone, and they
  came back unchanged.  A driver that damages them (or an unsuited platform: MIG, MPS, some virtual
  GPUs) would also damage a user's kernel.

Then the child is suspended once more, restored on another device of the same model and memory, and
ended there.  Processes are moved only from devices whose child survived this.  A failed move
affects no other part of the verdict.

This is evidence, not proof, because a framework may use features that the child does not.

A verdict holds for one boot and one driver.  A helper that starts again uses the saved
verdict, because full devices may have no memory for a test.  The test is repeated after an
error of the driver (`health`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jupyter_gpushare import native, procfs
from jupyter_gpushare.errors import DeviceError, GpuShareError
from jupyter_gpushare.gpu.driver import denied, probe
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT
from jupyter_gpushare.gpu.driver.ladder import ladder_of
from jupyter_gpushare.gpu.driver.nvml import NOT_OFFERED, DriverGpu
from jupyter_gpushare.gpu.leases.devices import Verdict
from jupyter_gpushare.gpu.leases.files import AccountFile, LeaseDirectory, PagePhase
from jupyter_gpushare.gpu.leases.journal import SELF_TEST_PREFIX
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.moves.reservations import MoveRefused
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import Level

log = logging.getLogger(__name__)

CANARY_BYTES = 64 << 20
# Memory for the features of the child.
FEATURE_BYTES = 32 << 20
# Twice the sum of a context and the pattern.
FREE_BYTES = 1 << 30
# If PyTorch is installed, it may be read from a cold disk.
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 30.0
# The driver's list of processes may lag behind an allocation or a checkpoint.
SHOWN_TIMEOUT_S = 2.0
NO_MEMORY = "no free memory on the device for its self-test"
# Then the helper cannot recognise the processes of a lease, nor when their memory is gone.
NO_PIDS = "the driver does not show processes by their pids here (a container without the host's?)"
BLIND = "the driver does not say how much memory a process holds here"
# The library still limits, but the watchdog cannot see a process that evades it.
NO_WATCHDOG = f"{BLIND}, so the watchdog is blind"
NO_OTHER = "no other device of the same model"
NO_MEMORY_ON_OTHER = "no free memory on the other device for the self-test of a move"
# CUDA 13.0 added the pairs of `checkpoint.restore` (cuda.h).
FIRST_DRIVER_THAT_MOVES = 580
PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Child:
    """The self-test's child, with the pipes to it."""

    pid: int
    start_ticks: int
    launcher: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End the child and close its pipes."""
        pidfd = procfs.open_pidfd(self.pid, self.start_ticks)
        if pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            procfs.has_ended(pidfd, CALL_TIMEOUT_S)
            os.close(pidfd)
        for pipe in (self.launcher.stdin, self.launcher.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unread data
                    pipe.close()
        with contextlib.suppress(ChildProcessError):  # this helper may be the init of its container
            os.waitpid(self.pid, os.WNOHANG)


class Canary:
    """Tests devices, one child at a time."""

    def __init__(
        self,
        machine: Machine,
        cgroups: Cgroups,
        own_pids: set[int],
        reserve: Callable[[Mapping[str, int], float], contextlib.AbstractContextManager[None]],
    ) -> None:
        """``own_pids`` gets the pids of the children, so that the watchdog ignores them.

        ``reserve`` is `Mover.reserve`.
        """
        self._machine = machine
        self._cgroups = cgroups
        self._own_pids = own_pids
        self._reserve = reserve

    def has_memory(self, gpu: DriverGpu) -> bool:
        """Return whether a device has enough free memory for a test.

        Raises:
            DeviceError: the driver does not answer.
        """
        return self._machine.nvml.free_bytes(gpu.uuid) >= min(FREE_BYTES, gpu.memory_bytes // 4)

    def examine(self, gpu: DriverGpu, other: DriverGpu | None) -> Verdict:
        """Test one device and return the verdict; this takes seconds on a real device.

        ``other`` is a device of the same model and memory to move to, or None if there is none.
        """
        try:
            if not self.has_memory(gpu):
                return Verdict(
                    suspendable=False,
                    reason=NO_MEMORY,
                    ladder=ladder_of(gpu, {}),
                    final=False,
                    move_reason=NO_MEMORY,
                )
            return self._mig(gpu) if gpu.mig else self._whole(gpu, other)
        except (DeviceError, OSError, _Failed) as error:
            log.warning("device=%s self-test failed: %s", gpu.uuid, error)
            hung = isinstance(error, DeviceError) and error.code == TIMED_OUT
            reason = f"self-test failed: {error}"
            tested = dict.fromkeys((Level.WHOLE_GPU, Level.MIG, Level.CGROUP, Level.PRELOAD), reason)
            return Verdict(
                suspendable=False,
                reason=reason,
                works=False,
                ladder=ladder_of(gpu, tested),
                final=not hung,
                move_reason=reason,
            )

    def _mig(self, gpu: DriverGpu) -> Verdict:
        """Test whether the hardware denies a child more than the memory of its MIG instance."""
        with self._child(gpu, gpu.memory_bytes, os.geteuid()) as (_, _digest, denied):
            why_not = "" if denied else "more than the instance's memory was granted"
        reason = "the driver cannot checkpoint on MIG"
        ladder = ladder_of(gpu, {Level.MIG: why_not})
        return Verdict(suspendable=False, reason=reason, ladder=ladder, move_reason=reason)

    def _whole(self, gpu: DriverGpu, other: DriverGpu | None) -> Verdict:
        if os.geteuid() == 0:
            try:
                return self._as_user(gpu, other, probe.OVERFLOW_UID)
            except _Failed as error:
                log.info("device=%s not usable as uid %d: %s", gpu.uuid, probe.OVERFLOW_UID, error)
        return self._as_user(gpu, other, os.geteuid())

    def _as_user(self, gpu: DriverGpu, other: DriverGpu | None, uid: int) -> Verdict:
        files = LeaseDirectory(self._machine.state.leases, f"{SELF_TEST_PREFIX}{secrets.token_hex(8)}")
        limit_bytes = CANARY_BYTES + FEATURE_BYTES
        if not self._machine.simulated:
            limit_bytes += probe.TORCH_BYTES
        try:
            files.create(uid, {gpu.uuid: limit_bytes}, PagePhase.RUNNING)
            may_open = self._machine.files.tested_by([each.uuid for each in (gpu, other) if each], uid)
            with may_open, self._child(gpu, limit_bytes, uid, files) as (child, digest, denied):
                held = self._shown(gpu, child.pid)
                context_bytes = _context_bytes(held, files.account(), (child.pid, child.start_ticks))
                cycle = self._moved(self._cycle(child, digest, gpu, held), child, digest, gpu, other)
        finally:
            files.revoke()
        preload = "" if denied else "the library did not keep the child within its limit"
        if cycle.blind:
            preload = NO_WATCHDOG
        why_not = self._cgroup(gpu)
        tested = {Level.WHOLE_GPU: "", Level.CGROUP: why_not, Level.PRELOAD: preload}
        return replace(
            cycle,
            ladder=ladder_of(gpu, tested),
            context_bytes=context_bytes,
            final=cycle.final and why_not != NO_MEMORY,
        )

    def _cgroup(self, gpu: DriverGpu) -> str:
        """Return why the driver does not limit cgroups on this machine; "" if a test showed that it does."""
        if self._cgroups.unavailable:
            return self._cgroups.unavailable
        if gpu.memory_bytes < 4 * FREE_BYTES:
            return "the device is too small for its self-test"
        if self._machine.nvml.free_bytes(gpu.uuid) < 3 * FREE_BYTES:
            return NO_MEMORY
        name = f"{SELF_TEST_PREFIX}{secrets.token_hex(8)}"
        try:
            # A context and the pattern fit once but not twice, although the device has the memory.
            path = self._cgroups.make(name, {gpu.uuid: FREE_BYTES}, {})
            with self._child(gpu, FREE_BYTES, os.geteuid(), None, str(path)) as (_, _digest, denied):
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
        self,
        gpu: DriverGpu,
        excess_bytes: int,
        uid: int,
        files: LeaseDirectory | None = None,
        cgroup: str = "",
    ) -> Iterator[tuple[Child, str, bool]]:
        """Run a child that holds the pattern; yield it, its digest, and whether the excess was denied.

        Raises:
            _Failed: it could not use the device.
        """
        child = _start(gpu, excess_bytes, uid, files, cgroup)
        self._own_pids.add(child.pid)
        try:
            _send(child, "go")
            _, digest, denied, features = _answer(child, START_TIMEOUT_S, "ready", 4)
            log.info("device=%s self-test uid=%d features=%s", gpu.uuid, uid, features)
            yield child, digest, denied == "2"  # CUDA_ERROR_OUT_OF_MEMORY
        finally:
            child.kill()
            self._own_pids.discard(child.pid)

    def _cycle(self, child: Child, digest: str, gpu: DriverGpu, held: int | None) -> Verdict:
        """Suspend and resume the child and compare its memory; the driver shows ``held`` bytes of it."""
        nvml, checkpoint = self._machine.nvml, self._machine.checkpoint
        if held is None and child.pid not in nvml.processes(gpu.uuid):
            return Verdict(suspendable=False, reason=NO_PIDS, blind=True)
        if held is None or held < CANARY_BYTES:
            return Verdict(suspendable=False, reason=BLIND, blind=True)
        if checkpoint.unavailable:
            return Verdict(suspendable=False, reason=checkpoint.unavailable)
        try:
            parked_s = self._park(child, gpu)
            halfway = time.monotonic()
            checkpoint.restore(child.pid, CALL_TIMEOUT_S)
            restored = time.monotonic()
            self._unlock(child, digest)
            grown = (nvml.processes(gpu.uuid).get(child.pid) or held) - held
        except (DeviceError, OSError, _Failed) as error:
            log.warning("device=%s self-test failed: %s", gpu.uuid, error)
            if not isinstance(error, DeviceError):
                return Verdict(suspendable=False, reason=f"self-test failed: {error}")
            why = denied.explained(error, nvml, [gpu.uuid])
            is_denied = error.code in denied.CODES
            return Verdict(suspendable=False, reason=f"self-test failed: {why}", denied=is_denied)
        return Verdict(
            suspendable=True,
            suspend_bytes_per_s=int(held / max(parked_s, 1e-6)),
            resume_bytes_per_s=int(held / max(restored - halfway, 1e-6)),
            grown_bytes=max(0, grown),
        )

    def _moved(
        self, cycle: Verdict, child: Child, digest: str, gpu: DriverGpu, other: DriverGpu | None
    ) -> Verdict:
        """Add to the verdict ``cycle`` whether the child can move to another device."""
        driver = self._machine.nvml.driver
        if not cycle.suspendable:
            return replace(cycle, move_reason=cycle.reason)
        if other is None:
            return replace(cycle, move_reason=NO_OTHER)
        major = driver.partition(".")[0]
        if not major.isdecimal() or int(major) < FIRST_DRIVER_THAT_MOVES:
            reason = f"the driver {driver} restores a process on its own device alone (r580 or later moves)"
            return replace(cycle, move_reason=reason)
        try:
            self._move(child, digest, gpu, other)
        except MoveRefused as error:
            log.info("device=%s self-test of a move to %s: %s", gpu.uuid, other.uuid, error)
            return replace(cycle, move_reason=NO_MEMORY_ON_OTHER, move_final=False)
        except (DeviceError, OSError, _Failed) as error:
            log.warning("device=%s self-test of a move to %s failed: %s", gpu.uuid, other.uuid, error)
            return replace(cycle, move_reason=f"self-test of a move failed: {error}")
        return replace(cycle, movable=True)

    def _move(self, child: Child, digest: str, gpu: DriverGpu, other: DriverGpu) -> None:
        """Suspend the child, resume it on another device, compare its memory, and end it.

        Raises:
            MoveRefused: the other device lacks free memory.
            DeviceError, OSError, _Failed: the move failed.
        """
        nvml, checkpoint = self._machine.nvml, self._machine.checkpoint
        needed = nvml.processes(gpu.uuid).get(child.pid) or FREE_BYTES
        before, other_before = (nvml.usage(each.uuid).unexplained_bytes for each in (gpu, other))
        self._park(child, gpu)
        with self._reserve({other.uuid: needed}, SHOWN_TIMEOUT_S):
            checkpoint.restore(child.pid, CALL_TIMEOUT_S, {gpu.uuid: other.uuid})
        self._unlock(child, digest)
        if (self._shown(other, child.pid) or 0) < CANARY_BYTES:
            raise _Failed("the driver does not show its memory on the other device")
        if not self._gone(gpu, child.pid, before):
            raise _Failed("the driver still shows its memory on its first device")
        # The other device may be tested next, and memory that is freed late would spoil that test.
        child.kill()
        self._gone(other, child.pid, other_before)

    def _park(self, child: Child, gpu: DriverGpu) -> float:
        """Suspend the child and return the seconds that its checkpoint took.

        Raises:
            DeviceError: a call failed.
            _Failed: its memory is not gone from the device.
        """
        before = self._machine.nvml.usage(gpu.uuid).unexplained_bytes
        self._machine.checkpoint.lock(child.pid, CALL_TIMEOUT_S)
        began = time.monotonic()
        self._machine.checkpoint.checkpoint(child.pid, CALL_TIMEOUT_S)
        took_s = time.monotonic() - began
        if not self._gone(gpu, child.pid, before):
            raise _Failed("the driver still shows its memory after the checkpoint")
        return took_s

    def _unlock(self, child: Child, digest: str) -> None:
        """Unlock the restored child and compare its memory.

        Raises:
            DeviceError: the driver does not unlock it.
            OSError, _Failed: it has ended, or its memory has changed.
        """
        self._machine.checkpoint.unlock(child.pid)
        _send(child, "check")
        if _answer(child, CALL_TIMEOUT_S, "", 1) != [digest]:
            raise _Failed("its memory came back changed")

    def _shown(self, gpu: DriverGpu, pid: int) -> int | None:
        """Return the child's bytes that the driver shows, or None; wait until they reach `CANARY_BYTES`."""
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        while True:
            held = self._machine.nvml.processes(gpu.uuid).get(pid)
            if (held or 0) >= CANARY_BYTES or time.monotonic() >= deadline:
                return held
            time.sleep(0.05)

    def _gone(self, gpu: DriverGpu, pid: int, unexplained_before: int) -> bool:
        """Wait until the driver shows no bytes of the child, by process or as used; False on timeout."""
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        while True:
            usage = self._machine.nvml.usage(gpu.uuid)
            if usage.processes.get(pid, 0) == 0 and (
                usage.unexplained_bytes < unexplained_before + CANARY_BYTES // 2
            ):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


class _Failed(Exception):
    pass


def _context_bytes(held: int | None, account: AccountFile | None, child: Key) -> int:
    """Return the bytes of a process beyond those that the library counts; 0 if it counts none."""
    counted = sum(account.held().get(child, ())) if account else 0
    return max(0, held - counted) if held and counted else 0


def _start(gpu: DriverGpu, excess_bytes: int, uid: int, files: LeaseDirectory | None, cgroup: str) -> Child:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LD_LIBRARY_PATH") or name.startswith("GPUSHARE_SIM")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, "PYTHONPATH": str(PACKAGE_ROOT)}
    if files is not None:
        environment |= {"GPUSHARE_LEASE": files.path.name, "GPUSHARE_LEASE_DIR": str(files.path)}
        with contextlib.suppress(GpuShareError):  # not built; the test then shows that no limit is enforced
            environment["LD_PRELOAD"] = str(native.preload_path())
    module = ["-m", probe.__name__, str(CANARY_BYTES), str(excess_bytes), str(uid)]
    launcher = subprocess.Popen(
        [sys.executable, "-s", "-P", *module, *([cgroup] if cgroup else [])],
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        pid = int(_answer(Child(0, 0, launcher), START_TIMEOUT_S, "pid", 2)[1])
        launcher.wait(CALL_TIMEOUT_S)
        return Child(pid, procfs.start_ticks(pid), launcher)
    except BaseException:
        launcher.kill()
        launcher.communicate()
        raise


def _send(child: Child, command: str) -> None:
    assert child.launcher.stdin is not None
    child.launcher.stdin.write(f"{command}\n".encode())
    child.launcher.stdin.flush()


def _answer(child: Child, timeout_s: float, first: str, words: int) -> list[str]:
    """Return the words of the child's next line.

    Raises:
        _Failed: it ended, took too long, or sent something else.
    """
    stdout = child.launcher.stdout
    assert stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    poll = select.poll()  # select() takes no descriptor beyond 1023
    poll.register(stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise _Failed(f"the child did not answer within {timeout_s:g} s")
        more = os.read(stdout.fileno(), 4096)
        if not more:
            raise _Failed("the child ended")
        line += more
    found = line.decode(errors="replace").split()
    if len(found) != words or (first and found[0] != first):
        raise _Failed(f"the child said {line[:80]!r}")
    return found
