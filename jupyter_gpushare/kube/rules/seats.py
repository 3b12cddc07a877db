"""Seats: their states, the terms on which KAI schedules them, and the size that they request.

==========  ================  ====================  ==================  =================================
class       queue             priority class        preemptibility      of which leases
==========  ================  ====================  ==================  =================================
`SESSION`   ``<p>-build``     gpushare-session      ``non-preemptible``  session with a guarantee
`RETURN`    return root, leaf gpushare-session      ``non-preemptible``  the same, until it is back
`BORROWED`  ``<p>-train``     gpushare-borrowed     ``preemptible``      session without a guarantee
`TRAIN`     ``<p>-train``     gpushare-train-LEVEL  ``preemptible``      job
`IDLE`      idle root, leaf   gpushare-idle         ``preemptible``      idle session that can be suspended
`YIELD`     idle root, leaf   gpushare-yield        ``preemptible``      in the way of a returning owner
==========  ================  ====================  ==================  =================================

The three fields belong to the seat's PodGroup and change in one patch.  ``preemptible`` is always
set, because KAI otherwise derives it from the value of the priority class.

A return has its own root because KAI compares the roots first, and places a project within its quota
before a project beyond it.  Otherwise a session beyond quota on another node would put the return
behind every job that waits within the quota of its project, even the yielding job.  Each of them would
take the freed GPU, yield, and be evicted in turn.  The guarantee of the return ensures that it is
within its project's quota (`claims`).

KAI counts a fraction of a GPU against queues in hundredths, rounded to the nearest, and adds them up
as floats in random order.  It compares them with a device as whole MiB (v0.16.8,
``pkg/scheduler/api/resource_info/gpu_resource_requirment.go:265-269``,
``pkg/scheduler/api/node_info/node_info.go:611-617``).  So binary fractions are not exact: 1/8 counts
0.13.  A request therefore has the exact size, and guarantees against a quota are counted as KAI counts
them (`counted_centi`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease, Why
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest

IDLE_ROOT = "gpushare-idle"
IDLE_LEAF = "gpushare-idle-sessions"
YIELD_LEAF = "gpushare-yield"
RETURN_ROOT = "gpushare-return"
RETURN_LEAF = "gpushare-return-sessions"
# KAI treats a request of at most a hundredth as no request (gpu_resource_requirment.go:20,89-92).
MIN_MILLI = 15
_MIB = 1 << 20
# A project's queues are `<p>`, `<p>-build` and `<p>-train`: names of at most 63 characters, and labels.
_PROJECT = re.compile(r"[a-z]([-a-z0-9]{0,55}[a-z0-9])?")


class Seating(enum.StrEnum):
    """State of a seat."""

    WAITING = "waiting"  # KAI has not placed it
    PLACED = "placed"  # it holds capacity of its node
    LEAVING = "leaving"  # evicted or deleted; it holds its capacity until it is gone
    GONE = "gone"  # its pod ended by itself


class SeatClass(enum.StrEnum):
    """Class of the terms on which KAI schedules a seat."""

    SESSION = "session"
    RETURN = "return"
    BORROWED = "borrowed"
    TRAIN = "train"
    IDLE = "idle"
    YIELD = "yield"


@dataclass(frozen=True, slots=True)
class Terms:
    """Fields of a PodGroup by which KAI schedules it."""

    queue: str
    priority_class: str
    preemptibility: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The seat that one lease needs now; a lease without a demand needs none."""

    lease: str
    project: str
    seat_class: SeatClass
    size: Size
    level: int = 0  # the LAS queue of a job
    node: str = ""  # the node of its processes
    not_nodes: tuple[str, ...] = ()  # nodes with no guarantee left, or that could not place its server
    instead_of: tuple[str, ...] = ()  # names of replaced seats; KAI's evictions for them are for this seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """GPU request of a seat; exactly one of the three fields is not 0."""

    fraction_milli: int = 0  # annotation ``gpu-fraction``, in thousandths
    memory_mib: int = 0  # annotation ``gpu-memory``
    gpus: int = 0  # resource ``nvidia.com/gpu``

    @property
    def fraction(self) -> str:
        """Value of the annotation ``gpu-fraction``: ``0.25``."""
        return f"{self.fraction_milli / WHOLE_GPU:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """State of one seat, as KAI and the nodes report it."""

    name: str
    lease: str
    seating: Seating
    terms: Terms
    node: str = ""
    not_nodes: tuple[str, ...] = ()  # of its demand when it was created
    devices: tuple[str, ...] = ()  # UUIDs; empty until the seat is connected to the helper of its node
    since_at: float = 0.0  # creation, in Unix time, as `ends_at`
    why: Why | None = None  # KAI's reason that it waits
    requested: Request | None = None  # None: its pod is gone or requests no GPU
    is_binding: bool = False  # KAI has chosen its node and may have to reserve a GPU on it first
    instead_of: tuple[str, ...] = ()  # of its demand
    evicted_for: str = ""  # name of the seat for which KAI evicts this one
    ends_at: float = 0.0  # time at which the pod of a leaving seat is killed


def terms(demand: Demand) -> Terms:
    """Return queue, priority class and preemptibility of a demand."""
    match demand.seat_class:
        case SeatClass.SESSION:
            return Terms(f"{demand.project}-build", "gpushare-session", "non-preemptible")
        case SeatClass.RETURN:
            return Terms(RETURN_LEAF, "gpushare-session", "non-preemptible")
        case SeatClass.BORROWED:
            return Terms(f"{demand.project}-train", "gpushare-borrowed", "preemptible")
        case SeatClass.TRAIN:
            return Terms(f"{demand.project}-train", f"gpushare-train-{demand.level}", "preemptible")
        case SeatClass.IDLE:
            return Terms(IDLE_LEAF, "gpushare-idle", "preemptible")
        case _:
            return Terms(YIELD_LEAF, "gpushare-yield", "preemptible")


def check_project(name: str) -> str:
    """Return ``name`` if a queue can have this name of a project.

    Raises:
        InvalidRequest: it is not a DNS label of at most 57 characters, or it begins with ``gpushare``.
    """
    if not _PROJECT.fullmatch(name) or name.startswith("gpushare"):
        raise InvalidRequest(
            "%1 cannot be the name of a queue: write up to 57 small letters, digits and hyphens, "
            "the first one a letter, not beginning with gpushare",
            repr(name[:64]),
        )
    return name


def request(size: Size, devices: Iterable[Device]) -> Request:
    """Return the GPU request of a seat of this size.

    An amount of memory is scaled up by the reserve of the devices, because KAI hands out all memory of a
    device and leases get it without the reserve.

    Raises:
        InvalidRequest: the size is a MIG instance, or less than KAI counts.
    """
    if size.profile:
        raise InvalidRequest("a MIG instance cannot be requested on Kubernetes: ask for a part of a GPU")
    if size.memory_bytes:
        scales = [(d.memory_bytes, d.grantable_bytes) for d in devices if d.grantable_bytes > 0]
        scaled_bytes = max(
            (-(-size.memory_bytes * total // grantable) for total, grantable in scales),
            default=size.memory_bytes,
        )
        return Request(memory_mib=-(-scaled_bytes // _MIB))
    if size.device_count > 1 or size.fraction_milli == WHOLE_GPU:
        return Request(gpus=size.device_count)
    if size.fraction_milli < MIN_MILLI:
        raise InvalidRequest(
            "%1 GPU is too small a part on Kubernetes: at least %2",
            f"{size.fraction_milli / WHOLE_GPU:g}",
            f"{MIN_MILLI / WHOLE_GPU:g}",
        )
    return Request(fraction_milli=size.fraction_milli)


def counted_centi(size: Size, devices: Iterable[Device]) -> int:
    """Return the maximum hundredths of a GPU that KAI counts against a queue for a seat of this size."""
    if size.memory_bytes:
        return max((-(-d.demand_milli(size) // 10) for d in devices if not d.units), default=100)
    return (size.fraction_milli + 5) // 10 * size.device_count


def return_is_certain(lease: Lease, devices: Iterable[Device]) -> bool:
    """Return whether a suspended lease gets its own devices back with any seat on its node.

    It does on a node with one GPU, in a unit pool, and if it has all GPUs of its node.  Otherwise KAI may
    place the seat on another GPU of the node, but device memory returns only to the GPU that it came from.
    """
    known = tuple(devices)
    mine = [device for device in known if device.uuid in lease.devices]
    if any(device.units or device.pool_obstacle for device in mine):
        return len(mine) == len(lease.devices) and not any(device.pool_obstacle for device in mine)
    nodes = {device.node for device in mine}
    return len(nodes) == 1 and {d.uuid for d in known if d.node in nodes} == set(lease.devices)
