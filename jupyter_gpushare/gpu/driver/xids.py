"""What the devices report by themselves: XIDs, as NVML's events.

Facts (NVML API reference): ``nvmlEventSetWait`` blocks in the driver and answers TIMEOUT when
nothing happened; devices without events answer NOT_SUPPORTED; those of a MIG instance come from
its parent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pynvml

from jupyter_gpushare.gpu.driver.nvml import ALL_INSTANCES, Gpu, device_error, text_of


@contextmanager
def listen(gpus: tuple[Gpu, ...]) -> Iterator[Listener]:
    """A listener for the devices' events; it blocks in the driver, so it needs its own thread.

    Raises:
        DeviceError: the driver was restarted, or has no events at all.
    """
    try:
        listener = Listener(gpus)
    except pynvml.NVMLError as error:
        raise device_error("nvmlEventSetCreate", error) from None
    try:
        yield listener
    finally:
        listener.close()


class Listener:
    """An event set of all devices that have events."""

    def __init__(self, gpus: tuple[Gpu, ...]) -> None:
        self._gpus = gpus
        self._set = pynvml.nvmlEventSetCreate()
        self.devices: set[str] = set()
        for parent in dict.fromkeys(gpu.parent for gpu in gpus):
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(parent)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
                self.devices.add(parent)
            except pynvml.NVMLError:
                continue  # a virtual GPU, or one that is lost: the sampler notices

    def wait(self, timeout_ms: int) -> list[tuple[str, int]]:
        """The devices (MIG instances apart) that reported an XID within ``timeout_ms``, with its number.

        Raises:
            DeviceError: the driver was restarted, or cannot be waited for.
        """
        try:
            event = pynvml.nvmlEventSetWait_v2(self._set, timeout_ms)
            parent = text_of(pynvml.nvmlDeviceGetUUID(event.device))
        except pynvml.NVMLError_Timeout:
            return []
        except pynvml.NVMLError_GpuIsLost:
            return []  # the sampler notices which
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
