"""The seam between the broker and a scheduler: `Engine` decides, the broker carries out.

`local.LocalEngine` decides with the planner of `core`.  An engine that
follows a cluster's own scheduler is one more implementation of `Engine` and
`Outlook`: nothing else in the broker imports a planner.

Every question takes the snapshot that it is about (`core.model.Cluster`).  Only
`Engine.run`, `Engine.settle` and `Engine.admit` may wait.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import ClassVar

from jupyter_gpushare.core import explain
from jupyter_gpushare.core.explain import Offer, Use
from jupyter_gpushare.core.model import Action, Cluster, Grant, Kind, Lease, Plan, Project, Suspend, Why
from jupyter_gpushare.core.resize import NewSize, NotResized
from jupyter_gpushare.core.size import Size

__all__ = [
    "Engine",
    "Explanation",
    "NewSize",
    "NotResized",
    "Offer",
    "Outlook",
    "StartPhase",
    "StartProgress",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease waits."""

    why: Why
    position: int | None  # among waiting jobs, 1 is next; None: not in the queue
    free_milli: int  # free capacity of all usable devices


class StartPhase(enum.StrEnum):
    """How far `Engine.admit` is with a session that starts."""

    PLACING = "placing"  # the scheduler has not decided
    FREEING = "freeing"  # what uses its GPUs ends first
    RESERVING = "reserving"  # its node is chosen; the scheduler reserves a GPU there
    CONNECTING = "connecting"  # placed; its node prepares


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a start is, and within how many seconds this phase ends."""

    phase: StartPhase
    within_s: float | None = None  # None: not known


class Outlook(abc.ABC):
    """What an engine knows about one snapshot; each value is computed at most once."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._cluster = cluster
        self._now = now

    @property
    @abc.abstractmethod
    def actions(self) -> Iterable[Action]:
        """What `Engine.decide` would begin now."""

    @property
    @abc.abstractmethod
    def why(self) -> Mapping[str, Why]:
        """Why each waiting lease waits, in the order of the queue."""

    @property
    @abc.abstractmethod
    def position(self) -> Mapping[str, int]:
        """Position of each waiting job that can start at all, 1 is next."""

    @cached_property
    def grants(self) -> Mapping[str, Grant]:
        """Grants that `Engine.decide` would make now, by lease."""
        return {action.lease: action for action in self.actions if isinstance(action, Grant)}

    @property
    @abc.abstractmethod
    def free_milli(self) -> int:
        """Free capacity of all usable devices, in thousandths of a GPU."""

    @property
    @abc.abstractmethod
    def borrowed(self) -> Mapping[str, bool]:
        """For every lease that holds capacity: whether it may be reclaimed."""

    @property
    @abc.abstractmethod
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        """For every suspended session with a claim: the leases that use its capacity."""

    @property
    @abc.abstractmethod
    def claims_milli(self) -> Mapping[str, int]:
        """Capacity that is guaranteed to sessions, by device UUID."""

    @property
    def misplaced(self) -> Mapping[str, float]:
        """Suspended leases that were given other devices than their memory returns to.

        The value is the time (monotonic) at which each asks again, past ones left out.
        """
        return {}

    @cached_property
    def usage(self) -> Mapping[str, Use]:
        """What each configured project holds, borrows, lends and waits for."""
        return {use.project: use for use in explain.uses(self._cluster)}

    @abc.abstractmethod
    def smaller(self, lease: Lease) -> Size | None:
        """Return the largest smaller size with which a waiting lease would start now; None: no size."""

    @abc.abstractmethod
    def offers(self, project: str, sizes: Iterable[Size]) -> tuple[Offer, ...]:
        """Return what a new session of ``project`` would get now, one offer per size."""

    def explain(self, lease_id: str) -> Explanation:
        """Return why a lease waits; ``Why.NOT_WAITING`` when it does not."""
        return Explanation(
            why=self.why.get(lease_id, Why.NOT_WAITING),
            position=self.position.get(lease_id),
            free_milli=self.free_milli,
        )


class Engine(abc.ABC):
    """Decides which lease holds which devices, and says why.

    ``drains``: `decide` and `admit` place nothing new on devices that are being emptied.
    ``queues_sessions``: `decide` grants pending sessions; without it only `admit` does.
    ``resizes``: `resize` may change the size of a session that runs.
    ``start_s``: seconds that `admit` may take, by the engine's settings.
    """

    start_s: float = 0.0

    drains: ClassVar[bool]
    queues_sessions: ClassVar[bool]
    resizes: ClassVar[bool] = False

    async def run(self) -> None:
        """Follow the scheduler until cancelled; returns at once when snapshots say everything."""
        return

    @abc.abstractmethod
    def decide(self, cluster: Cluster, now: float) -> Plan:
        """Return the actions that are due at ``now`` (seconds, monotonic), most important first.

        Actions use only capacity that is free at ``now``.  An action that was not
        carried out is decided again by a later call.
        """

    async def settle(self, cluster: Cluster, now: float) -> None:
        """Tell the scheduler what every lease needs, after each commit; a repeated call changes nothing."""
        return

    @abc.abstractmethod
    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        """Place a session that starts now and is not in ``cluster`` yet, on none of ``not_nodes``.

        An `Explanation` refuses it, after ``within_s`` seconds at the latest.  Refused or cancelled it
        leaves nothing behind, but what the scheduler is freeing for it: that goes to the next start of
        the same size in its project.
        """

    def resizable(self, lease: Lease) -> bool:
        """Return whether a lease is of a kind that `resize` may change."""
        is_part = lease.size.device_count == 1 and not lease.size.profile
        return self.resizes and lease.kind is Kind.BUILD and is_part

    def resize(self, cluster: Cluster, lease: Lease, size: Size, now: float) -> NewSize | NotResized:
        """Return what a `resizable` session that runs would hold of its device with ``size``."""
        raise NotImplementedError

    def start_progress(self, lease_id: str) -> StartProgress | None:
        """Return how far `admit` is with a session; None: it is not at work on it."""
        return None

    @abc.abstractmethod
    def check_request(self, cluster: Cluster, lease: Lease) -> None:
        """Refuse a size that can never run on these devices or in this project.

        Raises:
            InvalidRequest: the text names the largest size that can run.
        """

    @abc.abstractmethod
    def outlook(self, cluster: Cluster, now: float) -> Outlook:
        """Return queue positions, reasons, free capacity and usage of a snapshot."""

    def would_suspend(self, cluster: Cluster, now: float) -> tuple[Suspend, ...]:
        """Return the suspensions of a snapshot in which sessions may be suspended though none is."""
        return tuple(x for x in self.outlook(cluster, now).actions if isinstance(x, Suspend))

    @abc.abstractmethod
    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        """Return the quotas, weights and limits that are in force."""

    @abc.abstractmethod
    def set_project(self, project: Project) -> None:
        """Accept new numbers for a project, before the broker stores them.

        Raises:
            Conflict: the numbers are not the broker's to change; the text names where they are.
        """

    def trouble(self) -> tuple[str, ...]:
        """Return sentences for ``GET health``; empty when the scheduler works."""
        return ()
