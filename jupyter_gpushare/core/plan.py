"""Decide what to do next: a snapshot in, a list of actions out.

`plan` is called by the broker with real leases and by the simulator with a
trace.  It is called again whenever something changed or failed, so it never
assumes that an earlier action took place.  It reads states, not history, and
counts room that is on its way out.

The rules are in `round`.  A `Planner` is kept between rounds and told what
changed, so that a round costs what changed and not what there is; a `Keeper`
finds out itself what changed between two snapshots; `plan` makes a planner for
a single round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.fragmentation import Task, Workload
from jupyter_gpushare.core.lines import Lines, Shape
from jupyter_gpushare.core.model import (
    Cluster,
    Device,
    Lease,
    Plan,
    Project,
    Settings,
)
from jupyter_gpushare.core.placement import Index, Layout, Spot, whole
from jupyter_gpushare.core.room import RoomOf
from jupyter_gpushare.core.round import Round


def plan(cluster: Cluster, now: float) -> Plan:
    """Return what to do now, most important first, and when to ask again.

    Actions take only what is free at ``now``.  Room that is on its way is kept
    for the lease it was asked for, and granted by a later call.
    """
    return Planner.of(cluster).plan(now)


class Planner:
    """Plans round after round for leases that it is told of; the answers are those of `plan`."""

    def __init__(self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings) -> None:
        self.board = Board(devices, projects, settings)
        self.layout = Layout(self.board.usable)
        self.lines = Lines(settings)
        tasks = ((Task(gpu_milli=milli, gpu_count=n), often) for milli, n, often in settings.workload)
        self.workload = Workload(tasks)
        self.indexes: dict[RoomOf, Index] = {}
        self.lags_gpu_s: Mapping[str, float] = {}  # by project; as of the next round (`ledger`)
        self._changed: dict[str, Lease] = {}
        self._possible: dict[Shape, bool] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> Planner:
        """Return a planner that knows everything in ``cluster``."""
        planner = cls(cluster.devices, cluster.projects, cluster.settings)
        for lease in cluster.leases:
            planner.put(lease)
        planner.lags_gpu_s = cluster.lags_gpu_s
        return planner

    def put(self, lease: Lease) -> None:
        """A lease is new, or has changed."""
        self.board.put(lease)
        self._changed[lease.id] = lease

    def drop(self, id: str) -> None:
        """A lease has ended."""
        self.board.drop(id)
        self.lines.drop(id)
        self._changed.pop(id, None)

    def plan(self, now: float) -> Plan:
        """Return what to do now; ``now`` never goes back."""
        done = self.begin(now).run()
        self.board.undo()
        return Plan(tuple(done.actions), done.next_at)

    def begin(self, now: float, *, everybody: bool = False) -> Round:
        """Return a round at ``now``; ``everybody`` who gets nothing is told why, if that is asked for."""
        self.board.settle(now)
        self.lines.put_all(self._changed.values(), now)
        self._changed.clear()
        self.lines.catch_up(now)
        self.board.begin()
        return Round(self, now, everybody=everybody)

    def find(self, lease: Lease, room_of: RoomOf, most_milli: int | None = None) -> Spot | None:
        """Return where ``lease`` fits by ``room_of``, or None."""
        index = self.indexes.get(room_of)
        if index is None:
            index = Index(self.layout, room_of, self.workload, self.board.watch())
            self.indexes[room_of] = index
        return index.find(lease, most_milli)

    def fits_ever(self, lease: Lease) -> bool:
        """Whether the usable devices would do if they were empty."""
        key = lease.fraction_milli, lease.memory_bytes, lease.profile, lease.device_count, lease.consolidate
        if key not in self._possible:
            self._possible[key] = self.find(lease, whole) is not None
        return self._possible[key]


class Keeper:
    """Plans snapshot after snapshot as `plan` does, at the cost of what changed between them."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._made_of: tuple[object, ...] = ()
        self._leases: dict[str, Lease] = {}

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what `plan` returns; ``now`` never goes back."""
        planner = self._brought_up_to(cluster)
        # A planner that an error left in the middle of a round is never asked again.
        self._planner = None
        planned = planner.plan(now)
        self._planner = planner
        return planned

    def _brought_up_to(self, cluster: Cluster) -> Planner:
        leases = {x.id: x for x in cluster.leases}
        made_of = cluster.devices, cluster.projects, cluster.settings
        planner = self._planner
        if planner is None or made_of != self._made_of:
            planner = Planner.of(cluster)
        else:
            for id in self._leases.keys() - leases.keys():
                planner.drop(id)
            for id, lease in leases.items():
                if lease != self._leases.get(id):
                    planner.put(lease)
            planner.lags_gpu_s = cluster.lags_gpu_s
        self._leases, self._made_of = leases, made_of
        return planner


def look(cluster: Cluster, now: float) -> Round:
    """Return a round of its own that has not begun, for those who ask why."""
    return Planner.of(cluster).begin(now, everybody=True)
