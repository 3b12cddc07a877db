"""The seam between the broker and a scheduler: an `Engine` decides, and the broker carries out.

`local.LocalEngine` decides with the planner of `core`.  An engine for a cluster with its own scheduler is
another implementation of `Engine` and `outlook.Outlook`.  Nothing else in the broker imports a planner.

Every question takes a snapshot (`core.model.Cluster`), to which its answer applies.  Only `Engine.run`,
`Engine.settle` and `Engine.admit` may wait.
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
    """The phase of a start in `Engine.admit`."""

    PLACING = "placing"  # the scheduler has not decided
    FREEING = "freeing"  # other work on its GPUs must end first
    RESERVING = "reserving"  # its node is chosen; the scheduler reserves a GPU there
    CONNECTING = "connecting"  # it is placed; its node prepares


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The phase of a start, and the maximum seconds until the phase ends."""

    phase: StartPhase
    within_s: float | None = None  # None if unknown


class Engine(abc.ABC):
    """Decides which lease holds which devices, and says why.

    ``drains``: `decide` and `admit` place nothing new on devices that are being emptied.
    ``queues_sessions``: `decide` grants pending sessions; otherwise only `admit` does.
    ``resizes``: `resize` may change the size of a running session.
    ``start_s``: the maximum seconds that `admit` takes, from the engine's settings.
    """

    start_s: float = 0.0

    drains: ClassVar[bool]
    queues_sessions: ClassVar[bool]
    resizes: ClassVar[bool] = False

    async def run(self) -> None:
        """Follow the scheduler until cancelled; return at once if the engine needs only snapshots."""
        return

    @abc.abstractmethod
    def decide(self, cluster: Cluster, now: float) -> Plan:
        """Return the actions that are due at ``now`` (seconds, monotonic), most important first.

        Actions use only capacity that is free at ``now``.  A later call decides an action again that was
        not carried out.
        """

    async def settle(self, cluster: Cluster, now: float) -> None:
        """Pass the needs of all leases to the scheduler after a round; a repeated call changes nothing."""
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
        """Return the grant of a session that starts now and is not in ``cluster`` yet, or why it is refused.

        The session gets no device on ``not_nodes``.  A refusal comes after at most ``within_s`` seconds.  A
        refused or cancelled session leaves nothing behind, except capacity that the scheduler already frees
        for it: the next start of the same size in its project gets that.
        """

    def resizable(self, lease: Lease) -> bool:
        """Return whether `resize` may change this kind of lease."""
        is_part = lease.size.device_count == 1 and not lease.size.profile
        return self.resizes and lease.kind is Kind.BUILD and is_part

    def resize(self, cluster: Cluster, lease: Lease, size: Size, now: float) -> NewSize | NotResized:
        """Return what a running, `resizable` session would hold of its device with ``size``."""
        raise NotImplementedError

    def start_progress(self, lease_id: str) -> StartProgress | None:
        """Return the progress of `admit` with a session; None if `admit` is not at work on it."""
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
        """Return the suspensions that `decide` would begin with this snapshot, made as if lending were on."""
        return tuple(x for x in self.outlook(cluster, now).actions if isinstance(x, Suspend))

    @abc.abstractmethod
    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        """Return the quotas, weights and limits that are in force."""

    @abc.abstractmethod
    def set_project(self, project: Project) -> None:
        """Accept new numbers for a project, before the broker stores them.

        Raises:
            Conflict: the broker may not change the numbers; the text says where they are set.
        """

    def trouble(self) -> tuple[str, ...]:
        """Return sentences for ``GET health``; empty while the scheduler works."""
        return ()
