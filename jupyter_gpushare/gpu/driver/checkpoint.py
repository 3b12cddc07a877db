"""The only door to ctypes: the checkpoint calls of the CUDA driver.

Lock, Checkpoint, Restore and Unlock move a process RUNNING -> LOCKED -> CHECKPOINTED ->
LOCKED -> RUNNING.  Another process calls them by pid.  While the process is not RUNNING, its
threads run until they enter a CUDA call, and wait there.

Facts (cuda.h of CUDA 12.8 to 13.0, section "CUDA Checkpointing"; the layouts
are declared by hand below, so no CUDA header is needed):

* `CUcheckpointLockArgs`: ``unsigned timeoutMs, reserved0; uint64_t reserved1[7]``
  (64 bytes).  Timeout 0 would wait for ever.  A lock that timed out leaves the process
  RUNNING and answers CUDA_ERROR_NOT_READY (600).
* `CUcheckpointRestoreArgs`, from CUDA 13.0 (driver r580) on: ``CUcheckpointGpuPair *gpuPairs;
  unsigned gpuPairsCount``, 64 bytes in all, the rest zero.  `CUcheckpointGpuPair`: the
  old and the new ``CUuuid``, 16 bytes each.  The pairs must name every checkpointed
  GPU; a new GPU must have the same chip and enough memory.  In CUDA 12.8 all 64 bytes
  are reserved.
* The other argument structs may be NULL.  Restore without pairs uses the same devices.
* States: 0 running, 1 locked, 2 checkpointed, 3 failed, and since CUDA 13.1
  4 checkpointing and 5 restoring.
* The calls exist from driver r570 on, as exported symbols of ``libcuda.so.1``.
* Restore ends in LOCKED.  A Restore that runs out of device memory answers 2
  (CUDA_ERROR_OUT_OF_MEMORY) and loses the process: it stays CHECKPOINTED, every later
  Restore answers 304, Unlock 401 (NVIDIA/cuda-checkpoint issue 44, driver 580.95.05).
  Callers check free memory first and never retry after 2.
* Only root or the tracer of a process may checkpoint it; others get 304 (`denied`).

libcuda is loaded once and cuInit called once, because attaching to the driver takes
seconds; for the same reason no tool is started per call.  Nothing here creates a
context, so the helper itself holds no device memory.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT, BoundedWorker

INIT_TIMEOUT_S = 60.0
# GetState and Unlock move no memory.
SHORT_TIMEOUT_S = 10.0
# Calls that hang are abandoned, each with its thread; once this many hang, no call is started.
MAX_STUCK = 16

_NO_MPS = "/nonexistent/no-mps"
_STATE = "cuCheckpointProcessGetState"
_RESTORE = "cuCheckpointProcessRestore"
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_STAYS: Mapping[str, str] = MappingProxyType({})


class CallNotMade(DeviceError):
    """A driver call about a process was not made, because earlier calls have not returned."""

    def __init__(self, call: str, why: str) -> None:
        super().__init__(call, TIMED_OUT, why)


class ProcessState(enum.IntEnum):
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


class _GpuPair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_GpuPair)),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("reserved", ctypes.c_uint64 * 6),
    ]


class Checkpoint:
    """The checkpoint calls, each with a time limit.

    ``unavailable`` says why nothing can be suspended on this machine, or is empty.  ``proves_end`` is True
    if the preload library can prove with this driver that no work of a process is left to run (CUDA 12.5).
    """

    def __init__(self) -> None:
        self._cuda: Any = None
        self.proves_end = False
        self._guard = threading.Lock()
        self._free: list[BoundedWorker] = []
        self._workers = 0
        # Abandoned calls by pid, which may still change the state of the process.
        self._abandoned: dict[int, BoundedWorker] = {}
        try:
            self.unavailable = BoundedWorker("cuda").call("cuInit", self._load, INIT_TIMEOUT_S)
        except DeviceError as error:
            self.unavailable = str(error)

    def state(self, pid: int) -> ProcessState:
        """Return the checkpoint state of a process from the driver.

        Raises:
            DeviceError: the process is gone or does not use CUDA.
        """
        value = ctypes.c_int(-1)
        self._call(_STATE, SHORT_TIMEOUT_S, pid, ctypes.byref(value))
        try:
            return ProcessState(value.value)
        except ValueError:
            return ProcessState.FAILED

    def lock(self, pid: int, timeout_s: float) -> None:
        """RUNNING -> LOCKED; after a timeout the process stays RUNNING.

        Raises:
            DeviceError: it timed out, or the process cannot be locked.
        """
        args = _LockArgs(timeout_ms=max(1, int(timeout_s * 1000)))
        self._call("cuCheckpointProcessLock", timeout_s + SHORT_TIMEOUT_S, pid, ctypes.byref(args))

    def checkpoint(self, pid: int, timeout_s: float) -> None:
        """LOCKED -> CHECKPOINTED: copy the device memory to the host and free it on the device.

        Raises:
            DeviceError: the driver refused, failed or hangs.
        """
        self._call("cuCheckpointProcessCheckpoint", timeout_s, pid, None)

    def restore(self, pid: int, timeout_s: float, moves: Mapping[str, str] = _STAYS) -> None:
        """CHECKPOINTED -> LOCKED: copy the memory back to the device; the caller checks free memory first.

        ``moves`` maps the UUID of each checkpointed device to that of the device to restore on, as NVML
        writes them.  If it is empty, the process is restored on its own devices.

        Raises:
            DeviceError: the driver refused, failed or hangs, or a UUID is not that of a whole GPU.
        """
        arguments = ctypes.byref(_restore_args(moves)) if moves else None
        self._call(_RESTORE, timeout_s, pid, arguments)

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING: the waiting CUDA calls continue.

        Raises:
            DeviceError: the driver refused, failed or hangs.
        """
        self._call("cuCheckpointProcessUnlock", SHORT_TIMEOUT_S, pid, None)

    def simulated_host_memory(self) -> tuple[int, int] | None:
        """Return total and available bytes of host memory in the simulated driver; None on a real driver."""
        ask = getattr(self._cuda, "gpushare_sim_host_memory", None) if self._cuda is not None else None
        if ask is None:
            return None
        total, available = ctypes.c_uint64(0), ctypes.c_uint64(0)
        ask(ctypes.byref(total), ctypes.byref(available))
        return total.value, available.value

    def _load(self) -> str:
        # If an MPS server runs, cuInit would make the helper its client.
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = _NO_MPS
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"the CUDA driver library cannot be loaded: {error}"
        code = cuda.cuInit(0)
        if code:
            return f"cuInit failed with code {code}"
        self._cuda = cuda
        self.proves_end = hasattr(cuda, "cuCtxRecordEvent")
        missing = [name for name in _CALLS if not hasattr(cuda, name)]
        if missing:
            return f"the driver has no {missing[0]}: suspending needs driver r570 or later"
        for name in _CALLS:
            getattr(cuda, name).argtypes = [ctypes.c_int, ctypes.c_void_p]
        return ""

    def _call(self, name: str, timeout_s: float, pid: int, arguments: Any) -> None:
        if self.unavailable:
            raise DeviceError(name, _NOT_SUPPORTED, self.unavailable)
        self._refuse_beside_another(name, pid)
        function = getattr(self._cuda, name)
        worker = self._take(name)
        try:
            # The closure keeps the arguments alive while a hanging call may still write to them.
            code = worker.call(name, lambda: int(function(pid, arguments)), timeout_s)
        finally:
            with self._guard:
                if worker.stuck_in:
                    self._abandoned[pid] = worker
                self._free.append(worker)
        if code:
            raise DeviceError(name, code, self._name_of(code))

    def _refuse_beside_another(self, name: str, pid: int) -> None:
        """Refuse a call for a process while an earlier call for it has not returned.

        A hanging Lock may still take effect: a caller that reads the state before would find
        the process running, and leave it locked for ever.

        Raises:
            CallNotMade: an earlier call that moves the process has not returned.
            DeviceError: an earlier GetState has not returned (code ``TIMED_OUT``).
        """
        with self._guard:
            self._abandoned = {each: worker for each, worker in self._abandoned.items() if worker.stuck_in}
            if worker := self._abandoned.get(pid):
                why = f"{worker.stuck_in} of process {pid} has not returned"
                raise (
                    DeviceError(name, TIMED_OUT, why) if worker.stuck_in == _STATE else CallNotMade(name, why)
                )

    def _take(self, name: str) -> BoundedWorker:
        """Return an idle worker; calls for different processes run in parallel.

        Raises:
            CallNotMade: `MAX_STUCK` calls hang.
        """
        with self._guard:
            for at, worker in enumerate(self._free):
                if not worker.stuck_in:
                    return self._free.pop(at)
            if self._workers >= MAX_STUCK:
                raise CallNotMade(name, f"{MAX_STUCK} driver calls have not returned")
            self._workers += 1
            return BoundedWorker(f"cuda-{self._workers}")

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
            return ""
        return text.value.decode(errors="replace")


def _restore_args(moves: Mapping[str, str]) -> _RestoreArgs:
    pairs = (_GpuPair * len(moves))(*(_GpuPair(_raw(old), _raw(new)) for old, new in moves.items()))
    return _RestoreArgs(pairs=pairs, count=len(moves))


def _raw(text: str) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the 16 bytes of a UUID such as GPU-3f0c12ab-5a6e-4a86-9a3a-21c6a4b50d3e."""
    try:
        if not text.startswith("GPU-"):
            raise ValueError(text)
        return (ctypes.c_ubyte * 16)(*uuid.UUID(text.removeprefix("GPU-")).bytes)
    except ValueError as error:
        raise DeviceError(_RESTORE, _INVALID_VALUE, f"{text!r} is not the UUID of a GPU") from error


_CALLS = (
    _STATE,
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    _RESTORE,
    "cuCheckpointProcessUnlock",
)
