"""The only door to pynvml: devices, memory, utilization, processes, health.

Every call runs in its device's `Lane` with a bound, so that a hung device
costs its own answers and nothing else.  Handles are taken once at start; a
device is named by its UUID, never by its index, which changes between boots.

Facts used here (NVML API reference, driver r570 and later):

* a process without a value for its memory (``usedGpuMemory`` is None) runs in a
  container or under a vGPU that hides it: it is shown as 0 bytes;
* ``nvmlDeviceGetProcessUtilization`` answers NOT_FOUND when no process used the
  device since the time stamp, and takes microseconds of the wall clock;
* a MIG instance has memory and processes of its own, no utilization, and cannot
  be checkpointed.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from ..errors import DeviceError
from .bounded import TIMED_OUT, Lane

CALL_TIMEOUT_S = 5.0
# nvmlInit attaches to every device of the machine: seconds each without persistence mode.
INIT_TIMEOUT_S = 60.0

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What does not change about one device while the helper runs."""

    uuid: str
    index: int
    name: str
    memory_bytes: int
    mig: bool
    island: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What one device shows at one moment."""

    used_bytes: int
    free_bytes: int
    utilization_percent: int  # 0 where the device does not say (MIG)
    # By pid, only compute and graphics processes with memory on this device.
    processes: dict[int, int]
    # Pids that had a kernel running since the last call; None where NVML does not say.
    computing: frozenset[int] | None


class Nvml:
    """Answers about the devices of this machine, each within a bound."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Load the library and find the devices.

        Raises:
            DeviceError: there is no NVIDIA driver, or it does not answer.
        """
        self._timeout_s = timeout_s
        system = Lane("nvml")
        self.driver, found = system.call("nvmlInit", _find, INIT_TIMEOUT_S)
        self._handles = {gpu.uuid: handle for gpu, handle in found}
        self._lanes = {gpu.uuid: Lane(gpu.uuid) for gpu, _ in found}
        self._seen_us = dict.fromkeys(self._handles, int(time.time() * 1e6))
        self.gpus = _with_islands(found, system)

    def usage(self, uuid: str) -> Usage:
        """Memory, utilization and processes of one device.

        Raises:
            DeviceError: the call failed or hangs (code ``bounded.TIMED_OUT``).
        """
        handle = self._handles[uuid]
        since_us = self._seen_us[uuid]
        self._seen_us[uuid] = int(time.time() * 1e6)
        return self._call(uuid, "nvmlDeviceGetMemoryInfo", lambda: _usage(handle, since_us))

    def free_bytes(self, uuid: str) -> int:
        """Free memory of one device, now.

        Raises:
            DeviceError: as `usage`.
        """
        handle = self._handles[uuid]
        return self._call(uuid, "nvmlDeviceGetMemoryInfo", lambda: int(_memory(handle).free))

    def processes(self, uuid: str) -> dict[int, int]:
        """Bytes by pid on one device, now.

        Raises:
            DeviceError: as `usage`.
        """
        handle = self._handles[uuid]
        return self._call(uuid, "nvmlDeviceGetComputeRunningProcesses", lambda: _processes(handle))

    def _call(self, uuid: str, name: str, call: Callable[[], _Value]) -> _Value:
        try:
            return self._lanes[uuid].call(name, call, self._timeout_s)
        except pynvml.NVMLError as error:
            raise _device_error(name, error) from None


def is_gone(error: DeviceError) -> bool:
    """Whether the device itself is unusable, and not only this question unanswered."""
    return error.code in (
        TIMED_OUT,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_UNKNOWN,
    )


def _device_error(call: str, error: pynvml.NVMLError) -> DeviceError:
    return DeviceError(call, int(error.value), str(error))


def _find() -> tuple[str, list[tuple[Gpu, Any]]]:
    try:
        pynvml.nvmlInit()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found: list[tuple[Gpu, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            instances = _instances(handle)
            for each in instances or [handle]:
                gpu = Gpu(
                    uuid=_text(pynvml.nvmlDeviceGetUUID(each)),
                    index=len(found),
                    name=_text(pynvml.nvmlDeviceGetName(each)),
                    memory_bytes=int(_memory(each).total),
                    mig=bool(instances),
                    island="",
                )
                found.append((gpu, each))
    except pynvml.NVMLError as error:
        raise _device_error("nvmlInit", error) from None
    return driver, found


def _instances(handle: Any) -> list[Any]:
    """The MIG instances of a device in MIG mode; none otherwise."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return []
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return []
    instances = []
    for index in range(most):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError_NotFound:
            continue
    return instances


def _with_islands(found: list[tuple[Gpu, Any]], lane: Lane) -> tuple[Gpu, ...]:
    """The devices, with one word for those that reach each other over NVLink."""
    word = {gpu.uuid: gpu.uuid for gpu, _ in found}
    for (gpu, handle), (other, other_handle) in itertools.combinations(found, 2):
        if gpu.mig or other.mig:
            continue
        ask = functools.partial(_linked, handle, other_handle)
        if lane.call("nvmlDeviceGetP2PStatus", ask, INIT_TIMEOUT_S):
            old, new = word[other.uuid], word[gpu.uuid]
            word = {uuid: new if name == old else name for uuid, name in word.items()}
    sizes = list(word.values())
    return tuple(
        Gpu(gpu.uuid, gpu.index, gpu.name, gpu.memory_bytes, gpu.mig, word[gpu.uuid])
        if sizes.count(word[gpu.uuid]) > 1
        else gpu
        for gpu, _ in found
    )


def _linked(handle: Any, other: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _memory(handle: Any) -> Any:
    # v1 counts what the driver keeps for itself as used, which is what may not be granted.
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _usage(handle: Any, since_us: int) -> Usage:
    memory = _memory(handle)
    try:
        percent = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError as error:
        if is_gone(_device_error("nvmlDeviceGetUtilizationRates", error)):
            raise
        percent = 0
    return Usage(
        used_bytes=int(memory.used),
        free_bytes=int(memory.free),
        utilization_percent=percent,
        processes=_processes(handle),
        computing=_computing(handle, since_us),
    )


def _processes(handle: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        found[int(process.pid)] = found.get(int(process.pid), 0) + int(process.usedGpuMemory or 0)
    return found


def _computing(handle: Any, since_us: int) -> frozenset[int] | None:
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InsufficientSize):
        return frozenset()
    except pynvml.NVMLError:
        return None
    return frozenset(int(sample.pid) for sample in samples if sample.smUtil or sample.memUtil)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
