"""One machine: devices through its device helper, servers through the Hub.

The helper's protocol is `gpu.verbs`: one line of JSON each way over a unix
socket, one connection per request (a slow suspension must not delay a sample).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jupyter_gpushare.backends.base import Backend, ServerKey
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.gpu import verbs
from jupyter_gpushare.native import preload_path

T = TypeVar("T")

# Answers from the helper's memory; longer means that it hangs.
_QUICK_S = 5.0
# The helper gives up by itself before; copies of large states take long.
_MOVE_S = 600.0


class HelperClient:
    """Speaks with the device helper, as the epoch that the broker has now."""

    def __init__(self, socket: Path, epoch: Callable[[], int]) -> None:
        self._socket = str(socket)
        self._epoch = epoch

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self._socket, limit=verbs.MAX_LINE_BYTES)
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
        if verb != "hello":  # which fences nobody, and is answered to everybody
            plain["epoch"] = self._epoch()
        reader, writer = await self._connect()
        try:
            writer.write(verbs.encode({"verb": verb, **plain}))
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                line = await reader.readline()
        except (OSError, TimeoutError, ValueError) as error:
            raise HelperError("silent", f"the device helper did not answer {verb}: {error!r}") from None
        finally:
            writer.close()
        return _result(line, verb, kind)

    async def watch(self) -> AsyncIterator[verbs.Event]:
        """Yield events as they happen, until the connection ends."""
        reader, writer = await self._connect()
        try:
            writer.write(verbs.encode({"verb": "watch", "epoch": self._epoch()}))
            await writer.drain()
            while line := await reader.readline():
                said = msgspec.json.decode(line)
                if isinstance(said, dict) and said.get("kind") in tuple(verbs.EventKind):
                    yield msgspec.convert(said, verbs.Event)
                elif isinstance(said, dict) and said.get("ok") is False:
                    _result(line, "watch", dict)
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


class LocalBackend(Backend):
    """The machine that broker, Hub and helper share."""

    def __init__(self, helper: HelperClient, hub: HubClient) -> None:
        self._helper = helper
        self._hub = hub

    async def epoch(self) -> int:
        return (await self._helper.ask("hello", None, verbs.Hello)).epoch

    async def inventory(self) -> verbs.Inventory:
        return await self._helper.ask("inventory", None, verbs.Inventory)

    async def sample(self) -> verbs.Sample:
        return await self._helper.ask("sample", None, verbs.Sample)

    def watch(self) -> AsyncIterator[verbs.Event]:
        return self._helper.watch()

    async def prepare(
        self, handle: str, uid: int, limits: Mapping[str, int], guaranteed: Mapping[str, int], *, asleep: bool
    ) -> dict[str, str]:
        request = verbs.SetLimit(
            lease=handle, uid=uid, limits=dict(limits), guaranteed=dict(guaranteed), suspended=asleep
        )
        files = await self._helper.ask("set_limit", request, verbs.LeaseFiles)
        return holder_environment(handle, files.directory, limits)

    async def suspend(self, handle: str, calls: str) -> verbs.Moved:
        return await self._helper.ask(
            "suspend", verbs.Suspend(lease=handle, calls=calls), verbs.Moved, timeout_s=_MOVE_S
        )

    async def resume(self, handle: str) -> verbs.Moved:
        return await self._helper.ask("resume", verbs.Resume(lease=handle), verbs.Moved, timeout_s=_MOVE_S)

    async def signal(self, handle: str, number: int, to: str) -> None:
        try:
            await self._helper.ask("signal", verbs.Signal(lease=handle, number=number, to=to), Any)
        except HelperError as error:
            if error.kind != verbs.ErrorKind.UNKNOWN_LEASE:
                raise

    async def drop(self, handle: str) -> None:
        await self._helper.ask("drop", verbs.Drop(lease=handle), Any)

    async def start_server(self, key: ServerKey) -> None:
        await self._hub.start_server(key)

    async def stop_server(self, key: ServerKey) -> None:
        await self._hub.stop_server(key)

    async def servers(self) -> frozenset[ServerKey]:
        return await self._hub.servers()

    async def has_server(self, key: ServerKey) -> bool:
        return await self._hub.has_server(key)

    async def groups(self, user: str) -> tuple[str, ...]:
        return await self._hub.groups(user)

    async def server_url(self, key: ServerKey) -> str:
        return await self._hub.server_url(key)

    async def close(self) -> None:
        await self._hub.close()


def holder_environment(handle: str, directory: str, limits: Mapping[str, int]) -> dict[str, str]:
    """Return the environment that makes a process a holder of a lease.

    Framework hints are no guarantee, but they make frameworks that would take
    all memory at start behave; sources: the frameworks' own documentation.
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
