"""Fencing of the Hub, which knows no epochs: the device helper is asked before each change."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_gpushare.backends.base import Devices, Hub, ServerKey
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol.helper import ErrorKind


class FencedHub(Hub):
    """A Hub that changes servers only while no broker with a higher epoch has acted on the devices.

    A change adds one request to the device helper, which answers from memory.
    """

    def __init__(self, hub: Hub, devices: Devices, epoch: Callable[[], int]) -> None:
        self._hub = hub
        self._devices = devices
        self._epoch = epoch

    async def _fence(self) -> None:
        newest = await self._devices.epoch()
        if newest > self._epoch():
            raise HelperError(ErrorKind.STALE_EPOCH, f"a newer broker is at work (epoch {newest})")

    async def start_server(self, key: ServerKey) -> None:
        """Ask the Hub to start a job's server.

        Raises:
            HubError: the Hub refused, or does not answer.
            HelperError: a newer broker is at work, or the device helper does not answer.
        """
        await self._fence()
        await self._hub.start_server(key)

    async def stop_server(self, key: ServerKey) -> None:
        """Ask the Hub to stop and delete a job's server.

        Raises:
            HubError: the Hub refused, or does not answer.
            HelperError: a newer broker is at work, or the device helper does not answer.
        """
        await self._fence()
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
