"""The devices of one machine, through its device helper."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from jupyter_gpushare.backends.base import DeviceBackend, Prepared
from jupyter_gpushare.backends.helper_client import MOVE_S, HelperClient
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.native import preload_path
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import EndProcess, Reserve

# Variables that a process needs from its start to become part of a lease later.
_RESERVED = ("GPUSHARE_LEASE", "GPUSHARE_LEASE_DIR", "LD_PRELOAD")


class LocalDevices(DeviceBackend):
    """The GPUs of the machine that broker and device helper share."""

    def __init__(self, helper: HelperClient) -> None:
        self._helper = helper

    async def epoch(self) -> int:
        return (await self._helper.ask("hello", None, helper.Hello)).epoch

    async def inventory(self) -> helper.Inventory:
        return await self._helper.ask("inventory", None, helper.Inventory)

    async def sample(self) -> helper.Sample:
        return await self._helper.ask("sample", None, helper.Sample)

    def watch(self) -> AsyncIterator[helper.Event | None]:
        return self._helper.watch()

    async def prepare(self, request: helper.SetLimit) -> Prepared:
        """Do as `DeviceBackend.prepare`.

        Raises:
            HelperError: refused, no answer, or the preload library is missing on this machine.
        """
        if why := library_fault():
            raise HelperError("library", why)
        files = await self._helper.ask("set_limit", request, helper.LeaseFiles)
        return Prepared(env=holder_environment(request.lease, files.directory, request.limits))

    async def reserve(self, handle: str) -> Mapping[str, str]:
        """Do as `DeviceBackend.reserve`.

        Raises:
            HelperError: refused, no answer, or the preload library is missing on this machine.
        """
        if why := library_fault():
            raise HelperError("library", why)
        files = await self._helper.ask("reserve", Reserve(lease=handle), helper.LeaseFiles)
        return {name: holder_environment(handle, files.directory, {})[name] for name in _RESERVED}

    async def suspend(self, handle: str, calls: str) -> helper.MoveResult:
        return await self._helper.ask(
            "suspend", helper.Suspend(lease=handle, calls=calls), helper.MoveResult, timeout_s=MOVE_S
        )

    async def resume(
        self, handle: str, *, unrecorded: bool = False, devices: Sequence[str] = ()
    ) -> helper.MoveResult:
        request = helper.Resume(lease=handle, unrecorded=unrecorded, devices=tuple(devices))
        return await self._helper.ask("resume", request, helper.MoveResult, timeout_s=MOVE_S)

    async def signal(self, handle: str, number: int, to: str) -> int:
        request = helper.Signal(lease=handle, number=number, to=to)
        try:
            return (await self._helper.ask("signal", request, helper.Signalled)).count
        except HelperError as error:
            if error.kind != helper.ErrorKind.UNKNOWN_LEASE:
                raise
            return 0

    async def end_process(self, device: str, process: str) -> None:
        await self._helper.ask("end_process", EndProcess(device=device, process=process), helper.Signalled)

    async def drop(self, handle: str) -> None:
        await self._helper.ask("drop", helper.Drop(lease=handle, end_processes=True), Any)

    async def close(self) -> None:
        """Close the kept connection to the helper."""
        self._helper.close()


def library_fault() -> str:
    """Return a sentence if the preload library is missing, without which no lease can start; else empty."""
    try:
        preload_path()
    except GpuShareError as error:
        return f"The preload library is missing, so no server with a GPU can start: {error}."
    return ""


def holder_environment(
    handle: str, directory: str, limits: Mapping[str, int], library: str = ""
) -> dict[str, str]:
    """Return the environment variables that make a process part of a lease.

    ``library`` is the path of the preload library, by default this machine's.

    The last two variables are hints for frameworks that otherwise allocate all device memory at start
    (documented by TensorFlow and JAX); the limit does not depend on them.
    """
    return {
        "GPUSHARE_LEASE": handle,
        "GPUSHARE_LEASE_DIR": directory,
        "GPUSHARE_MEMORY_LIMIT": str(sum(limits.values())),
        "CUDA_VISIBLE_DEVICES": ",".join(limits),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LD_PRELOAD": library or str(preload_path()),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
