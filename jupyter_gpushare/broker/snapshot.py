"""The snapshot that `core.plan` decides on: the book's records with what is measured filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.records import LeaseRecord
from jupyter_gpushare.core.idle import adaptive_timeout_s
from jupyter_gpushare.core.model import WHOLE_GPU, Cluster, Device, Lease, Project, State
from jupyter_gpushare.gpu.verbs import Phase

# Shorter pauses between CUDA calls are not idleness.
_ACTIVE_S = 2.0


def cluster(book: Book, now: float, extra: Iterable[Lease] = ()) -> Cluster:
    """Return the snapshot at ``now``; ``extra`` are leases that are only being considered."""
    budget = book.inventory.host_budget_bytes if book.inventory else 0
    return Cluster(
        devices=tuple(devices(book)),
        projects=projects(book),
        leases=(*(measured(book, r, now) for r in book.leases.values()), *extra),
        settings=book.policy.settings(budget),
        lags_gpu_s=book.balance.lags_gpu_s,
    )


def total_milli(book: Book) -> int:
    """Return what all devices are together."""
    return WHOLE_GPU * len(book.inventory.devices) if book.inventory else 0


def projects(book: Book) -> tuple[Project, ...]:
    """Return all projects with the numbers in force."""
    total = total_milli(book)
    return tuple(p.project(total, book.overrides.get(p.name)) for p in book.policy.projects)


def devices(book: Book) -> Iterator[Device]:
    """Return all devices, and whether they can be used now."""
    if book.inventory is None:
        return
    # A device that the helper inventoried and does not measure any more is out of service.
    healthy = {d.uuid: d.healthy for d in book.sample.devices} if book.sample else None
    for device in book.inventory.devices:
        yield Device(
            uuid=device.uuid,
            memory_bytes=device.memory_bytes,
            reserve_bytes=device.reserve_bytes,
            node=book.inventory.host,
            island=device.island,
            name=device.name,
            profile=device.profile,
            usable=(device.healthy if healthy is None else healthy.get(device.uuid, False))
            and device.uuid not in book.strayed,
            suspendable=device.suspendable,
        )


def add_up(book: Book, now: float) -> None:
    """Bring up to date what each project had against its fair share (`balance`)."""
    known = projects(book)
    if len(known) < 2 or not book.policy.catch_up_s:
        return
    capacity = WHOLE_GPU * sum(device.usable for device in devices(book))
    book.balance.add_up(known, capacity, (record.lease for record in book.leases.values()), now)


def measured(book: Book, record: LeaseRecord, now: float) -> Lease:
    """Return a lease with what is measured about it filled in."""
    live, lease = book.live[record.id], record.lease
    sample = live.sample
    # A process that ended in its sleep keeps nothing, whatever was saved.
    asleep = sample is not None and sample.phase is Phase.SUSPENDED and lease.state is State.SUSPENDED
    return replace(
        lease,
        saved_bytes=sum(sample.saved_bytes.values()) if sample and asleep else lease.saved_bytes,
        used_bytes=sum(sample.used_bytes.values()) if sample else 0,
        idle_since_at=idle_since(book, record, now),
        wanted=live.wanted,
        retry_at=max(live.retry_at, book.no_job_before) if record.is_job else live.retry_at,
        suspendable=not suspend_obstacle(book, record),
        idle_timeout_s=_own_timeout_s(book, record),
    )


def _own_timeout_s(book: Book, record: LeaseRecord) -> float | None:
    if not book.policy.adaptive_idle or record.is_job:
        return None
    gpus = record.lease.held_milli * record.lease.device_count / WHOLE_GPU
    return adaptive_timeout_s(book.live[record.id].habit.past, gpus) if gpus else None


def idle_since(book: Book, record: LeaseRecord, now: float) -> float | None:
    """Return since when neither a kernel nor the GPU of a lease did anything; None: busy."""
    live = book.live[record.id]
    active = max(live.active_at, live.kernel_active_at, record.lease.granted_at)
    return None if live.kernel_busy or now - active < _ACTIVE_S else active


def suspend_obstacle(book: Book, record: LeaseRecord) -> str:
    """Return why a lease cannot be suspended; empty: it can."""
    live = book.live[record.id]
    if live.not_suspendable and book.clock() < live.retry_at:
        return live.not_suspendable
    if live.sample is not None and not live.sample.suspendable:
        return live.sample.suspend_reason
    for device in book.inventory.devices if book.inventory else ():
        if device.uuid in record.lease.devices and not device.suspendable:
            return device.suspend_reason
    return ""
