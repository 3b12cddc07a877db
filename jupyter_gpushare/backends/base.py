"""The contract between the broker's loop and whatever carries decisions out.

Every method may be called again with the same arguments after a crash of
either side: doing a thing twice is the same as doing it once.  A ``handle``
names one attempt of one lease (`LeaseRecord.handle`).

Errors: `HelperError` where the machine's device helper refuses or is silent,
`HubError` where the Hub does; both mean "try again later" unless they say
otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.gpu.verbs import Event, Inventory, Moved, Sample


class HubError(GpuShareError):
    """The Hub refused, or does not answer.

    ``permanent``: asking again for this server will not help; the text says why.
    ``not_now``: it answered that nothing was begun, and that is no fault of this
    server: the Hub is at a limit, or does not accept the broker.
    """

    def __init__(self, message: str, *, permanent: bool = False, not_now: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.not_now = not_now


@dataclass(frozen=True, slots=True)
class ServerKey:
    user: str
    server: str  # "" is the default server


class Backend(abc.ABC):
    """One place where leases live: a machine, later a cluster."""

    # ---- devices: called by the loop -----------------------------------------

    @abc.abstractmethod
    async def epoch(self) -> int:
        """Return the highest epoch of a broker that the machine has seen; what is lower can do nothing."""

    @abc.abstractmethod
    async def inventory(self) -> Inventory:
        """Return the devices; called at start and after a device event."""

    @abc.abstractmethod
    async def sample(self) -> Sample:
        """Return the latest measurement; called about once a second, never slow."""

    @abc.abstractmethod
    def watch(self) -> AsyncIterator[Event]:
        """Yield events until the connection is lost; the loop opens it again."""

    # ---- leases: called by the loop and when a server starts ------------------

    @abc.abstractmethod
    async def prepare(
        self, handle: str, uid: int, limits: Mapping[str, int], guaranteed: Mapping[str, int], *, asleep: bool
    ) -> dict[str, str]:
        """Set the limits of a lease and return its holder's environment.

        ``limits``: what it was granted; ``guaranteed``: how much of that stays its own
        when others need room.  Both are bytes per device UUID.
        """

    @abc.abstractmethod
    async def suspend(self, handle: str, calls: str) -> Moved:
        """Park its device memory; ``calls`` is the sample's, empty to force."""

    @abc.abstractmethod
    async def resume(self, handle: str) -> Moved:
        """Bring its device memory back, only into room the driver shows free."""

    @abc.abstractmethod
    async def signal(self, handle: str, number: int, to: str) -> None:
        """Send a signal to its ``leader`` or to ``all`` its processes; unknown leases are fine."""

    @abc.abstractmethod
    async def drop(self, handle: str) -> None:
        """Forget a lease whose processes are gone."""

    # ---- servers: called by the loop ------------------------------------------

    @abc.abstractmethod
    async def start_server(self, key: ServerKey) -> None:
        """Have the Hub start a job's server; returns when the Hub took the request."""

    @abc.abstractmethod
    async def stop_server(self, key: ServerKey) -> None:
        """Have the Hub stop and forget a job's server; unknown ones are fine."""

    @abc.abstractmethod
    async def servers(self) -> frozenset[ServerKey]:
        """Return the servers that are starting, running or stopping in the Hub."""

    @abc.abstractmethod
    async def has_server(self, key: ServerKey) -> bool:
        """Return whether one of them is there; surer than the list, whose pages may miss one that moves."""

    @abc.abstractmethod
    async def groups(self, user: str) -> tuple[str, ...]:
        """Return the Hub groups of a user; empty for an unknown one."""

    @abc.abstractmethod
    async def server_url(self, key: ServerKey) -> str:
        """Return where people reach a server, with a slash at its end; empty: it does not run."""

    @abc.abstractmethod
    async def close(self) -> None: ...
