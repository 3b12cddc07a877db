"""The snapshot from which an engine decides: the registry's records with measurements filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.session_queue import ServerName
from jupyter_gpushare.core import measure
from jupyter_gpushare.core.idle import adaptive_timeout_s
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Cluster,
    Grant,
    Lease,
    Project,
    State,
)
from jupyter_gpushare.core.order import ORDERS
from jupyter_gpushare.core.planning import sharing
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import LeaseSample, Phase

# Shorter pauses between CUDA calls do not count as idle.
_ACTIVE_S = 2.0


def cluster(
    registry: Registry,
    engine: Engine,
    now: float,
    extra: Iterable[Lease] = (),
    *,
    as_if_lending: bool = False,
    except_server: ServerName | None = None,
) -> Cluster:
    """Return the snapshot at ``now``, with the hypothetical leases ``extra``.

    The place of ``except_server`` in the queue of sessions is left out.  With ``as_if_lending``, sessions are
    suspendable as in the lending mode ``on``.
    """
    placed = registry.index.placed.values()
    return Cluster(
        devices=tuple(registry.devices.for_planner()),
        projects=projects(registry, engine),
        leases=(
            *(measured(registry, r, now, as_if_lending=as_if_lending) for r in placed),
            *registry.index.waiting(_version(registry), partial(_startable, registry)),
            *(registry.session_queue.leases(except_server) if engine.queues_sessions else ()),
            *(_as_site_shares(registry, lease) for lease in extra),
        ),
        settings=registry.policy.settings(registry.devices.host_budget_bytes),
        lags_gpu_s=registry.fairness.lags_gpu_s,
        behind=registry.fairness.behind,
        parted=registry.parted.pairs(now),
    )


async def admit(
    registry: Registry, engine: Engine, lease: Lease, *, not_nodes: Iterable[str], until: float, starts: bool
) -> Grant | Explanation:
    """Return the grant that is reserved for a session, or else the engine's answer (`Engine.admit`).

    With ``starts`` its server starts, and gives up its place in the queue of sessions.  A new session is
    behind all sessions that wait there.  The engine answers until ``until`` (monotonic).

    Raises:
        InvalidRequest: it can never run on this machine.
    """
    now, queue = registry.clock(), registry.session_queue
    known = cluster(registry, engine, now, except_server=(lease.user, lease.server) if starts else None)
    engine.check_request(known, lease)
    if starts and (reserved := queue.take(lease, {each.uuid for each in known.devices if each.usable})):
        return reserved
    lease = replace(lease, waits=bool(queue.waiting()))
    return await engine.admit(known, lease, now, not_nodes=not_nodes, within_s=max(0.0, until - now))


def empty_machine(registry: Registry, engine: Engine) -> Cluster:
    """Return the devices and projects without any lease, for questions that do not depend on leases."""
    return Cluster(
        devices=tuple(registry.devices.for_planner()), projects=projects(registry, engine), leases=()
    )


def projects(registry: Registry, engine: Engine) -> tuple[Project, ...]:
    """Return all projects with the quotas, limits and weights that are in force."""
    total_milli = registry.devices.total_milli
    return engine.projects(registry.policy.in_force(total_milli, registry.overrides))


def update_fairness(registry: Registry, engine: Engine, now: float) -> None:
    """Update the lag of each project and user behind its fair share, up to ``now``."""
    index, devices = registry.index, tuple(registry.devices.for_planner())
    version = index.changes, _version(registry)
    leases = partial(_startable, registry, index.all.values())
    if ORDERS[registry.policy.order].preempts:
        registry.fairness.update_users(devices, version, leases, now)
    else:
        registry.fairness.drop_users()
    known = projects(registry, engine)
    if len(known) > 1 and registry.policy.fairness_horizon_s:
        registry.fairness.update(known, devices, version, leases, now)


def measured(registry: Registry, record: LeaseRecord, now: float, *, as_if_lending: bool = False) -> Lease:
    """Return a placed lease with its measurements filled in."""
    observation, lease = registry.observations[record.id], record.lease
    sample = observation.sample
    # Saved memory ends with its process, so the sample counts, not the record.
    asleep = sample is not None and sample.phase is Phase.SUSPENDED and lease.state is State.SUSPENDED
    job = registry.job_of(record)
    config = registry.policy.project_config(lease.project)
    return replace(
        _sharing(registry, record, now, lease if job is None else measure.on(lease, job.measure)),
        state=State.RESUMING if resumed_without_intent(registry, record) else lease.state,
        saved_bytes=_saved_bytes(record, sample if asleep else None),
        used_bytes=sum(sample.used_bytes.values()) if sample else 0,
        idle_since_at=idle_since(registry, record, now),
        wanted=observation.wanted,
        retry_at=max(observation.retry_at, registry.hub_backoff_until)
        if record.is_job
        else observation.retry_at,
        avoids=tuple(observation.avoids.items()),
        made_way_for=observation.made_way_for,
        suspendable=not suspend_obstacle(registry, record, as_if_lending=as_if_lending),
        movable=record.moves and sample is not None and sample.suspendable,
        idle_timeout_s=_own_timeout_s(registry, record),
        notice_s=config.notice_s if config is not None else None,
    )


def _version(registry: Registry) -> object:
    """Return the state on which `_startable` depends, apart from the leases."""
    return registry.hub_backoff_until, registry.owners.absent, registry.policy.share


def _startable(registry: Registry, records: Iterable[LeaseRecord]) -> Iterator[Lease]:
    """Yield the leases that may be planned: all except the waiting jobs of absent owners."""
    for record in records:
        if record.state is not State.PENDING or record.lease.user not in registry.owners.absent:
            yield _with_retry(registry, record)


def _as_site_shares(registry: Registry, lease: Lease) -> Lease:
    """Return a lease whose owner's consent to share counts only if the site lets jobs share."""
    if not lease.share:
        return lease
    job = registry.jobs.get(lease.id[1:])
    key = pair_key(job.user, job.command) if job is not None else ""
    return replace(lease, share=registry.policy.share, pair_key=key)


def pair_key(user: str, command: tuple[str, ...]) -> str:
    """Return the `Lease.pair_key` of a user's command."""
    return blake2b("\0".join((user, *command)).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _sharing(registry: Registry, record: LeaseRecord, now: float, lease: Lease) -> Lease:
    """Return a job with its spare and its needed bytes, which decide whether it shares a GPU."""
    if not lease.share:
        return lease
    observation = registry.observations[record.id]
    peak, spare = observation.peak.peak(now), 0
    if peak is not None and observation.rates.is_known and not lease.host:
        spare = max(0, min(record.limits.values(), default=0) - sharing.needed_bytes(peak))
    return replace(
        _as_site_shares(registry, lease),
        spare_bytes=spare,
        needs_bytes=sharing.needed_bytes(observation.max_bytes),
    )


def _saved_bytes(record: LeaseRecord, asleep: LeaseSample | None) -> int:
    """Return the bytes of host memory that a suspended lease takes, or that a guest has reserved."""
    if record.lease.host:
        return record.guest_bytes
    return sum(asleep.saved_bytes.values()) if asleep else record.lease.saved_bytes


def _with_retry(registry: Registry, record: LeaseRecord) -> Lease:
    """Return the lease of a job in the queue, with the limits on its start that its record lacks."""
    observation = registry.observations[record.id]
    retry_at = max(observation.retry_at, registry.hub_backoff_until)
    avoids, made_way_for = tuple(observation.avoids.items()), observation.made_way_for
    lease = _as_site_shares(registry, record.lease)
    if lease.retry_at == retry_at and not (avoids or made_way_for):
        return lease
    return replace(lease, retry_at=retry_at, avoids=avoids, made_way_for=made_way_for)


def _own_timeout_s(registry: Registry, record: LeaseRecord) -> float | None:
    config = registry.policy.project_config(record.lease.project)
    if config is not None and config.idle_timeout_s is not None:
        return config.idle_timeout_s
    if not registry.policy.adaptive_idle or record.is_job:
        return None
    gpus = record.lease.held_milli * record.lease.size.device_count / WHOLE_GPU
    return adaptive_timeout_s(registry.observations[record.id].pauses.past, gpus) if gpus else None


def idle_since(registry: Registry, record: LeaseRecord, now: float) -> float | None:
    """Return the time since which a lease has run no cell and its GPU has been idle; None if it is busy.

    Kernels that work on the processor count as busy until `holds_until`.
    """
    observation = registry.observations[record.id]
    active = max(observation.active_at, observation.kernel_active_at, record.lease.granted_at)
    if observation.kernel_busy:
        active = now
    if (until := holds_until(registry, record)) is not None:
        active = min(active, until)
    return None if now - active < _ACTIVE_S else active


def holds_until(registry: Registry, record: LeaseRecord) -> float | None:
    """Return the time until which kernels without GPU work keep a session busy; None if there is no limit.

    The project's ``max_hold`` sets it.
    """
    max_hold_s = registry.policy.max_hold_of(record.lease.project)
    if max_hold_s is None or record.is_job:
        return None
    return gpu_active_at(registry, record) + max_hold_s


def gpu_active_at(registry: Registry, record: LeaseRecord) -> float:
    """Return the last moment at which a lease worked on its GPU or was granted it."""
    return max(registry.observations[record.id].gpu_active_at, record.lease.granted_at)


def at_work(registry: Registry, now: float) -> set[str]:
    """Return the ids of leases that used a GPU within the last `_ACTIVE_S`, whatever their kernels report."""
    return {id for id in registry.index.placed if now - registry.observations[id].active_at < _ACTIVE_S}


def never_sleeps(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether a session is marked never to be suspended, and its project has the right to that."""
    project = registry.policy.project_config(record.lease.project)
    return record.never_sleep and project is not None and project.never_sleep


def resumed_without_intent(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether a lease was resumed without a stored intent; if so, it holds its capacity again."""
    sample = registry.observations[record.id].sample
    return sample is not None and sample.unconfirmed and record.state is State.SUSPENDED


def may_be_awake(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether a lease that is suspended in its record and awake at the helper may be recorded awake.

    After a resume without a stored intent, the lease waits for other leases that the records have on its
    capacity.  Those that ended are recorded as ended first.  The helper refuses those that were granted
    meanwhile until this lease is confirmed, and no further lease is granted that capacity.
    """
    if not resumed_without_intent(registry, record):
        return True
    held = Counter[str]()
    for other in registry.leases.values():
        if other.id != record.id and (
            other.state in HOLDS_CAPACITY or resumed_without_intent(registry, other)
        ):
            held.update(dict.fromkeys(other.lease.devices, other.lease.held_milli))
    return all(held[uuid] + record.lease.held_milli <= WHOLE_GPU for uuid in record.lease.devices)


def suspend_obstacle(registry: Registry, record: LeaseRecord, *, as_if_lending: bool = False) -> str:
    """Return why a lease cannot be suspended; empty if it can."""
    if not record.is_job:
        if never_sleeps(registry, record):
            return "it is marked never to be put to sleep"
        if not as_if_lending and (obstacle := registry.lending_switch.obstacle):
            return obstacle
    observation = registry.observations[record.id]
    if observation.not_suspendable and registry.clock() < observation.retry_at:
        return observation.not_suspendable
    if observation.sample is not None and not observation.sample.suspendable:
        return observation.sample.suspend_reason
    return registry.devices.suspend_obstacle(record.lease.devices)


def move_obstacle(registry: Registry, record: LeaseRecord) -> str:
    """Return why a suspended lease can resume only on its own devices; empty if it may move."""
    if record.moves:
        return registry.devices.move_obstacle(record.lease.devices)
    job = registry.job_of(record)
    if job is not None and not wire.decode_stored(job.request, wire.JobTerms).move:
        return "it was submitted not to move"
    return "its processes may not be able to open another GPU"


def is_place_of(record: LeaseRecord, devices: Sequence[str]) -> bool:
    """Return whether a lease may move to these devices: it may move, and their number is the same."""
    return record.moves and len(devices) == len(record.lease.devices)


def sampled_elsewhere(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the helper has a lease on devices other than those of its record."""
    sample = registry.observations[record.id].sample
    if sample is None or not sampled_since_entry(registry, record):
        return False
    return is_place_of(record, sample.devices) and set(sample.devices) != set(record.lease.devices)


def sampled_since_entry(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the lease was measured after it entered its present state."""
    return registry.observations[record.id].measured_at > record.entered_at


def share_differs(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the helper's mode of sharing time differs from the configured one.

    If only an earlier broker has asked for one, the sample shows which is in force.
    """
    observation, configured = registry.observations[record.id], registry.policy.compute_share
    if observation.requested_share is not None or observation.sample is None:
        return observation.requested_share not in (None, configured)
    return bool(observation.sample.share_reason) or observation.sample.compute_share is not configured
