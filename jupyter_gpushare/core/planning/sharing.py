"""Two jobs on one GPU: which waiting job becomes a guest on what another one holds and does not use.

A job becomes a guest where the round found nothing else for it: no capacity that is free, lent, being
released or reclaimable.  It holds no capacity, so it takes nothing from anybody, and is first to go:

* A guest that the round found capacity for has it (`scheduler`): it moves there, or keeps the device that
  its host has left.
* A guest is suspended when its host gives the device up or takes its consent back, and when the pair does not
  pay (`pairs`).  One that can no longer be suspended is stopped: its host could not have its memory back.
* The helper suspends it by itself when its host needs the memory (`gpu.moves.guests`).

A *host* is a running job that holds a whole device and leaves memory there unused.  A device has one guest.
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
_Host = tuple[Lease, list[DeviceCapacity]]  # with its devices that a guest may be on

# Why a job may wait that starts as a guest: it lacks capacity, and nothing is on its way to it.
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
# What a job for a whole GPU needs at least of one, as long as nobody has seen what it uses: 1 / this.
_PART = 4
# So many waiting jobs are looked at in a round at most.
MOST_TRIED = 64
# A job is watched for so long before it may be a host.
WATCHED_S = 600.0
# What a job keeps of its limit beyond the most that it was seen to use: a tenth of that, and this.
_HEADROOM_BYTES = 512 << 20


def needed_bytes(most_bytes: int) -> int:
    """Return the device memory that a job needs which was seen to use ``most_bytes``; 0: it used none."""
    return most_bytes + most_bytes // 10 + _HEADROOM_BYTES if most_bytes else 0


def share_devices(done: SchedulingRound, parted: Pairs) -> None:
    """Add to a round that has run which guests leave, and which jobs become guests."""
    state, queues = done.state, done.queues
    decided = {action.lease for action in done.actions}
    leaving = {a.lease: a.for_lease for a in done.actions if isinstance(a, Suspend | Requeue)}
    for guest in sorted(state.guests.values(), key=lambda x: x.id):
        why = _parts(done, guest, leaving, parted)
        if why and guest.id not in decided and guest.retry_at <= done.now:
            _end(done, guest, why, leaving.get(guest.host, ""))
    able = (x for x in state.hosts.values() if x.id not in leaving and x.suspendable)
    hosts = [(x, rooms) for x in able if held_by(x) == WHOLE_GPU and (rooms := _rooms(state, x))]
    if not hosts:
        return
    hosts.sort(key=lambda each: (-each[0].spare_bytes, each[0].id))
    between = done.settings.share_between_projects
    projects = queues.by_project if between else {host.project for host, _ in hosts}
    for job, fit in queues.sharing(projects, MOST_TRIED):
        if job.id in done.served or job.id in state.guests or done.reason(job, fit) not in _LACKS_CAPACITY:
            continue
        own = [each for each in hosts if between or each[0].project == job.project]
        if found := _join(done, job, own, parted):
            hosts.remove(found)


def _parts(done: SchedulingRound, guest: Lease, leaving: Container[str], parted: Pairs) -> Why | None:
    """Return why a guest has to leave, if it has to."""
    state = done.state
    host = state.leases.get(guest.host)
    is_there = host is not None and host.state is State.RUNNING and {*guest.devices} <= {*host.devices}
    if host is None or not is_there or host.id in leaving:
        # It stays where the device will be its own.
        return None if done.places.get(guest.id) == guest.devices else Why.HOST_LEFT
    if not (host.share and guest.share) or (host.pair_key, guest.pair_key) in parted:
        return Why.PAIR_PARTED
    return None if state.can_suspend(guest) else Why.CANNOT_YIELD


def _end(done: SchedulingRound, guest: Lease, why: Why, for_lease: str) -> None:
    if guest.state is State.RUNNING and done.state.can_suspend(guest):
        done.actions.append(Suspend(guest.id, why, for_lease))
    elif guest.state in (State.GRANTED, State.RUNNING):
        done.actions.append(Requeue(guest.id, why, for_lease))


def _rooms(state: ClusterState, host: Lease) -> list[DeviceCapacity]:
    """Return the devices of a host that a guest may be on."""
    capacities = state.capacities_of(host)
    if any(c.guest for c in capacities):
        return []
    return [c for c in capacities if c.device.usable and c.device.suspendable and not c.device.profile]


def _join(done: SchedulingRound, job: Lease, hosts: list[_Host], parted: Pairs) -> _Host | None:
    """Let a waiting job start or resume as the guest of the first of ``hosts`` that has room for it."""
    state = done.state
    avoided = {name for name, until_at in job.avoids if until_at > done.now}
    resumes_on = set(state.resume_devices(job))
    for host, rooms in hosts:
        if (host.pair_key, job.pair_key) in parted:
            continue
        for capacity in rooms:
            if job.devices and capacity not in resumes_on:
                continue
            if avoided.isdisjoint((capacity.device.node, capacity.device.uuid)) and (
                action := _joining(state, job, host, capacity.device)
            ):
                done.actions.append(action)
                state.host_free -= action.guest_bytes - job.saved_bytes
                return host, rooms
    return None


def _joining(state: ClusterState, job: Lease, host: Lease, device: Device) -> Grant | Resume | None:
    """Return the action by which a job becomes a guest on a device; None: it needs more memory there."""
    held = held_by(job) if job.devices else device.demand_milli(job.size)
    if held > WHOLE_GPU:
        return None
    most = device.grantable_bytes * held // WHOLE_GPU
    unknown = most // _PART if held == WHOLE_GPU else most
    needs = min(most, max(job.needs_bytes or unknown, job.saved_bytes))
    given = min(most, host.spare_bytes, state.host_free + job.saved_bytes)
    if given < needs:
        return None
    devices = (device.uuid,)
    if job.devices:
        return Resume(job.id, Why.GUEST, () if devices == job.devices else devices, host.id, given)
    return Grant(job.id, devices, held, Why.GUEST, borrowed=True, host=host.id, guest_bytes=given)
