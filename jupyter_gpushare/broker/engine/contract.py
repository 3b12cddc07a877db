"""The seam between the broker and a scheduler: `Engine` decides, the broker carries out.

`local.LocalEngine` decides with the planner of `core`.  An engine that
follows a cluster's own scheduler is one more implementation of `Engine` and
`outlook.Outlook`: nothing else in the broker imports a planner.

Every question takes the snapshot that it is about (`core.model.Cluster`).  Only
`Engine.run`, `Engine.settle` and `Engine.admit` may wait.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from jupyter_gpushare.broker.engine.outlook import Explanation, Outlook
from jupyter_gpushare.core.model import Cluster, Grant, Kind, Lease, Plan, Project, Suspend
from jupyter_gpushare.core.resize import NewSize, NotResized
from jupyter_gpushare.core.size import Size

__all__ = ["Engine", "NewSize", "NotResized", "StartPhase", "StartProgress"]


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
