"""Two jobs on one GPU: which waiting job becomes a guest on capacity that another job holds but does not use.

A job becomes a guest if the round found no capacity for it that is free, lent, being released or
reclaimable.  A guest holds no capacity, so it takes nothing from other leases, and it leaves first:

* If the round found capacity for a guest (`scheduler`), the guest moves to it, or keeps the device that its
  host has left.
* A guest is suspended when its host gives the device up or withdraws its consent, and when the pair does not
  pay (`pairs`).  A guest that can no longer be suspended is stopped, so that its host can have its memory.
* The helper suspends a guest by itself when the host needs the memory (`gpu.moves.guests`).

A *host* is a running job that holds a whole device and leaves memory on it unused.  A device has one guest.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Device,
    Grant,
    Lease,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
    held_by,
)
from jupyter_gpushare.core.planning.scheduler import SchedulingRound

Pairs = Collection[tuple[str, str]]
_Host = tuple[Lease, list[DeviceCapacity]]  # a host and its devices that a guest may be on

# Reasons of a waiting job that may start as a guest: it lacks capacity, and none is being released for it.
_LACKS_CAPACITY = frozenset(
    {
        Why.NO_CAPACITY,
        Why.OWN_DEVICES,
        Why.NOT_WORTH_IT,
        Why.RESERVED,
        Why.NOT_BYPASSED,
        Why.IN_LINE,
        Why.JOB_HOST_MEMORY,
    }
)
# A job for a whole GPU counts as needing 1 / `_PART` of it until its use has been measured.
_PART = 4
# The maximum number of waiting jobs that a round tries as guests.
MAX_TRIED = 64
# The time for which a job is watched before it may be a host.
WATCHED_S = 600.0
# Memory that a host keeps in addition to 1.1 times its measured maximum.
_HEADROOM_BYTES = 512 << 20


def needed_bytes(max_bytes: int) -> int:
    """Return the device memory that a job with a measured maximum of ``max_bytes`` needs; 0 if that is 0."""
    return max_bytes + max_bytes // 10 + _HEADROOM_BYTES if max_bytes else 0


def share_devices(done: SchedulingRound, parted: Pairs) -> None:
    """Let guests leave, and let jobs become guests, after a round has run; add these actions to it."""
    state, queues = done.state, done.queues
    decided = {action.lease for action in done.actions}
    leaving = {a.lease: a.for_lease for a in done.actions if isinstance(a, Suspend | Requeue)}
    for guest in sorted(state.guests.values(), key=lambda x: x.id):
        why = _must_leave(done, guest, leaving, parted)
        if why and guest.id not in decided and guest.retry_at <= done.now:
            _end(done, guest, why, leaving.get(guest.host, ""))
    able = (x for x in state.hosts.values() if x.id not in leaving and x.suspendable)
    hosts = [(x, free) for x in able if held_by(x) == WHOLE_GPU and (free := _devices_for_guest(state, x))]
    if not hosts:
        return
    hosts.sort(key=lambda each: (-each[0].spare_bytes, each[0].id))
    any_project = done.settings.share_between_projects
    projects = queues.by_project if any_project else {host.project for host, _ in hosts}
    for job, fit in queues.sharing(projects, MAX_TRIED):
        if job.id in done.served or job.id in state.guests or done.reason(job, fit) not in _LACKS_CAPACITY:
            continue
        allowed = [each for each in hosts if any_project or each[0].project == job.project]
        if found := _join(done, job, allowed, parted):
            hosts.remove(found)


def _must_leave(done: SchedulingRound, guest: Lease, leaving: Container[str], parted: Pairs) -> Why | None:
    """Return why a guest has to leave; None if it may stay."""
    state = done.state
    host = state.leases.get(guest.host)
    is_hosted = host is not None and host.state is State.RUNNING and {*guest.devices} <= {*host.devices}
    if host is None or not is_hosted or host.id in leaving:
        # It stays if the device will be its own.
        return None if done.places.get(guest.id) == guest.devices else Why.HOST_LEFT
    if not (host.share and guest.share) or (host.pair_key, guest.pair_key) in parted:
        return Why.PAIR_PARTED
    return None if state.can_suspend(guest) else Why.CANNOT_YIELD


def _end(done: SchedulingRound, guest: Lease, why: Why, for_lease: str) -> None:
    if guest.state is State.RUNNING and done.state.can_suspend(guest):
        done.actions.append(Suspend(guest.id, why, for_lease))
    elif guest.state in (State.GRANTED, State.RUNNING):
        done.actions.append(Requeue(guest.id, why, for_lease))


def _devices_for_guest(state: ClusterState, host: Lease) -> list[DeviceCapacity]:
    """Return the devices of a host that a guest may be on."""
    capacities = state.capacities_of(host)
    if any(c.guest for c in capacities):
        return []
    return [c for c in capacities if c.device.usable and c.device.suspendable and not c.device.profile]


def _join(done: SchedulingRound, job: Lease, hosts: list[_Host], parted: Pairs) -> _Host | None:
    """Make a waiting job the guest of the first host with enough memory; return that host, or None."""
    state = done.state
    avoided = {name for name, until_at in job.avoids if until_at > done.now}
    resumes_on = set(state.resume_devices(job))
    for host, devices in hosts:
        if (host.pair_key, job.pair_key) in parted:
            continue
        for capacity in devices:
            if job.devices and capacity not in resumes_on:
                continue
            if avoided.isdisjoint((capacity.device.node, capacity.device.uuid)) and (
                action := _guest_action(state, job, host, capacity.device)
            ):
                done.actions.append(action)
                state.host_free -= action.guest_bytes - job.saved_bytes
                return host, devices
    return None


def _guest_action(state: ClusterState, job: Lease, host: Lease, device: Device) -> Grant | Resume | None:
    """Return the action that makes a job a guest on a device; None: the job needs more memory."""
    held = held_by(job) if job.devices else device.demand_milli(job.size)
    if held > WHOLE_GPU:
        return None
    max_bytes = device.grantable_bytes * held // WHOLE_GPU
    default_bytes = max_bytes // _PART if held == WHOLE_GPU else max_bytes
    min_bytes = min(max_bytes, max(job.needs_bytes or default_bytes, job.saved_bytes))
    guest_bytes = min(max_bytes, host.spare_bytes, state.host_free + job.saved_bytes)
    if guest_bytes < min_bytes:
        return None
    devices = (device.uuid,)
    if job.devices:
        return Resume(job.id, Why.GUEST, () if devices == job.devices else devices, host.id, guest_bytes)
    return Grant(job.id, devices, held, Why.GUEST, borrowed=True, host=host.id, guest_bytes=guest_bytes)
