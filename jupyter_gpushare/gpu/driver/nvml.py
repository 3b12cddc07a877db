"""The only door to pynvml: devices, memory, utilization, processes, health.

Every call runs in its device's `BoundedWorker` with a time limit, so a hung device
delays no answer about another device.  Handles are taken once at start.  A
device is named by its UUID, never by its index, which changes between boots.

Facts (NVML API reference, driver r570 and later):

* The driver may list a process without its bytes.  ``usedGpuMemory`` is None on vGPU and WDDM
  (NVML_VALUE_NOT_AVAILABLE), and 0 in a container with its own pid namespace (HAMi-core
  issue 112, driver 560.35).  None is kept apart from 0.  A process that only called cuInit is
  also listed, with either value (llm-d-rl-time-slicing PR 148).
* ``nvmlDeviceGetProcessUtilization`` takes a time in microseconds of the wall clock, and
  answers NOT_FOUND if no process used the device since then.
* A MIG instance has its own memory and processes, but no utilization, and cannot be
  checkpointed.  Its name ends in ``MIG <profile>``.
* Devices without ECC answer NOT_SUPPORTED to questions about it.  A GB10 answers so about its
  memory (580.126, 580.173: XuehaiPan/nvitop PR 208, NVIDIA-NeMo/RL PR 2203), and WSL about
  processes (CUDA on WSL User Guide, limitations): both are left out.
* The recovery action (field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, of whole GPUs) says what an
  administrator has to do before a GPU can be trusted (docs.nvidia.com/deploy,
  "Error Recovery and Response Flags").  Older drivers lack the field.
* ``nvmlDeviceSetMemoryLimits_v1`` (r615, "MPS v3 Memory Partitioning" on docs.nvidia.com)
  limits what the processes of a cgroup (v2) may allocate on a device.  An allocation above
  ``hardLimit`` fails; ``softLimit`` stays guaranteed under pressure.  Only root may call it, and
  not on MIG.  Soft 0 with hard MAX clears it, which must precede the removal of the cgroup.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pynvml

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT, BoundedWorker, Call

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
# nvmlInit attaches to every device of the machine, which takes seconds each without persistence mode.
INIT_TIMEOUT_S = 60.0

# `usages` waits this long for all devices together.
PASS_TIMEOUT_S = 0.5
NO_LIMIT = (1 << 64) - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX

# The driver or nvidia-ml-py lacks the call.
NOT_OFFERED = int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
LEFT_OUT = "the device helper left it out at its start"

ALL_INSTANCES = 0xFFFFFFFF
_RESTARTED = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)

_Value = TypeVar("_Value")
_Found = tuple[str, list[tuple["DriverGpu", Any]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """The properties of one device that do not change while the helper runs."""

    uuid: str
    index: int
    name: str
    memory_bytes: int
    mig: bool
    island: str = ""
    minor: int = -1  # of its device file /dev/nvidiaN, or of its parent's
    profile: str = ""  # of a MIG instance, such as 1g.10gb
    parent: str = ""  # UUID of the GPU that reports this device's events
    instance: int = ALL_INSTANCES  # of a MIG instance: its GPU instance there


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One measurement of one device."""

    used_bytes: int
    free_bytes: int
    utilization_percent: int  # 0 if the device does not report it (MIG)
    # Bytes by pid of compute processes; None if the driver does not report the bytes.
    processes: dict[int, int | None]
    # Pids that had a kernel running since the last call; None if NVML does not report them.
    computing: frozenset[int] | None
    uncorrected: int | None = None  # memory errors since the driver was loaded; None: not counted
    recovery_action: int | None = None  # nvmlDeviceGpuRecoveryAction_t; None: not reported

    @property
    def unexplained_bytes(self) -> int:
        """Bytes that are not free and that no listed process holds."""
        return self.used_bytes - sum(count or 0 for count in self.processes.values())


class Nvml:
    """Answers about the devices of this machine, each within a time limit."""

    def __init__(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Load the library and find the devices; ``left_out`` says why each other device cannot be leased.

        Raises:
            DeviceError: there is no NVIDIA driver, or it does not answer.
        """
        self._timeout_s = timeout_s
        self._system = BoundedWorker("nvml")
        self.driver, found, self.left_out = self._system.call("nvmlInit", _find, INIT_TIMEOUT_S)
        self._handles = {gpu.uuid: handle for gpu, handle in found}
        for reason in self.left_out:
            log.warning("%s", reason)
        self._parents = {gpu.uuid: gpu.parent if gpu.mig else "" for gpu, _ in found}
        self._workers = {gpu.uuid: BoundedWorker(gpu.uuid) for gpu, _ in found}
        self._seen_us = dict.fromkeys(self._handles, int(time.time() * 1e6))
        self.gpus = _with_islands(found, self._system)
        self.pending: dict[str, Call[DeviceReading]] = {}  # calls of `usages` that still run

    def usages(self, within_s: float = PASS_TIMEOUT_S) -> dict[str, DeviceReading | DeviceError | None]:
        """Return the usage of each device; query all devices at once and wait at most ``within_s``.

        The usage is None if the device has not answered yet; a later call returns its answer.  After
        `CALL_TIMEOUT_S` without an answer it is an error, and every other call to that device
        fails at once until the device has answered.
        """
        found: dict[str, DeviceReading | DeviceError | None] = {}
        for uuid in self._handles:
            if uuid not in self.pending:
                try:
                    self.pending[uuid] = self._begin_usage(uuid)
                except DeviceError as error:
                    # A call of another thread still runs, which is not yet an error.
                    found[uuid] = error if self._workers[uuid].stuck_in else None
        deadline = time.monotonic() + within_s
        for uuid, job in list(self.pending.items()):
            if job.done.wait(max(0.0, deadline - time.monotonic())):
                del self.pending[uuid]
                try:
                    found[uuid] = job.result()
                except pynvml.NVMLError as error:
                    found[uuid] = device_error(job.name, error)
            elif time.monotonic() - job.began_at >= self._timeout_s:
                found[uuid] = self._workers[uuid].abandon(job, self._timeout_s)
            else:
                found[uuid] = None
        return found

    def usage(self, uuid: str) -> DeviceReading:
        """Return memory, utilization and processes of one device.

        Raises:
            DeviceError: the call failed or hangs (code ``bounded.TIMED_OUT``).
        """
        now_us = int(time.time() * 1e6)
        return self._call(
            uuid, "nvmlDeviceGetMemoryInfo", lambda handle: _usage(handle, now_us, self._parents[uuid])
        )

    def _begin_usage(self, uuid: str) -> Call[DeviceReading]:
        call = functools.partial(_usage, self._handles[uuid], self._seen_us[uuid], self._parents[uuid])
        job = self._workers[uuid].begin("nvmlDeviceGetMemoryInfo", call)
        self._seen_us[uuid] = int(time.time() * 1e6)
        return job

    def reopen(self) -> None:
        """Take new handles after a restart of the driver; missing devices keep their old handles.

        Raises:
            DeviceError: the driver is not back.
        """

        def again() -> _Found:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            return _find()

        self.driver, found, _ = self._system.call("nvmlInit", again, INIT_TIMEOUT_S)
        self._handles |= {gpu.uuid: handle for gpu, handle in found if gpu.uuid in self._handles}

    def set_memory_limits(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int) -> None:
        """Limit what the processes of a cgroup may allocate on a device.

        ``soft_bytes`` 0 with ``hard_bytes`` `NO_LIMIT` clears the limit.

        Raises:
            DeviceError: the driver, the device or our user cannot set it, or the call hangs.
        """
        limits = getattr(pynvml, "c_nvmlSetMemoryLimits_v1_t", None)
        name = "nvmlDeviceSetMemoryLimits_v1"
        if limits is None:
            raise DeviceError(name, NOT_OFFERED, "nvidia-ml-py is older than the driver's call")
        filled = limits(cgroup.encode(), soft_bytes, hard_bytes)
        self._call(uuid, name, lambda handle: pynvml.nvmlDeviceSetMemoryLimits_v1(handle, filled))

    def under_mps(self, uuid: str) -> frozenset[int]:
        """Return the pids that use a device through MPS and so cannot be checkpointed.

        Raises:
            DeviceError: as `usage`.
        """
        return self._call(uuid, "nvmlDeviceGetMPSComputeRunningProcesses", _under_mps)

    def persistence_mode(self, uuid: str) -> bool | None:
        """Return whether persistence mode is on, or None if the driver does not report it."""
        try:
            mode = self._call(uuid, "nvmlDeviceGetPersistenceMode", pynvml.nvmlDeviceGetPersistenceMode)
        except DeviceError:
            return None
        return bool(mode)

    def free_bytes(self, uuid: str) -> int:
        """Return the bytes that are free on one device now.

        Raises:
            DeviceError: as `usage`.
        """
        return int(self._call(uuid, "nvmlDeviceGetMemoryInfo", _memory).free)

    def processes(self, uuid: str, wait_s: float | None = None) -> dict[int, int | None]:
        """Return the bytes by pid on one device now; None where they are unknown.

        If an earlier call to the device still runs, wait for it at most ``wait_s``.

        Raises:
            DeviceError: as `usage`.
        """
        return self._call(uuid, "nvmlDeviceGetComputeRunningProcesses", _processes, wait_s)

    def _call(
        self, uuid: str, name: str, call: Callable[[Any], _Value], wait_s: float | None = None
    ) -> _Value:
        if uuid not in self._handles:  # a device of a lease of an earlier helper
            raise DeviceError("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_NOT_FOUND, LEFT_OUT)
        bound_call = functools.partial(call, self._handles[uuid])
        try:
            return self._workers[uuid].call(name, bound_call, self._timeout_s, wait_s)
        except pynvml.NVMLError as error:
            raise device_error(name, error) from None


def is_restart(error: DeviceError) -> bool:
    """Return whether the driver was restarted while the helper ran, so that every handle is invalid."""
    return error.code in _RESTARTED


def is_gone(error: DeviceError) -> bool:
    """Return whether the device itself is unusable, rather than only this call."""
    return error.code in (
        TIMED_OUT,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_UNKNOWN,
    )


def device_error(call: str, error: pynvml.NVMLError) -> DeviceError:
    return DeviceError(call, int(error.value), str(error))


def _find() -> _Found:
    """Return the driver's version, the leasable devices with handles, and why others cannot be leased."""
    found: list[tuple[DriverGpu, Any]] = []
    left_out: list[str] = []
    try:
        pynvml.nvmlInit()
        driver = text_of(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            _examine(index, found, left_out)
    except pynvml.NVMLError as error:
        raise DeviceError("nvmlInit", int(error.value), _message(error)) from None
    return driver, found, tuple(left_out)


def _message(error: pynvml.NVMLError) -> str:
    """Return the driver's own message; the simulated driver's says what is wrong with its settings."""
    try:
        return text_of(pynvml.nvmlErrorString(error.value))
    except (pynvml.NVMLError, UnicodeDecodeError):
        return str(error)  # there is no library


def _examine(index: int, found: list[tuple[DriverGpu, Any]], left_out: list[str]) -> None:
    """Add a device, or its MIG instances, to ``found`` or to ``left_out``."""
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = f"{text_of(pynvml.nvmlDeviceGetName(handle))} ({text_of(pynvml.nvmlDeviceGetUUID(handle))})"
        instances = _instances(handle)
        for each in instances or [handle]:
            if reason := _obstacle(each):
                left_out.append(f"{name} is left out: {reason}")
            else:
                found.append((_gpu(each, len(found), handle, mig=bool(instances)), each))
    except pynvml.NVMLError as error:
        if error.value in _RESTARTED:
            raise
        left_out.append(f"{name} is left out: it answers {error}")


def _obstacle(handle: Any) -> str:
    """Return why a device cannot be leased, or ""."""
    try:
        if not _memory(handle).total:
            return "the driver does not say how much memory it has"
    except pynvml.NVMLError_NotSupported:
        return "the driver does not say how much memory it has"
    try:
        _processes(handle)
    except pynvml.NVMLError_NotSupported:
        return "the driver does not list its processes"
    return ""


def _gpu(handle: Any, index: int, whole: Any, *, mig: bool) -> DriverGpu:
    minor = -1
    with suppress(pynvml.NVMLError):  # WSL has none
        minor = int(pynvml.nvmlDeviceGetMinorNumber(whole))
    gpu = DriverGpu(
        uuid=text_of(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=text_of(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(_memory(handle).total),
        mig=mig,
        minor=minor,
        parent=text_of(pynvml.nvmlDeviceGetUUID(whole)),
    )
    if not mig:
        return gpu
    profile, instance = gpu.name.rpartition(" MIG ")[2], int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    return replace(gpu, profile=profile, instance=instance)


def _instances(handle: Any) -> list[Any]:
    """Return the MIG instances of a device; empty if it is not in MIG mode."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return []
        max_count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return []
    instances = []
    for index in range(max_count):
        with suppress(pynvml.NVMLError_NotFound):
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return instances


def _with_islands(found: list[tuple[DriverGpu, Any]], worker: BoundedWorker) -> tuple[DriverGpu, ...]:
    """Return the devices; those that reach each other over NVLink get the same ``island``."""
    island = {gpu.uuid: gpu.uuid for gpu, _ in found}
    for (gpu, handle), (other, other_handle) in itertools.combinations(found, 2):
        if gpu.mig or other.mig:
            continue
        ask = functools.partial(_linked, handle, other_handle)
        if worker.call("nvmlDeviceGetP2PStatus", ask, INIT_TIMEOUT_S):
            old, new = island[other.uuid], island[gpu.uuid]
            island = {uuid: new if name == old else name for uuid, name in island.items()}
    names = list(island.values())
    return tuple(
        replace(gpu, island=island[gpu.uuid]) if names.count(island[gpu.uuid]) > 1 else gpu
        for gpu, _ in found
    )


def _linked(handle: Any, other: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _memory(handle: Any) -> Any:
    # v1 counts the memory that the driver reserves as used; that memory cannot be granted.
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _usage(handle: Any, since_us: int, parent: str) -> DeviceReading:
    memory, rates = _memory(handle), _if_offered(pynvml.nvmlDeviceGetUtilizationRates, handle)
    errors = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return DeviceReading(
        used_bytes=int(memory.used),
        free_bytes=int(memory.free),
        utilization_percent=int(rates.gpu) if rates else 0,
        processes=_processes(handle),
        computing=_computing(handle, since_us),
        uncorrected=_if_offered(pynvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
        recovery_action=_recovery_action(handle, parent),
    )


def _processes(handle: Any) -> dict[int, int | None]:
    # pynvml's name without a version hides the "not found" of drivers before r510 behind another error.
    found: dict[int, int | None] = {}
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle):
        pid, count = int(process.pid), process.usedGpuMemory
        before = found.get(pid, 0)
        found[pid] = None if count is None or before is None else before + int(count)
    return found


def _computing(handle: Any, since_us: int) -> frozenset[int] | None:
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InsufficientSize):
        return frozenset()
    except pynvml.NVMLError:
        return None
    return frozenset(int(sample.pid) for sample in samples if sample.smUtil or sample.memUtil)


def _if_offered(call: Callable[..., Any], *given: Any) -> Any:
    """Return the answer of a call, or None if this device does not support it."""
    try:
        return call(*given)
    except pynvml.NVMLError as error:
        if is_gone(device_error(call.__name__, error)):
            raise
        return None


def _recovery_action(handle: Any, parent: str) -> int | None:
    try:
        whole = pynvml.nvmlDeviceGetHandleByUUID(parent) if parent else handle
        (field,) = pynvml.nvmlDeviceGetFieldValues(whole, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except (pynvml.NVMLError, AttributeError):  # the driver or nvidia-ml-py is older than the field
        return None
    return int(field.value.uiVal) if field.nvmlReturn == pynvml.NVML_SUCCESS else None


def _under_mps(handle: Any) -> frozenset[int]:
    try:
        return frozenset(int(each.pid) for each in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle))
    except pynvml.NVMLError:
        return frozenset()  # not supported; the driver itself then refuses to checkpoint such processes


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---- XIDs that the devices report as NVML events -----------------------------
# Facts (NVML API reference): ``nvmlEventSetWait`` blocks in the driver and answers TIMEOUT if
# nothing happened.  Devices without events answer NOT_SUPPORTED.  The events of a MIG instance come
# from its parent.


class XidListener:
    """The event set of all devices that have events; `wait` blocks in the driver and needs its own thread."""

    def __init__(self, gpus: tuple[DriverGpu, ...]) -> None:
        """Create the event set; the caller closes it.

        Raises:
            DeviceError: the driver was restarted, or has no events at all.
        """
        self._gpus = gpus
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            raise device_error("nvmlEventSetCreate", error) from None
        self.devices: set[str] = set()
        for parent in dict.fromkeys(gpu.parent for gpu in gpus):
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(parent)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
                self.devices.add(parent)
            except pynvml.NVMLError:
                continue  # a virtual GPU, or a lost one, which the sampler notices

    def wait(self, timeout_ms: int) -> list[tuple[str, int]]:
        """Return the UUID and the XID of each device or MIG instance that reported one in ``timeout_ms``.

        Raises:
            DeviceError: the driver was restarted, or the wait failed.
        """
        try:
            event = pynvml.nvmlEventSetWait_v2(self._set, timeout_ms)
            parent = text_of(pynvml.nvmlDeviceGetUUID(event.device))
        except (pynvml.NVMLError_Timeout, pynvml.NVMLError_GpuIsLost):
            return []  # the sampler notices which device is lost
        except pynvml.NVMLError as error:
            raise device_error("nvmlEventSetWait", error) from None
        return [
            (gpu.uuid, int(event.eventData))
            for gpu in self._gpus
            if gpu.parent == parent and event.gpuInstanceId in (ALL_INSTANCES, gpu.instance)
        ]

    def close(self) -> None:
        """Free the event set."""
        with suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._set)
