"""Fencing of the Hub, which knows no epochs: the device helper is asked before each change.

What the Hub refuses to the broker itself is noted for the administrator (`Faults`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from jupyter_gpushare.backends.base import Devices, Hub, HubError, HubUser, ServerKey
from jupyter_gpushare.broker.state.faults import Faults
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol.helper import ErrorKind

T = TypeVar("T")

# A refused change is tried again within a minute while something needs it.
_FORGET_S = 600.0


class FencedHub(Hub):
    """A Hub that changes servers only while no broker with a higher epoch has acted on the devices.

    A change adds one request to the device helper, which answers from memory.
    """

    def __init__(self, hub: Hub, devices: Devices, epoch: Callable[[], int], faults: Faults) -> None:
        self._hub = hub
        self._devices = devices
        self._epoch = epoch
        self._faults = faults

    async def fence(self) -> None:
        """Return if no broker with a higher epoch has acted on the devices.

        Raises:
            HelperError: one has (``stale_epoch``), or the device helper does not answer.
        """
        newest, epoch = await self._devices.epoch(), self._epoch()
        if newest > epoch:
            raise HelperError(
                ErrorKind.STALE_EPOCH, f"epoch {epoch} is stale: a newer broker is at work (epoch {newest})"
            )

    async def _noted(self, source: str, request: Awaitable[T]) -> T:
        try:
            answer = await request
        except HubError as error:
            if error.remedy:
                said = f"The Hub refuses the broker: {str(error).rstrip('.')}. Remedy: {error.remedy}."
                self._faults.found(source, said, forget_s=_FORGET_S)
            raise
        self._faults.mended(source)
        return answer

    async def start_server(self, key: ServerKey, shown: str, ticket: str) -> None:
        """Ask the Hub to start a job's server.

        Raises:
            HubError: the Hub refused, or does not answer.
            HelperError: a newer broker is at work, or the device helper does not answer.
        """
        await self.fence()
        await self._noted("hub-start", self._hub.start_server(key, shown, ticket))

    async def stop_server(self, key: ServerKey, *, forget: bool = True) -> None:
        """Ask the Hub to stop a server, and with ``forget`` to delete it.

        Raises:
            HubError: the Hub refused, or does not answer.
            HelperError: a newer broker is at work, or the device helper does not answer.
        """
        await self.fence()
        await self._noted("hub-stop", self._hub.stop_server(key, forget=forget))

    async def servers(self) -> frozenset[ServerKey]:
        return await self._noted("hub-read", self._hub.servers())

    async def has_server(self, key: ServerKey) -> bool:
        return await self._noted("hub-user", self._hub.has_server(key))

    async def user(self, name: str) -> HubUser | None:
        return await self._noted("hub-user", self._hub.user(name))

    async def users(self) -> list[HubUser]:
        return await self._noted("hub-read", self._hub.users())

    async def server_url(self, key: ServerKey) -> str:
        return await self._noted("hub-user", self._hub.server_url(key))

    async def close(self) -> None:
        await self._hub.close()
