"""The devices of one machine, through its device helper.

The helper's protocol is `protocol.helper`: one line of JSON each way over a unix
socket, one connection per request (a slow suspension must not delay a sample).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jupyter_gpushare.backends.base import Devices, Holder, Prepared
from jupyter_gpushare.errors import DeviceError, GpuShareError, HelperError
from jupyter_gpushare.native import preload_path
from jupyter_gpushare.protocol import helper

T = TypeVar("T")

# The helper answers from memory; a later answer means that it hangs.
_QUICK_S = 5.0
# Above the helper's own limits for moves: copies of tens of GB take minutes.
_MOVE_S = 600.0


class HelperClient:
    """Connections to the device helper, each with the epoch that the broker has at that moment."""

    def __init__(self, socket: Path, epoch: Callable[[], int]) -> None:
        self._socket = str(socket)
        self._epoch = epoch

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self._socket, limit=helper.MAX_LINE_BYTES)
        except OSError as error:
            raise HelperError(
                "unreachable", f"no device helper at {self._socket}: {error.strerror}"
            ) from None

    async def ask(self, verb: str, request: Any, kind: type[T], timeout_s: float = _QUICK_S) -> T:
        """Return the helper's answer to one request.

        Raises:
            HelperError: it refused (``kind`` says why), or does not answer.
            DeviceError: the driver refused.
        """
        plain = {} if request is None else msgspec.to_builtins(request)
        if verb != "hello":  # the one verb that the helper answers to any epoch
            plain["epoch"] = self._epoch()
        reader, writer = await self._connect()
        try:
            writer.write(helper.encode({"verb": verb, **plain}))
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                line = await reader.readline()
        except (OSError, TimeoutError, ValueError) as error:
            raise HelperError("silent", f"the device helper did not answer {verb}: {error!r}") from None
        finally:
            writer.close()
        return _result(line, verb, kind)

    async def watch(self) -> AsyncIterator[helper.Event | None]:
        """Yield None once the helper has accepted, then events as they happen, until the connection ends.

        Raises:
            HelperError: no connection, it broke, or the helper refused.
        """
        reader, writer = await self._connect()
        try:
            writer.write(helper.encode({"verb": "watch", "epoch": self._epoch()}))
            await writer.drain()
            while line := await reader.readline():
                said = msgspec.json.decode(line)
                if isinstance(said, dict) and said.get("kind") in tuple(helper.EventKind):
                    yield msgspec.convert(said, helper.Event)
                elif isinstance(said, dict) and "ok" in said:
                    _result(line, "watch", dict)
                    yield None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise HelperError("silent", f"the device helper's events ended: {error!r}") from None
        finally:
            writer.close()


def _result(line: bytes, verb: str, kind: type[T]) -> T:
    if not line:
        raise HelperError("silent", f"the device helper closed the connection during {verb}")
    try:
        said = msgspec.json.decode(line)
        if said["ok"]:
            return msgspec.convert(said.get("result"), kind)
        error = said["error"]
        word, text, call, code = error["kind"], error["message"], error.get("call"), error.get("code")
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise HelperError(
            "garbled", f"the device helper's answer to {verb} is not understood: {error}"
        ) from None
    if call:
        raise DeviceError(str(call), int(code or 0), str(text))
    raise HelperError(str(word), str(text))


class LocalDevices(Devices):
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

    async def prepare(self, holder: Holder) -> Prepared:
        """As `Devices.prepare`.

        Raises:
            HelperError: it refused, does not answer, or the preload library is missing on this machine.
        """
        request = helper.SetLimit(
            lease=holder.handle,
            uid=holder.uid,
            limits=dict(holder.limits),
            guaranteed=dict(holder.guaranteed),
            suspended=holder.asleep,
            unattended=holder.unattended,
        )
        if why := library_fault():
            raise HelperError("library", why)
        files = await self._helper.ask("set_limit", request, helper.LeaseFiles)
        return Prepared(env=holder_environment(holder.handle, files.directory, holder.limits))

    async def suspend(self, handle: str, calls: str) -> helper.MoveResult:
        return await self._helper.ask(
            "suspend", helper.Suspend(lease=handle, calls=calls), helper.MoveResult, timeout_s=_MOVE_S
        )

    async def resume(self, handle: str) -> helper.MoveResult:
        return await self._helper.ask(
            "resume", helper.Resume(lease=handle), helper.MoveResult, timeout_s=_MOVE_S
        )

    async def signal(self, handle: str, number: int, to: str) -> int:
        request = helper.Signal(lease=handle, number=number, to=to)
        try:
            return (await self._helper.ask("signal", request, helper.Signalled)).count
        except HelperError as error:
            if error.kind != helper.ErrorKind.UNKNOWN_LEASE:
                raise
            return 0

    async def drop(self, handle: str) -> None:
        await self._helper.ask("drop", helper.Drop(lease=handle, end_processes=True), Any)

    async def close(self) -> None:
        """Nothing stays open: each request has a connection of its own."""


def library_fault() -> str:
    """Return why no lease can start on this machine for want of the preload library; empty: it is there."""
    try:
        preload_path()
    except GpuShareError as error:
        return f"The preload library is missing, so no server with a GPU can start: {error}."
    return ""


def holder_environment(handle: str, directory: str, limits: Mapping[str, int]) -> dict[str, str]:
    """Return the environment variables that make a process part of a lease.

    The last two are hints for frameworks that otherwise allocate all device memory at start
    (documented by TensorFlow and JAX); the limit does not depend on them.
    """
    return {
        "GPUSHARE_LEASE": handle,
        "GPUSHARE_LEASE_DIR": directory,
        "GPUSHARE_MEMORY_LIMIT": str(sum(limits.values())),
        "CUDA_VISIBLE_DEVICES": ",".join(limits),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "LD_PRELOAD": str(preload_path()),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
