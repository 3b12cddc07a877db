"""The snapshot that an engine decides on: the registry's records with measurements filled in."""

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
    but: ServerName | None = None,
) -> Cluster:
    """Return the snapshot at ``now``; ``extra`` are leases that are only considered.

    ``but`` leaves out the place of this server in the queue of sessions.
    ``as_if_lending``: with sessions that could be suspended if the lending mode were on.
    """
    placed = registry.index.placed.values()
    return Cluster(
        devices=tuple(registry.devices.for_planner()),
        projects=projects(registry, engine),
        leases=(
            *(measured(registry, r, now, as_if_lending=as_if_lending) for r in placed),
            *registry.index.waiting(_version(registry), partial(_startable, registry)),
            *(registry.session_queue.leases(but) if engine.queues_sessions else ()),
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
    """Return what a session gets now: what was reserved for its start, else what the engine answers.

    ``starts``: its server starts, and gives up its place in the queue of sessions.  As long as sessions
    wait, a new one is behind them.  Other arguments and answer as in `Engine.admit`, until ``until``.

    Raises:
        InvalidRequest: it can never run here.
    """
    now, queue = registry.clock(), registry.session_queue
    known = cluster(registry, engine, now, but=(lease.user, lease.server) if starts else None)
    engine.check_request(known, lease)
    if starts and (reserved := queue.take(lease, {each.uuid for each in known.devices if each.usable})):
        return reserved
    lease = replace(lease, waits=bool(queue.waiting()))
    return await engine.admit(known, lease, now, not_nodes=not_nodes, within_s=max(0.0, until - now))


def empty_machine(registry: Registry, engine: Engine) -> Cluster:
    """Return devices and projects without any lease, for questions that no lease changes."""
    return Cluster(
        devices=tuple(registry.devices.for_planner()), projects=projects(registry, engine), leases=()
    )


def projects(registry: Registry, engine: Engine) -> tuple[Project, ...]:
    """Return all projects with the numbers in force."""
    total_milli = registry.devices.total_milli
    return engine.projects(registry.policy.in_force(total_milli, registry.overrides))


def update_fairness(registry: Registry, engine: Engine, now: float) -> None:
    """Add up, until ``now``, what projects and users lag behind their fair shares."""
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
    """Return a lease with what is measured about it filled in."""
    observation, lease = registry.observations[record.id], record.lease
    sample = observation.sample
    # Suspended memory ends with its process, whatever the record says.
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
    """Return what `_startable` depends on beside the leases."""
    return registry.hub_backoff_until, registry.owners.absent, registry.policy.share


def _startable(registry: Registry, records: Iterable[LeaseRecord]) -> Iterator[Lease]:
    """Yield leases as planned, without the waiting jobs of absent owners."""
    for record in records:
        if record.state is not State.PENDING or record.lease.user not in registry.owners.absent:
            yield _with_retry(registry, record)


def _as_site_shares(registry: Registry, lease: Lease) -> Lease:
    """Return a lease whose owner's consent to share counts only where the site lets jobs share."""
    if not lease.share:
        return lease
    job = registry.jobs.get(lease.id[1:])
    key = pair_key(job.user, job.command) if job is not None else ""
    return replace(lease, share=registry.policy.share, pair_key=key)


def pair_key(user: str, command: tuple[str, ...]) -> str:
    """Return the key of `Lease.pair_key` for what a user runs."""
    return blake2b("\0".join((user, *command)).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _sharing(registry: Registry, record: LeaseRecord, now: float, lease: Lease) -> Lease:
    """Return a job with what decides whether it shares a GPU."""
    if not lease.share:
        return lease
    observation = registry.observations[record.id]
    peak, spare = observation.peak.peak(now), 0
    if peak is not None and observation.rates.is_known and not lease.host:
        spare = max(0, min(record.limits.values(), default=0) - sharing.needed_bytes(peak))
    return replace(
        _as_site_shares(registry, lease),
        spare_bytes=spare,
        needs_bytes=sharing.needed_bytes(observation.most_bytes),
    )


def _saved_bytes(record: LeaseRecord, asleep: LeaseSample | None) -> int:
    """Return the host memory that a lease takes suspended, or has reserved as a guest."""
    if record.lease.host:
        return record.guest_bytes
    return sum(asleep.saved_bytes.values()) if asleep else record.lease.saved_bytes


def _with_retry(registry: Registry, record: LeaseRecord) -> Lease:
    """Return the lease of a job in the queue: what it waits for beside capacity is not in its record."""
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
    """Return since when no kernel of a lease has run a cell and its GPU did nothing; None: busy.

    Work of kernels on the processor counts until `holds_until`.
    """
    observation = registry.observations[record.id]
    active = max(observation.active_at, observation.kernel_active_at, record.lease.granted_at)
    if observation.kernel_busy:
        active = now
    if (until := holds_until(registry, record)) is not None:
        active = min(active, until)
    return None if now - active < _ACTIVE_S else active


def holds_until(registry: Registry, record: LeaseRecord) -> float | None:
    """Return until when kernels keep a session busy without GPU work (``max_hold``); None: always."""
    max_hold_s = registry.policy.max_hold_of(record.lease.project)
    if max_hold_s is None or record.is_job:
        return None
    return gpu_active_at(registry, record) + max_hold_s


def gpu_active_at(registry: Registry, record: LeaseRecord) -> float:
    """Return the last moment at which a lease worked on its GPU, or got it."""
    return max(registry.observations[record.id].gpu_active_at, record.lease.granted_at)


def at_work(registry: Registry, now: float) -> set[str]:
    """Return the ids of leases that were seen to use a GPU a moment ago, whatever their kernels say."""
    return {id for id in registry.index.placed if now - registry.observations[id].active_at < _ACTIVE_S}


def never_sleeps(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether a session is marked as never to be suspended, by a right that its project has."""
    project = registry.policy.project_config(record.lease.project)
    return record.never_sleep and project is not None and project.never_sleep


def resumed_without_intent(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether a lease was resumed without a stored intent: it holds its capacity again."""
    sample = registry.observations[record.id].sample
    return sample is not None and sample.unconfirmed and record.state is State.SUSPENDED


def may_be_awake(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the record of a suspended lease that the helper has awake may say so now.

    Where it was resumed without a stored intent, leases that the records have on its capacity go
    first: those that have ended are recorded so, the helper refuses those that were granted meanwhile
    until this one is confirmed, and nothing more is granted there.
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
    """Return why a lease cannot be suspended; empty: it can."""
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
    """Return why a suspended lease resumes on its own devices alone; empty: it may move."""
    if record.moves:
        return registry.devices.move_obstacle(record.lease.devices)
    job = registry.job_of(record)
    if job is not None and not wire.decode_stored(job.request, wire.JobTerms).move:
        return "it was submitted not to move"
    return "its processes may not be able to open another GPU"


def is_place_of(record: LeaseRecord, devices: Sequence[str]) -> bool:
    """Return whether a lease that may move can be on these devices: as many as its own."""
    return record.moves and len(devices) == len(record.lease.devices)


def sampled_elsewhere(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the helper has a lease on other devices than its record says."""
    sample = registry.observations[record.id].sample
    if sample is None or not sampled_since_entry(registry, record):
        return False
    return is_place_of(record, sample.devices) and set(sample.devices) != set(record.lease.devices)


def sampled_since_entry(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the lease was measured after it entered its present state."""
    return registry.observations[record.id].measured_at > record.entered_at


def share_differs(registry: Registry, record: LeaseRecord) -> bool:
    """Return whether the helper was asked for another share of time than is configured now.

    What an earlier broker asked for is read from the sample, where it is in force.
    """
    observation, configured = registry.observations[record.id], registry.policy.compute_share
    if observation.share_asked is not None or observation.sample is None:
        return observation.share_asked not in (None, configured)
    return bool(observation.sample.share_reason) or observation.sample.compute_share is not configured
