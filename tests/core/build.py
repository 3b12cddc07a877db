"""One line per lease: short builders for the tests of `core`."""

from __future__ import annotations

from typing import Any

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.explain import smaller
from jupyter_gpushare.core.model import (
    Action,
    CheckpointMode,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    LeaseEvent,
    Project,
    Resume,
    Settings,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.planning.planner import dry_run, plan
from jupyter_gpushare.core.quota import QuotaState
from jupyter_gpushare.core.size import Size

NOW = 10_000.0
GIB = 1 << 30
ON = State.RUNNING
ASLEEP = State.SUSPENDED


def device(number: int, **more: Any) -> Device:
    return Device(**{"uuid": f"gpu{number}", "memory_bytes": 80 * GIB, "node": "n0"} | more)


def project(name: str, gpus: float, **more: Any) -> Project:
    return Project(name=name, quota_milli=int(gpus * 1000), **more)


def _lease(kind: Kind, id: str, milli: int, on: str, **more: Any) -> Lease:
    """Return a lease; ``on`` has its devices, such as "0" or "0 1", or "" if it waits."""
    devices = tuple(f"gpu{n}" for n in on.split())
    state = more.pop("state", State.RUNNING if devices else State.PENDING)
    count = more.pop("device_count", len(devices) or 1)
    size = Size(milli, count, more.pop("memory_bytes", 0), more.pop("profile", ""))
    given = {"id": id, "project": "p", "kind": kind, "state": state, "size": size}
    if devices:
        given |= {"devices": devices, "held_milli": milli}
    return Lease(**given | more)


def build(id: str, milli: int, on: str = "", *, idle_s: float | None = None, **more: Any) -> Lease:
    idle = {} if idle_s is None else {"idle_since_at": NOW - idle_s}
    return _lease(Kind.BUILD, id, milli, on, **idle | more)


def train(id: str, milli: int, on: str = "", **more: Any) -> Lease:
    return _lease(Kind.TRAIN, id, milli, on, **more)


def cluster(
    *leases: Lease,
    gpus: int | list[Device] = 1,
    projects: list[Project] | None = None,
    **settings: Any,
) -> Cluster:
    devices = [device(n) for n in range(gpus)] if isinstance(gpus, int) else gpus
    return Cluster(
        devices=tuple(devices),
        projects=tuple(projects if projects is not None else [project("p", len(devices))]),
        leases=leases,
        settings=Settings(**{"idle_timeout_s": 600.0} | settings),
    )


def actions(c: Cluster, now: float = NOW) -> list[object]:
    return list(plan(c, now).actions)


def grant(lease: str, *on: int, milli: int = 1000, why: Why = Why.FREE_CAPACITY, **more: bool) -> Grant:
    return Grant(lease, tuple(f"gpu{n}" for n in on), milli, why, **more)


def begun(action: Action, now: float) -> tuple[LeaseEvent, dict[str, Any]]:
    """Return the event with which an action begins, and the fields that it changes besides the state."""
    match action:
        case Grant(why=Why.CAPACITY_BACK):
            return LeaseEvent.KEEP, {"host": "", "saved_bytes": 0, "made_way_for": ""}
        case Grant():
            event = LeaseEvent.GRANT_ASLEEP if action.asleep else LeaseEvent.GRANT
            held = {"devices": action.devices, "held_milli": action.held_milli, "borrowed": action.borrowed}
            guest = {"host": action.host, "saved_bytes": action.guest_bytes} if action.host else {}
            return event, held | guest | {"granted_at": now, "made_way_for": ""}
        case Resume():
            guest = {"host": action.host, "saved_bytes": action.guest_bytes} if action.host else {}
            moved = {"devices": action.devices} if action.devices else {}
            return LeaseEvent.RESUME, guest | moved | {"granted_at": now, "made_way_for": ""}
        case Suspend():
            return LeaseEvent.SUSPEND, {"made_way_for": action.for_lease}
        case _:
            return LeaseEvent.STOP, {"made_way_for": action.for_lease}


def stops(id: str, on: str = "", **more: Any) -> Lease:
    """Return a job that is stopped for preemption and starts again on any free capacity."""
    return train(id, 1000, on, survival=CheckpointMode.SIGTERM, **more)


def started(c: Cluster) -> list[str]:
    return [a.lease for a in plan(c, NOW).actions if isinstance(a, Grant)]


def why(c: Cluster, id: str = "x", now: float = NOW) -> Why:
    """Return why a lease waits, or the reason of the decision for it."""
    done = dry_run(c, now).run()
    decided = next((a.why for a in done.actions if a.lease == id), Why.NOT_WAITING)
    return done.waiting.get(id, decided)


def smaller_than(c: Cluster, id: str) -> Size | None:
    return smaller(dry_run(c, NOW).run(), next(x for x in c.leases if x.id == id))


def quotas(c: Cluster) -> QuotaState:
    return ClusterState.of(c).quotas


__all__ = [
    "ASLEEP",
    "GIB",
    "NOW",
    "ON",
    "CheckpointMode",
    "actions",
    "begun",
    "build",
    "cluster",
    "device",
    "grant",
    "project",
    "quotas",
    "smaller_than",
    "started",
    "stops",
    "train",
    "why",
]
