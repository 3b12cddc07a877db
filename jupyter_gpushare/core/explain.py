"""Say why: what a lease waits for, what could start now, who borrows from whom.

Everything here comes out of the very round that decides (`round.Round`) or the
board it works on, so that no answer can differ from what happens.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.idle import eligible, eligible_at, warn_at
from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Order,
    Settings,
    State,
    Survival,
    Why,
)
from jupyter_gpushare.core.placement import demand
from jupyter_gpushare.core.plan import look
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of
from jupyter_gpushare.core.round import Round
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

# Fractions tried when something smaller is looked for.
_FRACTIONS = (750, 500, 250, 125)
_PROBE = "-"  # the name of a lease that is only asked about


@dataclass(frozen=True, slots=True)
class Size:
    """What is asked for (`model.Lease`)."""

    fraction_milli: int = 0
    device_count: int = 1
    memory_bytes: int = 0
    profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease is where it is."""

    lease: str
    why: Why
    position: int | None = None  # among the jobs that wait, 1 is next; None: it does not queue
    needs_milli: int = 0  # over all devices
    free_milli: int = 0  # what could be granted now, over all devices
    smaller: Size | None = None  # would start now
    blocked_by: str = ""  # the project that holds most of what it could use
    never: bool = False  # cannot start on these devices, whoever leaves
    behind: str = ""  # the job of its project that has to start first, where the order is strict
    first_at: float | None = None  # from then on it has waited for so long that others make way


class Starts(enum.StrEnum):
    NOW = "now"
    ASLEEP = "asleep"  # a session whose room is lent: it comes with the first use
    SOON = "soon"  # a job for which others make room
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What asking for one size would bring now."""

    fraction_milli: int
    device_count: int
    starts: Starts
    why: Why
    profile: str = ""
    borrowed: bool = False  # may be taken back
    devices: tuple[str, ...] = ()
    free_milli: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a project has; thousandths of a GPU."""

    project: str
    in_use_milli: int  # held by its leases
    borrowed_milli: int  # the part of it that may be taken back
    claimed_milli: int  # guaranteed to its sessions, asleep or not
    lent_milli: int  # claimed by its sleeping sessions, and held by others
    fair_share_milli: int
    waiting_milli: int  # asked for by its jobs that wait


def explain(cluster: Cluster, lease_id: str, now: float) -> Explanation:
    """Return why ``lease_id`` waits, or what becomes of it now.

    Raises:
        NotFound: the cluster has no such lease.
    """
    lease = next((x for x in cluster.leases if x.id == lease_id), None)
    if lease is None:
        raise NotFound(f"no lease {lease_id!r}")
    done = look(cluster, now).run()
    needs = _needs(cluster, lease)
    free = sum(max(0, room.now) for room in done.board.usable)
    waiting = done.waiting.get(lease_id)
    if waiting is None:
        why = next((a.why for a in done.actions if a.lease == lease_id), Why.NOT_WAITING)
        return Explanation(lease=lease_id, why=why, needs_milli=needs, free_milli=free)
    never = waiting.why is Why.TOO_LARGE
    return Explanation(
        lease=lease_id,
        why=waiting.why,
        position=None if never or lease.kind is Kind.BUILD else _position(done, cluster, lease_id),
        needs_milli=needs,
        free_milli=free,
        smaller=None if lease.devices or lease.profile else smaller(done, lease),
        blocked_by=_blocked_by(cluster, lease),
        never=never,
        behind=_behind(done, cluster, lease) if waiting.why is Why.IN_LINE else "",
        first_at=None if never or lease.kind is Kind.BUILD else _first_at(cluster.settings, lease),
    )


def _behind(done: Round, cluster: Cluster, lease: Lease) -> str:
    """Who is at the head of the line that ``lease`` stands in."""
    line = [x.id for x in cluster.leases if x.project == lease.project and x.kind is Kind.TRAIN]
    ahead = {id: number for number, id in enumerate(done.waiting)}
    return min((id for id in line if id in ahead), key=ahead.__getitem__)


def _first_at(settings: Settings, lease: Lease) -> float | None:
    waits = [settings.skip_wait_s] if settings.order is not Order.FIFO else []
    waits += [settings.guard_s] if order.has_guard(settings) else []
    return min((lease.waits_since_at + s for s in waits if s is not None), default=None)


def _needs(cluster: Cluster, lease: Lease) -> int:
    if lease.devices:
        return size_of(lease)
    needs = [demand(lease, device) for device in cluster.devices]
    return min(needs, default=lease.fraction_milli) * lease.device_count


def _position(done: Round, cluster: Cluster, lease_id: str) -> int:
    jobs = {x.id for x in cluster.leases if x.kind is Kind.TRAIN}
    ahead = [id for id, waiting in done.waiting.items() if id in jobs and waiting.why is not Why.TOO_LARGE]
    return ahead.index(lease_id) + 1


def _blocked_by(cluster: Cluster, lease: Lease) -> str:
    held: dict[str, int] = {}
    for other in cluster.leases:
        if other.id == lease.id or other.state not in HOLDS_ROOM:
            continue
        shared = [u for u in other.devices if not lease.devices or u in lease.devices]
        held[other.project] = held.get(other.project, 0) + held_by(other) * len(shared)
    return max(held, key=lambda name: (held[name], name), default="")


def smaller(done: Round, lease: Lease) -> Size | None:
    """Return the largest smaller size that would start now, as far as a round that is done can tell."""
    counts = range(lease.device_count - 1, 0, -1)
    sizes = [Size(lease.fraction_milli, n) for n in counts]
    largest = lease.fraction_milli or WHOLE_GPU
    sizes += [Size(milli, 1) for milli in _FRACTIONS if milli < largest]
    for size in sizes:
        probe = replace(
            lease,
            id=_PROBE,
            memory_bytes=0,
            fraction_milli=size.fraction_milli,
            device_count=size.device_count,
        )
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
    survival: Survival = Survival.SUSPEND,
) -> tuple[Offer, ...]:
    """Return what a new lease of ``project`` would get now, for each size."""
    probes = [
        Lease(
            id=_PROBE,
            project=project,
            kind=kind,
            fraction_milli=size.fraction_milli,
            device_count=size.device_count,
            profile=size.profile,
            survival=survival,
            submitted_at=now,
            queued_at=now,
        )
        for size in sizes
    ]
    if kind is Kind.TRAIN:
        return tuple(_job_offer(cluster, probe, now) for probe in probes)
    done = look(cluster, now).run_sessions()
    return tuple(_session_offer(done, probe) for probe in probes)


def _session_offer(done: Round, probe: Lease) -> Offer:
    found = done.session_grant(probe)
    starts = Starts.NO if isinstance(found, Why) else Starts.ASLEEP if found.asleep else Starts.NOW
    return _offer(done, probe, starts, found)


def _job_offer(cluster: Cluster, probe: Lease, now: float) -> Offer:
    done = look(replace(cluster, leases=(*cluster.leases, probe)), now).run()
    if waiting := done.waiting.get(probe.id):
        starts = Starts.SOON if waiting.why is Why.WAITS_FOR_ROOM else Starts.NO
        return _offer(done, probe, starts, waiting.why)
    grant = next(a for a in done.actions if isinstance(a, Grant) and a.lease == probe.id)
    return _offer(done, probe, Starts.NOW, grant)


def _offer(done: Round, probe: Lease, starts: Starts, found: Grant | Why) -> Offer:
    return Offer(
        fraction_milli=probe.fraction_milli,
        device_count=probe.device_count,
        profile=probe.profile,
        starts=starts,
        why=found.why if isinstance(found, Grant) else found,
        borrowed=isinstance(found, Grant) and found.borrowed,
        devices=found.devices if isinstance(found, Grant) else (),
        free_milli=sum(max(0, room.now) for room in done.board.usable),
    )


def check_request(cluster: Cluster, lease: Lease) -> None:
    """Return if ``lease`` could ever run here.

    Raises:
        InvalidRequest: it could not, whoever leaves; the text says the largest that could.
    """
    if lease.device_count < 1 or not (lease.memory_bytes > 0 or 0 < lease.fraction_milli <= WHOLE_GPU):
        raise InvalidRequest("asks for nothing: take a part of a GPU from 0.001 to 1, or whole GPUs")
    if lease.device_count > 1 and (lease.memory_bytes or lease.fraction_milli != WHOLE_GPU):
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
    count = lease.device_count
    fitting = [device for device in devices if device.profile == lease.profile or lease.memory_bytes]
    if not fitting:
        what = f"a MIG instance of profile {lease.profile}" if lease.profile else "a GPU that is not divided"
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
    if lease.memory_bytes > most:
        raise InvalidRequest(
            f"Asks for {lease.memory_bytes / (1 << 30):.1f} GiB of GPU memory; "
            f"the largest GPU has {most / (1 << 30):.1f} GiB to give.",
            reason=Why.TOO_LARGE,
        )


def _instances(devices: Sequence[Device]) -> str:
    """What MIG instances there are, the largest first."""
    memory = {device.profile: device.memory_bytes for device in devices if device.profile}
    if not memory:
        return "no GPU here is divided"
    largest_first = sorted(memory, key=lambda name: (-memory[name], name))
    return f"there are MIG instances of profile {', '.join(largest_first)}"


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE_GPU:g} GPU" + ("" if milli == WHOLE_GPU else "s")


def borrowed(cluster: Cluster) -> Mapping[str, bool]:
    """Return, for every lease that holds room, whether that room may be taken back.

    It is beyond the project's quota, or claimed by a session that sleeps.
    """
    board = Board.of(cluster)
    on_lent = {lease.id for room in board.rooms.values() for lease in room.on_lent(board.standing.claimants)}
    return {
        x.id: x.id not in board.standing.in_quota or x.id in on_lent
        for x in cluster.leases
        if x.state in HOLDS_ROOM and x.devices and x.state not in LEAVING
    }


def lent(cluster: Cluster) -> Mapping[str, tuple[str, ...]]:
    """Return, for every sleeping session with a claim, the leases that use its room now."""
    board = Board.of(cluster)
    found: dict[str, tuple[str, ...]] = {}
    for lease in cluster.leases:
        if lease.state is State.SUSPENDED and board.has_claim(lease):
            users = [x.id for room in board.rooms_of(lease) for x in room.on_lent(board.standing.claimants)]
            found[lease.id] = tuple(dict.fromkeys(users))
    return found


def claims(cluster: Cluster) -> Mapping[str, int]:
    """Return how much of each device, by UUID, is guaranteed to sessions."""
    return {uuid: room.claimed for uuid, room in Board.of(cluster).rooms.items()}


def uses(cluster: Cluster) -> tuple[Use, ...]:
    """Return what each configured project has, in their order."""
    board = Board.of(cluster)
    borrowing = borrowed(cluster)
    lending = lent(cluster)
    counts: dict[str, dict[str, int]] = {}
    for lease in cluster.leases:
        count = counts.setdefault(lease.project, dict.fromkeys(("held", "borrowed", "lent", "waiting"), 0))
        if lease.kind is Kind.TRAIN and lease.state is State.PENDING and not lease.cancelled:
            count["waiting"] += _needs(cluster, lease)
        elif lease.kind is Kind.TRAIN and lease.state is State.SUSPENDED:
            count["waiting"] += size_of(lease)
        elif lease.state in HOLDS_ROOM:
            count["held"] += size_of(lease)
            count["borrowed"] += size_of(lease) if borrowing.get(lease.id) else 0
        elif lending.get(lease.id):
            count["lent"] += size_of(lease)
    none = dict.fromkeys(("held", "borrowed", "lent", "waiting"), 0)
    demand_milli = {name: c["held"] + c["waiting"] for name, c in counts.items()}
    shares = fair_shares(cluster.projects, demand_milli, WHOLE_GPU * len(board.usable))
    return tuple(
        Use(
            project=p.name,
            in_use_milli=counts.get(p.name, none)["held"],
            borrowed_milli=counts.get(p.name, none)["borrowed"],
            claimed_milli=board.standing.account(p.name).claimed,
            lent_milli=counts.get(p.name, none)["lent"],
            fair_share_milli=shares[p.name],
            waiting_milli=counts.get(p.name, none)["waiting"],
        )
        for p in cluster.projects
    )
