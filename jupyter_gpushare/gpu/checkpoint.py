"""The only door to ctypes: the checkpoint calls of the CUDA driver.

A process moves RUNNING -> LOCKED -> CHECKPOINTED -> LOCKED -> RUNNING by Lock,
Checkpoint, Restore and Unlock, all asked for from outside by pid.  While it is
not RUNNING its threads run on until they enter a CUDA call, and wait there.

Facts (cuda.h of CUDA 12.8 to 13.0, section "CUDA Checkpointing"; the layouts
are declared here by hand, so that no CUDA header is needed):

* `CUcheckpointLockArgs`: ``unsigned timeoutMs, reserved0; uint64_t reserved1[7]``
  (64 bytes); 0 would wait for ever, a lock that timed out leaves the process
  RUNNING and answers CUDA_ERROR_NOT_READY (600);
* the other argument structs may be NULL; Restore without pairs goes back to the
  same devices;
* states: 0 running, 1 locked, 2 checkpointed, 3 failed, and since CUDA 13.1
  4 checkpointing and 5 restoring;
* the calls exist from driver r570 on, as exported symbols of ``libcuda.so.1``;
* Restore ends in LOCKED.  One that does not find room leaves the process FAILED
  for ever (NVIDIA/cuda-checkpoint issue 44): callers look for room first.

libcuda is loaded once and cuInit called once: attaching to the driver takes
seconds, so no tool is started per call.  No context is ever made here, so the
helper itself holds no device memory.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import os
import signal
import sys
import threading
from typing import Any

from ..errors import DeviceError
from .bounded import TIMED_OUT, Lane

INIT_TIMEOUT_S = 60.0
# GetState and Unlock move no memory.
SHORT_TIMEOUT_S = 10.0
# Calls that hang are left behind, each with its thread; beyond this many, none is started.
MAX_STUCK = 16

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


class State(enum.IntEnum):
    """CUprocessState of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class _LockArgs(ctypes.Structure):
    _fields_ = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Checkpoint:
    """The checkpoint calls, each bounded in time.

    ``unavailable`` says why nothing can be suspended on this machine, or is empty.
    """

    def __init__(self) -> None:
        self._cuda: Any = None
        self._guard = threading.Lock()
        self._free: list[Lane] = []
        self._lanes = 0
        # By pid, calls that were left behind: what they will yet do to the process nobody knows.
        self._left_behind: dict[int, Lane] = {}
        try:
            self.unavailable = Lane("cuda").call("cuInit", self._load, INIT_TIMEOUT_S)
        except DeviceError as error:
            self.unavailable = str(error)

    def state(self, pid: int) -> State:
        """The checkpoint state of a process.

        Raises:
            DeviceError: the process is gone or does not use CUDA.
        """
        value = ctypes.c_int(-1)
        self._call("cuCheckpointProcessGetState", SHORT_TIMEOUT_S, pid, ctypes.byref(value))
        try:
            return State(value.value)
        except ValueError:
            return State.FAILED

    def lock(self, pid: int, timeout_s: float) -> None:
        """RUNNING -> LOCKED; the process stays RUNNING when that takes too long.

        Raises:
            DeviceError: it timed out, or the process cannot be locked.
        """
        args = _LockArgs(timeout_ms=max(1, int(timeout_s * 1000)))
        self._call("cuCheckpointProcessLock", timeout_s + SHORT_TIMEOUT_S, pid, ctypes.byref(args))

    def checkpoint(self, pid: int, timeout_s: float) -> None:
        """LOCKED -> CHECKPOINTED: the device memory is copied to the host and given back.

        Raises:
            DeviceError: the driver refused, failed or hangs.
        """
        self._call("cuCheckpointProcessCheckpoint", timeout_s, pid, None)

    def restore(self, pid: int, timeout_s: float) -> None:
        """CHECKPOINTED -> LOCKED: the memory is back; look for room before.

        Raises:
            DeviceError: the driver refused, failed or hangs.
        """
        self._call("cuCheckpointProcessRestore", timeout_s, pid, None)

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING: the calls that waited go on.

        Raises:
            DeviceError: the driver refused, failed or hangs.
        """
        self._call("cuCheckpointProcessUnlock", SHORT_TIMEOUT_S, pid, None)

    def simulated_host_memory(self) -> tuple[int, int] | None:
        """Total and available host memory of the simulated driver; None on a real one."""
        ask = getattr(self._cuda, "gpushare_sim_host_memory", None) if self._cuda is not None else None
        if ask is None:
            return None
        total, available = ctypes.c_uint64(0), ctypes.c_uint64(0)
        ask(ctypes.byref(total), ctypes.byref(available))
        return total.value, available.value

    def _load(self) -> str:
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"the CUDA driver library cannot be loaded: {error}"
        code = cuda.cuInit(0)
        if code:
            return f"cuInit failed with code {code}"
        self._cuda = cuda
        missing = [name for name in _CALLS if not hasattr(cuda, name)]
        if missing:
            return f"the driver has no {missing[0]}: suspending needs driver r570 or later"
        for name, arguments in _CALLS.items():
            function = getattr(cuda, name)
            function.argtypes = [ctypes.c_int, *arguments]
            function.restype = ctypes.c_int
        return ""

    def _call(self, name: str, timeout_s: float, pid: int, *arguments: Any) -> None:
        if self.unavailable:
            raise DeviceError(name, _NOT_SUPPORTED, self.unavailable)
        self._refuse_beside_another(name, pid)
        function = getattr(self._cuda, name)
        lane = self._take(name)
        try:
            # The closure keeps the arguments alive while a call that hangs may still write to them.
            code = lane.call(name, lambda: int(function(pid, *arguments)), timeout_s)
        finally:
            with self._guard:
                if lane.stuck_in:
                    self._left_behind[pid] = lane
                self._free.append(lane)
        if code:
            raise DeviceError(name, code, self._name_of(code))

    def _refuse_beside_another(self, name: str, pid: int) -> None:
        """Ask nothing about a process while an earlier call for it has not returned.

        A lock that hangs may still be taken: who looked meanwhile would find the process
        running, and leave it locked for ever.
        """
        with self._guard:
            self._left_behind = {each: lane for each, lane in self._left_behind.items() if lane.stuck_in}
            if lane := self._left_behind.get(pid):
                raise DeviceError(name, TIMED_OUT, f"{lane.stuck_in} of process {pid} has not returned")

    def _take(self, name: str) -> Lane:
        """A lane without a call in it; calls for different processes run side by side."""
        with self._guard:
            for at, lane in enumerate(self._free):
                if not lane.stuck_in:
                    return self._free.pop(at)
            if self._lanes >= MAX_STUCK:
                raise DeviceError(name, TIMED_OUT, f"{MAX_STUCK} driver calls have not returned")
            self._lanes += 1
            return Lane(f"cuda-{self._lanes}")

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
            return ""
        return text.value.decode(errors="replace")


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuCheckpointProcessGetState": (ctypes.c_void_p,),
    "cuCheckpointProcessLock": (ctypes.c_void_p,),
    "cuCheckpointProcessCheckpoint": (ctypes.c_void_p,),
    "cuCheckpointProcessRestore": (ctypes.c_void_p,),
    "cuCheckpointProcessUnlock": (ctypes.c_void_p,),
}


def hold(first_bytes: int, second_bytes: int, cgroup: str = "") -> int:
    """The self-test's child: holds a pattern in device memory and reads it back on demand.

    It enters ``cgroup`` first, where one is given.

    Prints ``ready`` with the pattern's digest and the codes of both allocations; the
    second one is expected to be denied.  For each line on stdin it reads the memory
    back and prints the digest of what it found.  (cuda.h: the driver API by name.)
    """
    # It must not outlive a helper that is killed while it is locked: nobody would unlock it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if cgroup:
        with open(f"{cgroup}/cgroup.procs", "a", encoding="ascii") as procs:
            procs.write(f"{os.getpid()}\n")
    cuda = ctypes.CDLL("libcuda.so.1")
    context, first, second = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    device = ctypes.c_int()
    code = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
        or cuda.cuMemAlloc_v2(ctypes.byref(first), ctypes.c_size_t(first_bytes))
    )
    if code:
        print(f"failed {code}", flush=True)
        return 1
    denied = cuda.cuMemAlloc_v2(ctypes.byref(second), ctypes.c_size_t(second_bytes))
    block = os.urandom(1 << 16)
    pattern = (block * (first_bytes // len(block) + 1))[:first_bytes]
    size = ctypes.c_size_t(first_bytes)
    code = cuda.cuMemcpyHtoD_v2(first, pattern, size) or cuda.cuCtxSynchronize()
    print(f"ready {hashlib.sha256(pattern).hexdigest()} {code} {denied}", flush=True)
    for _line in sys.stdin:
        found = ctypes.create_string_buffer(first_bytes)
        code = cuda.cuMemcpyDtoH_v2(found, first, size)
        print(hashlib.sha256(found.raw).hexdigest() if not code else f"failed {code}", flush=True)
    return 0


if __name__ == "__main__":
    # Without the driver's own end-of-process code, which may wait for the driver.
    os._exit(hold(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
