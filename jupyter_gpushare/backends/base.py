"""Contracts of the backends that carry out the broker's decisions: `DeviceBackend` and `Hub`.

After a crash of either side the broker may repeat any call with the same arguments;
a repeated call has the effect of one call.  A ``handle`` names one attempt of one
lease (`LeaseRecord.handle`).

Errors: `HelperError` if a device helper refuses or does not answer, `DeviceError` if
the driver refuses, `HubError` if the Hub refuses or does not answer.  The caller
tries again later unless the error says otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol.helper import Event, Inventory, MoveResult, Sample, SetLimit
from jupyter_gpushare.protocol.wire import HostMount


class HubError(GpuShareError):
    """The Hub refused or does not answer.

    ``unknown_user``: the Hub has no user of this name.
    ``not_now``: the Hub started nothing for a reason outside this server, such as a
    limit of the Hub or a token that it does not accept.
    ``remedy``: what the administrator must set, because the Hub refuses the broker itself.
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
    """The name of one user's server."""

    user: str
    server: str  # "": the default server


@dataclass(frozen=True, slots=True)
class HubServer:
    """A server's state at the Hub; times are ISO 8601 in UTC, empty if the Hub does not report them."""

    last_activity: str = ""
    started: str = ""
    stops: bool = False


@dataclass(frozen=True, slots=True)
class HubUser:
    """A user's state at the Hub."""

    name: str
    created: str  # when the Hub created the user (`wall_clock.exact`); empty: unknown
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Settings that the spawner gives to the processes of a lease."""

    env: Mapping[str, str]
    node: str = ""  # on a cluster: the node where the processes must run
    mounts: tuple[HostMount, ...] = ()  # on a cluster: paths of that node that the processes need


class DeviceBackend(abc.ABC):
    """GPUs with a device helper, which measures them and moves leases on them."""

    @abc.abstractmethod
    async def epoch(self) -> int:
        """Return the highest broker epoch that a helper has seen; helpers refuse lower epochs.

        Raises:
            HelperError: no answer.
        """

    @abc.abstractmethod
    async def inventory(self) -> Inventory:
        """Return all devices with their memory in bytes.

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    @abc.abstractmethod
    async def sample(self) -> Sample:
        """Return the latest measurement from the helper's memory, within milliseconds.

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    async def latest(self) -> Sample:
        """Return a measurement that includes all events of `watch` and all changes by this broker.

        Other values may be older than in `sample` if a new measurement needs several requests.

        Raises:
            HelperError: as for `sample`.
        """
        return await self.sample()

    @abc.abstractmethod
    def watch(self) -> AsyncIterator[Event | None]:
        """Yield None when connected, then events until the connection ends.

        Raises:
            HelperError: no connection, or a newer broker is active.
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

        It is empty if a server of this backend must restart to get a GPU.

        Raises:
            HelperError: refused, or no answer.
        """
        return {}

    @abc.abstractmethod
    async def suspend(self, handle: str, calls: str) -> MoveResult:
        """Move the device memory of a lease to host memory.

        ``calls`` comes from the sample that showed the lease idle; a CUDA call since then refuses the
        suspension.  If it is empty, suspend in any case.  A suspended lease answers ``done``.

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    @abc.abstractmethod
    async def resume(
        self, handle: str, *, unrecorded: bool = False, devices: Sequence[str] = ()
    ) -> MoveResult:
        """Move the memory of a lease back, if the driver shows enough free memory.

        ``devices`` are the UUIDs to resume on, in the order of the lease's own, which are the default.
        Memory that is already on them is not moved.  The answer names the devices of the lease, even if
        the resume was refused.

        ``unrecorded``: the broker cannot store this resume now.  It then uses only a part of the devices
        that no living lease has; samples show the lease as ``unconfirmed`` until a recorded `resume`.

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    @abc.abstractmethod
    async def signal(self, handle: str, number: int, to: str) -> int:
        """Signal processes of a lease; return their number, which is 0 for an unknown lease.

        ``to`` is ``leader``, ``all``, ``others`` (all but the runner of a job) or ``keepers`` (processes
        that keep the memory of dead ones).

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    @abc.abstractmethod
    async def end_process(self, device: str, process: str) -> None:
        """End a process without a lease that the sample shows on a device (UUID): SIGTERM, then SIGKILL.

        Raises:
            HelperError: there is no such process, the rules of the watchdog protect it, no answer, or a
                newer broker is active.
        """

    @abc.abstractmethod
    async def drop(self, handle: str) -> None:
        """Delete a lease whose processes have ended; ignore unknown leases.

        A process that started since is killed, and a runner that starts later runs nothing.

        Raises:
            HelperError: no answer, or a newer broker is active.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""


class Hub(abc.ABC):
    """JupyterHub: its servers, users and groups; the same for every engine."""

    @abc.abstractmethod
    async def start_server(self, key: ServerKey, shown: str, ticket: str) -> None:
        """Ask the Hub to start a job's server; return when the Hub has accepted the request.

        ``shown`` is the server's display name, if the Hub has such names.  The Hub's spawner sends the
        ``ticket`` to the broker when it carries out the start.  A server that already starts or runs is
        accepted.

        Raises:
            HubError: refused (``unknown_user``, ``not_now``), or no answer.
        """

    @abc.abstractmethod
    async def stop_server(self, key: ServerKey, *, forget: bool = True) -> None:
        """Ask the Hub to stop a server, and with ``forget`` to delete it; ignore unknown servers.

        Only named servers can be deleted.

        Raises:
            HubError: refused, for example while the server starts, or no answer.
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
        """Return whether a server starts, runs or stops; exact, unlike a paged list that may change.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def user(self, name: str) -> HubUser | None:
        """Return a user, or None if the Hub has no user of this name.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def users(self) -> list[HubUser]:
        """Return all users; some may be missing if users are deleted during the call.

        Raises:
            HubError: the list is incomplete, or no answer.
        """

    @abc.abstractmethod
    async def server_url(self, key: ServerKey) -> str:
        """Return the URL of a server with a trailing slash; empty if it does not run.

        Raises:
            HubError: no answer.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""
