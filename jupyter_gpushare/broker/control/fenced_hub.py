"""Fencing of changes at the Hub, which knows no epochs: the device helper is asked before each change.

Refusals that concern the broker itself, not one server, are noted for the administrator (`Faults`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from jupyter_gpushare.backends.base import DeviceBackend, Hub, HubError, HubServer, HubUser, ServerKey
from jupyter_gpushare.broker.state.observations import Faults
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol.helper import ErrorKind

# ---- tickets of starts: the epoch that the start of a job's server carries through the Hub
# The broker gives the Hub a ticket with the request to start a server.  The Hub's spawner returns the ticket
# when it carries out the start, which may be much later.  The Hub keeps it among the options of the server,
# which the server's user can read and replace.  So a ticket is "EPOCH.MAC", with a MAC over epoch, user and
# server; its key is the spawner's token, which no user has.

_LABEL = "gpushare start of a job's server"


class StartTickets:
    """Issues tickets in the epoch of this broker, and reads those of all brokers of the site."""

    def __init__(self, epoch: Callable[[], int], tokens: Sequence[str]) -> None:
        """Sign with the first of the spawner's ``tokens``; accept tickets signed with any of them."""
        self._epoch = epoch
        self.tokens = tuple(tokens)

    def issue(self, key: ServerKey) -> str:
        """Return a ticket for a start that this broker requests now."""
        epoch = self._epoch()
        return f"{epoch}.{_mac(self.tokens[0], epoch, key)}"

    def epoch_of(self, key: ServerKey, ticket: str) -> int | None:
        """Return the epoch of the broker that requested this start; None if no broker of this site did."""
        number, _, mac = ticket.partition(".")
        if not (number.isascii() and number.isdecimal() and len(number) < 16 and mac.isascii()):
            return None
        epoch = int(number)
        is_known = any(hmac.compare_digest(mac, _mac(token, epoch, key)) for token in self.tokens)
        return epoch if is_known else None


def _mac(token: str, epoch: int, key: ServerKey) -> str:
    text = "\0".join((_LABEL, str(epoch), key.user, key.server))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


# ---- the Hub, fenced ---------------------------------------------------------

T = TypeVar("T")

# A fault that does not recur is forgotten after this time; a change that is still needed recurs in a minute.
_FORGET_S = 600.0


class FencedHub(Hub):
    """A Hub that changes servers only while no broker with a higher epoch has acted on the devices.

    Each change costs one more request to the device helper, which answers from memory.
    """

    def __init__(self, hub: Hub, devices: DeviceBackend, epoch: Callable[[], int], faults: Faults) -> None:
        self._hub = hub
        self._devices = devices
        self._epoch = epoch
        self._faults = faults

    async def fence(self) -> None:
        """Raise if a broker with a higher epoch has acted on the devices.

        Raises:
            HelperError: there is such a broker (``stale_epoch``), or the device helper does not answer.
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
                sentence = f"The Hub refuses the broker: {str(error).rstrip('.')}. Remedy: {error.remedy}."
                self._faults.found(source, sentence, forget_s=_FORGET_S)
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

    async def servers(self) -> Mapping[ServerKey, HubServer]:
        return await self._noted("hub-read", self._hub.servers())

    async def services(self) -> Mapping[str, Sequence[str]]:
        return await self._hub.services()  # a refusal is no fault: sentences then lack the times of cullers

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
