"""Contracts between the broker and what carries its decisions out: `DeviceBackend` and `Hub`.

Every method may be called again with the same arguments after a crash of
either side: a repeated call has the effect of one call.  A ``handle`` names one
attempt of one lease (`LeaseRecord.handle`).

Errors: `HelperError` when a device helper refuses or does not answer,
`DeviceError` when the driver refuses, `HubError` when the Hub does either; the
caller tries again later unless the error says otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol.helper import Event, Inventory, MoveResult, Sample, SetLimit
from jupyter_gpushare.protocol.wire import HostMount


class HubError(GpuShareError):
    """The Hub refused, or does not answer.

    ``unknown_user``: the Hub has no user of this name.
    ``not_now``: the Hub started nothing, for a reason that is not this server's
    fault: a limit of the Hub, or a token that the Hub does not accept.
    ``remedy``: the Hub refuses the broker itself, and this is what the administrator has to set.
    """

    def __init__(
        self, message: str, *, unknown_user: bool = False, not_now: bool = False, remedy: str = ""
    ) -> None:
        super().__init__(message)
        self.unknown_user = unknown_user
        self.not_now = not_now
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class ServerKey:
    """Name of one server of one user."""

    user: str
    server: str  # "" is the default server


@dataclass(frozen=True, slots=True)
class HubServer:
    """A server as the Hub has it now; times are ISO 8601 in UTC, empty: the Hub does not say."""

    last_activity: str = ""
    started: str = ""
    stops: bool = False


@dataclass(frozen=True, slots=True)
class HubUser:
    """A user as the Hub has it now."""

    name: str
    created: str  # when the Hub made it (`wall_clock.exact`); empty: the Hub does not say
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the spawner gives the holder's processes."""

    env: Mapping[str, str]
    node: str = ""  # of a cluster: where the processes must run
    mounts: tuple[HostMount, ...] = ()  # of a cluster: paths of that node that its processes need


class DeviceBackend(abc.ABC):
    """GPUs with a device helper: measures them and moves leases on them."""

    @abc.abstractmethod
    async def epoch(self) -> int:
        """Return the highest broker epoch that a helper has seen; helpers refuse lower ones.

        Raises:
            HelperError: no answer.
        """

    @abc.abstractmethod
    async def inventory(self) -> Inventory:
        """Return all devices with their memory in bytes.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def sample(self) -> Sample:
        """Return the latest measurement, from memory within milliseconds.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    async def latest(self) -> Sample:
        """Return a measurement with all that `watch` has told and that this broker has changed.

        The rest may be older than in `sample`, where a new one of everything takes more than one question.

        Raises:
            HelperError: as `sample`.
        """
        return await self.sample()

    @abc.abstractmethod
    def watch(self) -> AsyncIterator[Event | None]:
        """Yield None once connected, then events until the connection ends.

        Raises:
            HelperError: no connection, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def prepare(self, request: SetLimit) -> Prepared:
        """Set the limits of a lease and return the environment of its processes.

        Raises:
            HelperError: refused, or no answer.
            DeviceError: the driver refused.
        """

    async def reserve(self, handle: str) -> Mapping[str, str]:
        """Return the environment of a server without a GPU that may get the lease ``handle`` while it runs.

        Empty: here it has to start anew for that.

        Raises:
            HelperError: refused, or no answer.
        """
        return {}

    @abc.abstractmethod
    async def suspend(self, handle: str, calls: str) -> MoveResult:
        """Move the device memory of a lease to host memory.

        ``calls`` is that of the sample that showed the lease idle: a CUDA call since then refuses
        the suspension.  Empty: suspend in any case.  A suspended lease answers ``done``.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def resume(
        self, handle: str, *, unrecorded: bool = False, devices: Sequence[str] = ()
    ) -> MoveResult:
        """Move the memory of a lease back, only when the driver shows enough free memory.

        ``devices`` are UUIDs to resume on, in the order of its own; empty: on its own.  What is on them
        already is not moved.  The answer says on which it is, also where it was refused.

        ``unrecorded``: the database does not say so and takes nothing now.  Then only into a part of the
        devices that no living lease has; the sample shows it as ``unconfirmed`` until a `resume` that is
        recorded.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def signal(self, handle: str, number: int, to: str) -> int:
        """Signal the ``leader`` of a lease, ``all``, ``others`` or ``keepers``; return how many processes.

        ``others`` are all but the runner of a job, ``keepers`` those that keep the memory of dead ones.
        An unknown lease has none.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def end_process(self, device: str, process: str) -> None:
        """End a process without a lease that the sample shows on a device (UUID): SIGTERM, then SIGKILL.

        Raises:
            HelperError: there is none with this name, it is left alone by the rules of the watchdog, no
                answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def drop(self, handle: str) -> None:
        """Delete a lease that has no process left; unknown leases are ignored.

        A process that has begun since is killed, and a runner that begins later starts nothing.

        Raises:
            HelperError: no answer, or a newer broker is at work.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""


class Hub(abc.ABC):
    """JupyterHub: its servers, users and groups.  The same for every engine."""

    @abc.abstractmethod
    async def start_server(self, key: ServerKey, shown: str, ticket: str) -> None:
        """Ask the Hub to start a job's server; returns when the Hub has accepted the request.

        ``shown`` is what its pages call the server, where the Hub has such names.  The Hub's
        spawner shows the broker the ``ticket`` when it carries out the start.
        A server that already starts or runs is accepted.

        Raises:
            HubError: refused (``unknown_user``, ``not_now``), or no answer.
        """

    @abc.abstractmethod
    async def stop_server(self, key: ServerKey, *, forget: bool = True) -> None:
        """Ask the Hub to stop a server, and with ``forget`` to delete it; unknown servers are ignored.

        Only named servers can be deleted.

        Raises:
            HubError: refused, for example while the server starts; or no answer.
        """

    @abc.abstractmethod
    async def servers(self) -> Mapping[ServerKey, HubServer]:
        """Return all servers that start, run or stop.

        Raises:
            HubError: the list is incomplete, or no answer.
        """

    @abc.abstractmethod
    async def services(self) -> Mapping[str, Sequence[str]]:
        """Return the commands of the services that the Hub runs, by name.

        Raises:
            HubError: refused, or no answer.
        """

    @abc.abstractmethod
    async def has_server(self, key: ServerKey) -> bool:
        """Return whether a server starts, runs or stops; exact, unlike a paged list that changes.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def user(self, name: str) -> HubUser | None:
        """Return a user; None: the Hub has none of this name.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def users(self) -> list[HubUser]:
        """Return all users; one may be missing when others were deleted meanwhile.

        Raises:
            HubError: the list is incomplete, or no answer.
        """

    @abc.abstractmethod
    async def server_url(self, key: ServerKey) -> str:
        """Return the URL of a server with a slash at its end; empty when it does not run.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""
