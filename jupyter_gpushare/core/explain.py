"""Explain decisions: what could start now, which leases borrow, what each project uses.

Every answer comes from the round that decides (`scheduler.SchedulingRound`) or
from the `ClusterState` that it works on, so it cannot differ from the real
decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Project,
    State,
    Why,
    size_of,
)
from jupyter_gpushare.core.planning.planner import dry_run
from jupyter_gpushare.core.planning.scheduler import SchedulingRound
from jupyter_gpushare.core.quota import fair_shares
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gibibytes import gibibytes

# Fractions that `smaller` tries.
_FRACTIONS = (750, 500, 250, 125)
# The numbers that `uses` counts for each project.
_COUNTED = ("held", "borrowed", "asleep", "waiting")
_PROBE = "-"  # id of a lease that does not exist


class Starts(enum.StrEnum):
    """When a session of a size would start if it were requested now."""

    NOW = "now"
    ASLEEP = "asleep"  # on lent devices, which return at its first use
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The outcome of a request for a new session of one size now."""

    size: Size
    starts: Starts
    why: Why
    borrowed: bool = False  # may be reclaimed
    devices: tuple[str, ...] = ()
    free_milli: int = 0
    waits: bool = False  # it starts later, once other work has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Capacity that a project uses and waits for, in thousandths of a GPU."""

    project: str
    in_use_milli: int  # held by its leases
    borrowed_milli: int  # the part of it over the quota, counting claims of suspended sessions
    fair_share_milli: int
    waiting_milli: int  # requested by its waiting jobs


def _needs(cluster: Cluster, lease: Lease) -> int:
    needs = [device.demand_milli(lease.size) for device in cluster.devices]
    return min(needs, default=lease.size.fraction_milli) * lease.size.device_count


def smaller(done: SchedulingRound, lease: Lease) -> Size | None:
    """Return the largest smaller size that would start after the decisions of a round, or None.

    It is always None for a MIG instance and for a lease that is bound to its devices.
    """
    if lease.devices or lease.size.profile:
        return None
    counts = range(lease.size.device_count - 1, 0, -1)
    sizes = [Size(lease.size.fraction_milli, n) for n in counts]
    largest = lease.size.fraction_milli or WHOLE_GPU
    sizes += [Size(milli, 1) for milli in _FRACTIONS if milli < largest]
    for size in sizes:
        probe = replace(lease, id=_PROBE, size=size)
        if lease.kind is Kind.BUILD:
            found = done.placer.session_grant(probe)
            starts = isinstance(found, Grant)
        else:
            starts = done.would_start(probe)
        if starts:
            return size
    return None


def offers(cluster: Cluster, project: str, sizes: Iterable[Size], now: float) -> tuple[Offer, ...]:
    """Return the offer for a new session of ``project`` now, for each of ``sizes``."""
    # Waiting jobs do not reduce what a session gets.
    others = tuple(x for x in cluster.leases if x.kind is Kind.BUILD or x.state is not State.PENDING)
    done = dry_run(replace(cluster, leases=others), now).run_sessions()
    session = Lease(id=_PROBE, project=project, kind=Kind.BUILD, size=Size(), submitted_at=now, queued_at=now)
    return tuple(_offer(cluster, done, replace(session, size=size)) for size in sizes)


def _may_ever_start(cluster: Cluster, lease: Lease) -> bool:
    try:
        check_request(cluster, lease)
    except InvalidRequest:
        return False
    return True


def _offer(cluster: Cluster, done: SchedulingRound, probe: Lease) -> Offer:
    found = done.placer.session_grant(probe)
    free_milli = sum(max(0, capacity.now()) for capacity in done.state.usable)
    if isinstance(found, Why):
        waits = _may_ever_start(cluster, probe)
        return Offer(size=probe.size, starts=Starts.NO, why=found, free_milli=free_milli, waits=waits)
    return Offer(
        size=probe.size,
        starts=Starts.ASLEEP if found.asleep else Starts.NOW,
        why=found.why,
        borrowed=found.borrowed,
        devices=found.devices,
        free_milli=free_milli,
    )


def check_request(cluster: Cluster, lease: Lease) -> None:
    """Check that ``lease`` could run on these devices if they were empty.

    Raises:
        InvalidRequest: it could not; the text names the largest size that could.
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
        wanted = f"a MIG instance of profile {size.profile}" if size.profile else "a GPU that is not divided"
        raise InvalidRequest(f"Asks for {wanted}; {_instances(devices)}.", reason=Why.TOO_LARGE)
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
    largest_bytes = max(device.grantable_bytes for device in devices)
    if size.memory_bytes > largest_bytes:
        raise InvalidRequest(
            f"Asks for {gibibytes(size.memory_bytes)} of GPU memory; "
            f"the largest GPU has {gibibytes(largest_bytes)} to give.",
            reason=Why.TOO_LARGE,
        )


def _instances(devices: Sequence[Device]) -> str:
    """Return a phrase with the profiles of the MIG instances, the largest first."""
    memory = {device.profile: device.memory_bytes for device in devices if device.profile}
    if not memory:
        return "no GPU here is divided"
    largest_first = sorted(memory, key=lambda name: (-memory[name], name))
    return f"there are MIG instances of profile {', '.join(largest_first)}"


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE_GPU:g} GPU" + ("" if milli == WHOLE_GPU else "s")


def borrowed(cluster: Cluster) -> Mapping[str, bool]:
    """Return, for every lease that holds capacity, whether that capacity may be reclaimed.

    It may be if it is over quota or if a suspended session claims it.
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
    """Return the capacity that a project holds over its quota; this may be only part of a lease."""
    return min(count["borrowed"], max(0, count["held"] + count["asleep"] - project.quota_milli))


def uses(cluster: Cluster) -> tuple[Use, ...]:
    """Return the use of each configured project, in the order of the configuration."""
    state = ClusterState.of(cluster)
    borrowing = borrowed(cluster)
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
    none = dict.fromkeys(_COUNTED, 0)
    demand_milli = {name: state.quotas.account(name).demand(c["waiting"]) for name, c in counts.items()}
    shares = fair_shares(cluster.projects, demand_milli, WHOLE_GPU * len(state.usable))
    return tuple(
        Use(
            project=p.name,
            in_use_milli=counts.get(p.name, none)["held"],
            borrowed_milli=_over_quota(p, counts.get(p.name, none)),
            fair_share_milli=shares[p.name],
            waiting_milli=counts.get(p.name, none)["waiting"],
        )
        for p in cluster.projects
    )
