"""Explain decisions: what a lease waits for, what could start now, which leases borrow.

Every answer comes from the round that decides (`scheduler.SchedulingRound`) or
from the `ClusterState` that it works on, so that it cannot differ from what
happens.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jupyter_gpushare.core import order
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.idle import eligible, eligible_at, warn_at
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    CheckpointMode,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Project,
    Settings,
    State,
    Why,
)
from jupyter_gpushare.core.planner import dry_run
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of
from jupyter_gpushare.core.scheduler import SchedulingRound
from jupyter_gpushare.core.size import Size, gigabytes
from jupyter_gpushare.errors import InvalidRequest, NotFound

__all__ = [
    "Explanation",
    "Offer",
    "Size",
    "Starts",
    "Use",
    "borrowed",
    "check_request",
    "claims",
    "eligible",
    "eligible_at",
    "explain",
    "lent",
    "offers",
    "uses",
    "warn_at",
]

# Fractions that `smaller` tries.
_FRACTIONS = (750, 500, 250, 125)
# What `uses` counts for each project.
_COUNTED = ("held", "borrowed", "asleep", "lent", "waiting")
_PROBE = "-"  # id of a lease that does not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease is where it is."""

    lease: str
    why: Why
    position: int | None = None  # among the waiting jobs, 1 is next; None: it does not queue
    needs_milli: int = 0  # over all devices
    free_milli: int = 0  # what could be granted now, over all devices
    smaller: Size | None = None  # would start now
    blocked_by: str = ""  # the project that holds most of the devices it could use
    never: bool = False  # cannot start on these devices, even if they were empty
    behind: str = ""  # with a strict order: the job of its project that has to start first
    first_at: float | None = None  # when capacity is reserved for it, or running jobs make way


class Starts(enum.StrEnum):
    """When a size would start if it were requested now."""

    NOW = "now"
    ASLEEP = "asleep"  # a session on lent devices: they return at its first use
    SOON = "soon"  # a job that preempts others
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a new lease of one size would get now."""

    size: Size
    starts: Starts
    why: Why
    borrowed: bool = False  # may be reclaimed
    devices: tuple[str, ...] = ()
    free_milli: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Use of a project, in thousandths of a GPU."""

    project: str
    in_use_milli: int  # held by its leases
    borrowed_milli: int  # the part of it over the quota, counting claims of suspended sessions
    claimed_milli: int  # guaranteed to its sessions, suspended or not
    lent_milli: int  # claimed by its suspended sessions and held by other leases
    fair_share_milli: int
    waiting_milli: int  # requested by its waiting jobs


def explain(cluster: Cluster, lease_id: str, now: float) -> Explanation:
    """Return why ``lease_id`` waits, or what is decided for it now.

    Raises:
        NotFound: the cluster has no such lease.
    """
    lease = next((x for x in cluster.leases if x.id == lease_id), None)
    if lease is None:
        raise NotFound(f"no lease {lease_id!r}")
    done = dry_run(cluster, now).run()
    needs = _needs(cluster, lease)
    free = sum(max(0, capacity.now) for capacity in done.state.usable)
    why_waiting = done.waiting.get(lease_id)
    if why_waiting is None:
        why = next((a.why for a in done.actions if a.lease == lease_id), Why.NOT_WAITING)
        return Explanation(lease=lease_id, why=why, needs_milli=needs, free_milli=free)
    never = why_waiting is Why.TOO_LARGE
    return Explanation(
        lease=lease_id,
        why=why_waiting,
        position=None if never or lease.kind is Kind.BUILD else _position(done, cluster, lease_id),
        needs_milli=needs,
        free_milli=free,
        smaller=None if lease.devices or lease.size.profile else smaller(done, lease),
        blocked_by=_blocked_by(cluster, lease),
        never=never,
        behind=_behind(done, cluster, lease) if why_waiting is Why.IN_LINE else "",
        first_at=None if never or lease.kind is Kind.BUILD else _first_at(cluster.settings, lease),
    )


def _behind(done: SchedulingRound, cluster: Cluster, lease: Lease) -> str:
    """The first waiting job of the project of ``lease``."""
    jobs = [x.id for x in cluster.leases if x.project == lease.project and x.kind is Kind.TRAIN]
    ahead = {id: number for number, id in enumerate(done.waiting)}
    return min((id for id in jobs if id in ahead), key=ahead.__getitem__)


def _first_at(settings: Settings, lease: Lease) -> float | None:
    return min((lease.waits_since_at + wait_s for wait_s in order.long_waits(settings)), default=None)


def _needs(cluster: Cluster, lease: Lease) -> int:
    if lease.devices:
        return size_of(lease)
    needs = [device.demand_milli(lease.size) for device in cluster.devices]
    return min(needs, default=lease.size.fraction_milli) * lease.size.device_count


def _position(done: SchedulingRound, cluster: Cluster, lease_id: str) -> int:
    jobs = {x.id for x in cluster.leases if x.kind is Kind.TRAIN}
    ahead = [id for id, why in done.waiting.items() if id in jobs and why is not Why.TOO_LARGE]
    return ahead.index(lease_id) + 1


def _blocked_by(cluster: Cluster, lease: Lease) -> str:
    held: dict[str, int] = {}
    for other in cluster.leases:
        if other.id == lease.id or other.state not in HOLDS_CAPACITY:
            continue
        shared = [u for u in other.devices if not lease.devices or u in lease.devices]
        held[other.project] = held.get(other.project, 0) + held_by(other) * len(shared)
    return max(held, key=lambda name: (held[name], name), default="")


def smaller(done: SchedulingRound, lease: Lease) -> Size | None:
    """Return the largest smaller size that would start after the decisions of a round; None: none would."""
    counts = range(lease.size.device_count - 1, 0, -1)
    sizes = [Size(lease.size.fraction_milli, n) for n in counts]
    largest = lease.size.fraction_milli or WHOLE_GPU
    sizes += [Size(milli, 1) for milli in _FRACTIONS if milli < largest]
    for size in sizes:
        probe = replace(lease, id=_PROBE, size=size)
        if lease.kind is Kind.BUILD:
            found = done.session_grant(probe)
            starts = isinstance(found, Grant)
        else:
            starts = done.would_start(probe)
        if starts:
            return size
    return None


def offers(
    cluster: Cluster,
    project: str,
    sizes: Iterable[Size],
    now: float,
    *,
    kind: Kind = Kind.BUILD,
    survival: CheckpointMode = CheckpointMode.SUSPEND,
) -> tuple[Offer, ...]:
    """Return what a new lease of ``project`` would get now, for each of ``sizes``."""
    probes = [
        Lease(
            id=_PROBE,
            project=project,
            kind=kind,
            size=size,
            survival=survival,
            submitted_at=now,
            queued_at=now,
        )
        for size in sizes
    ]
    if kind is Kind.TRAIN:
        return tuple(_job_offer(cluster, probe, now) for probe in probes)
    done = dry_run(cluster, now).run_sessions()
    return tuple(_session_offer(done, probe) for probe in probes)


def _session_offer(done: SchedulingRound, probe: Lease) -> Offer:
    found = done.session_grant(probe)
    starts = Starts.NO if isinstance(found, Why) else Starts.ASLEEP if found.asleep else Starts.NOW
    return _offer(done, probe, starts, found)


def _job_offer(cluster: Cluster, probe: Lease, now: float) -> Offer:
    done = dry_run(replace(cluster, leases=(*cluster.leases, probe)), now).run()
    if why := done.waiting.get(probe.id):
        starts = Starts.SOON if why is Why.AWAITING_RELEASE else Starts.NO
        return _offer(done, probe, starts, why)
    grant = next(a for a in done.actions if isinstance(a, Grant) and a.lease == probe.id)
    return _offer(done, probe, Starts.NOW, grant)


def _offer(done: SchedulingRound, probe: Lease, starts: Starts, found: Grant | Why) -> Offer:
    return Offer(
        size=probe.size,
        starts=starts,
        why=found.why if isinstance(found, Grant) else found,
        borrowed=isinstance(found, Grant) and found.borrowed,
        devices=found.devices if isinstance(found, Grant) else (),
        free_milli=sum(max(0, capacity.now) for capacity in done.state.usable),
    )


def check_request(cluster: Cluster, lease: Lease) -> None:
    """Check that ``lease`` could run on these devices if they were empty.

    Raises:
        InvalidRequest: it could not; the text says the largest size that could.
    """
    size = lease.size
    if size.device_count < 1 or not (size.memory_bytes > 0 or 0 < size.fraction_milli <= WHOLE_GPU):
        raise InvalidRequest("asks for nothing: take a part of a GPU from 0.001 to 1, or whole GPUs")
    if size.device_count > 1 and (size.memory_bytes or size.fraction_milli != WHOLE_GPU):
        raise InvalidRequest("several GPUs are only given whole: ask for a part of one, or for whole GPUs")
    _check_devices(cluster.devices, lease)
    project = next((p for p in cluster.projects if p.name == lease.project), None)
    if project is None:
        return
    needs = _needs(cluster, lease)
    if not lease.borrow and needs > project.quota_milli:
        raise InvalidRequest(
            f"Asks for {_gpus(needs)} without borrowing; "
            f"project {project.name} is guaranteed {_gpus(project.quota_milli)}.",
            reason=Why.QUOTA,
        )
    if project.limit_milli is not None and needs > project.limit_milli:
        raise InvalidRequest(
            f"Asks for {_gpus(needs)}; project {project.name} may use at most {_gpus(project.limit_milli)}.",
            reason=Why.PROJECT_LIMIT,
        )


def _check_devices(devices: Sequence[Device], lease: Lease) -> None:
    if not devices:
        raise InvalidRequest("this machine has no GPU", reason=Why.TOO_LARGE)
    size, count = lease.size, lease.size.device_count
    fitting = [device for device in devices if device.profile == size.profile or size.memory_bytes]
    if not fitting:
        what = f"a MIG instance of profile {size.profile}" if size.profile else "a GPU that is not divided"
        raise InvalidRequest(f"Asks for {what}; {_instances(devices)}.", reason=Why.TOO_LARGE)
    if count > len(fitting) and not lease.consolidate:
        raise InvalidRequest(f"Asks for {count} GPUs; there are {len(fitting)}.", reason=Why.TOO_LARGE)
    if count > len(fitting):
        nodes: dict[str, int] = {}
        for device in fitting:
            nodes[device.node] = nodes.get(device.node, 0) + 1
        all_of_them = f", all machines {len(fitting)}" if len(nodes) > 1 else ""
        raise InvalidRequest(
            f"Asks for {count} GPUs together; the largest machine has {max(nodes.values())}{all_of_them}.",
            reason=Why.TOO_LARGE,
        )
    most = max(device.grantable_bytes for device in devices)
    if size.memory_bytes > most:
        raise InvalidRequest(
            f"Asks for {gigabytes(size.memory_bytes)} of GPU memory; "
            f"the largest GPU has {gigabytes(most)} to give.",
            reason=Why.TOO_LARGE,
        )


def _instances(devices: Sequence[Device]) -> str:
    """Profiles of the MIG instances here, the largest first, as a sentence."""
    memory = {device.profile: device.memory_bytes for device in devices if device.profile}
    if not memory:
        return "no GPU here is divided"
    largest_first = sorted(memory, key=lambda name: (-memory[name], name))
    return f"there are MIG instances of profile {', '.join(largest_first)}"


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE_GPU:g} GPU" + ("" if milli == WHOLE_GPU else "s")


def borrowed(cluster: Cluster) -> Mapping[str, bool]:
    """Return, for every lease that holds capacity, whether it may be reclaimed.

    It may if it is over quota or claimed by a suspended session.
    """
    state = ClusterState.of(cluster)
    on_lent = {
        lease.id
        for capacity in state.capacities.values()
        for lease in capacity.on_lent(state.quotas.claimants)
    }
    return {
        x.id: x.id not in state.quotas.in_quota or x.id in on_lent
        for x in cluster.leases
        if x.state in HOLDS_CAPACITY and x.devices and x.state not in LEAVING
    }


def lent(cluster: Cluster) -> Mapping[str, tuple[str, ...]]:
    """Return, for every suspended session with a claim, the leases on its devices that borrow from it."""
    state = ClusterState.of(cluster)
    found: dict[str, tuple[str, ...]] = {}
    for lease in cluster.leases:
        if lease.state is State.SUSPENDED and state.has_claim(lease):
            users = [
                x.id
                for capacity in state.capacities_of(lease)
                for x in capacity.on_lent(state.quotas.claimants)
            ]
            found[lease.id] = tuple(dict.fromkeys(users))
    return found


def claims(cluster: Cluster) -> Mapping[str, int]:
    """Return the thousandths of each device, by UUID, that are guaranteed to sessions."""
    return {uuid: capacity.claimed for uuid, capacity in ClusterState.of(cluster).capacities.items()}


def _over_quota(project: Project, count: Mapping[str, int]) -> int:
    """Return what a project holds over its quota: of a lease that may be reclaimed whole, maybe a part."""
    return min(count["borrowed"], max(0, count["held"] + count["asleep"] - project.quota_milli))


def uses(cluster: Cluster) -> tuple[Use, ...]:
    """Return the use of each configured project, in their order."""
    state = ClusterState.of(cluster)
    borrowing = borrowed(cluster)
    lending = lent(cluster)
    counts: dict[str, dict[str, int]] = {}
    for lease in cluster.leases:
        count = counts.setdefault(lease.project, dict.fromkeys(_COUNTED, 0))
        if lease.kind is Kind.TRAIN and lease.state is State.PENDING and not lease.cancelled:
            count["waiting"] += _needs(cluster, lease)
        elif lease.kind is Kind.TRAIN and lease.state is State.SUSPENDED:
            count["waiting"] += size_of(lease)
        elif lease.state in HOLDS_CAPACITY:
            count["held"] += size_of(lease)
            count["borrowed"] += size_of(lease) if borrowing.get(lease.id) else 0
        elif lease.state is State.SUSPENDED and state.has_claim(lease):
            count["asleep"] += size_of(lease)
            count["lent"] += size_of(lease) if lending.get(lease.id) else 0
    none = dict.fromkeys(_COUNTED, 0)
    demand_milli = {name: c["held"] + c["waiting"] for name, c in counts.items()}
    shares = fair_shares(cluster.projects, demand_milli, WHOLE_GPU * len(state.usable))
    return tuple(
        Use(
            project=p.name,
            in_use_milli=counts.get(p.name, none)["held"],
            borrowed_milli=_over_quota(p, counts.get(p.name, none)),
            claimed_milli=state.quotas.account(p.name).claimed,
            lent_milli=counts.get(p.name, none)["lent"],
            fair_share_milli=shares[p.name],
            waiting_milli=counts.get(p.name, none)["waiting"],
        )
        for p in cluster.projects
    )
