"""Requests of seats to the device helper of their node, and what the helper tells the broker of them.

A seat is the pod that Kubernetes places and evicts for one lease.  It speaks to the helper over a
unix socket that only root can use, in lines of JSON as `protocol.helper` has them:

* ``sit`` (`Sit`), once, first: answered with `Seated`.  From then on the open connection is the
  seat.  A lease has device memory only while one of its seats with all of its devices is connected.
* ``vacate`` (`Vacate`), once: answered with `Vacated` when the driver shows no memory of the lease,
  or when another seat of it is connected.

A seat names a lease by its id.  Each attempt of it, ``<id>-<number>``, is a lease of the helper
(`LeaseRecord.handle`), and sits where the id sits.

`Sit.epoch` is that of the broker that created the seat.  A helper that has seen a newer broker
refuses a seat that it has never accepted; one that comes back after it was accepted
(`Sit.returns`) stays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SeatOutcome(enum.StrEnum):
    """What became of the device memory of a lease whose seat left."""

    EMPTY = "empty"  # it had none
    SUSPENDED = "suspended"  # it is parked in host memory
    ENDED = "ended"  # the processes that held it were ended, because it could not be parked in time
    SEATED = "seated"  # another seat of the lease is connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Sit:
    """Connect a seat, with the devices (UUIDs) that the driver shows in it."""

    seat: str
    lease: str  # the id, without the number of an attempt
    epoch: int
    devices: tuple[str, ...]
    grace_s: float  # between the request to end and the kill of the seat
    returns: bool = False  # this helper, or the one before, accepted the seat earlier
    leaving: bool = False  # it has been asked to end: `vacate` follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """The seat is connected."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacate:
    """Take the memory of the lease off the devices; ``left_s`` is what is left of the seat's grace."""

    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacated:
    """No memory of the lease is left that this seat stood for."""

    outcome: SeatOutcome
    reason: str = ""  # why the processes were ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatSample:
    """One seat that is connected to the helper, or whose connection was lost a moment ago."""

    seat: str
    lease: str  # the id
    devices: tuple[str, ...]
    connected: bool = True
    leaving: bool = False  # it has asked to vacate


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSeats:
    """Request ``count_seats`` of the broker, and its answer: how a seat stands for the devices of its lease.

    In a unit pool the broker chooses the devices of leases, and a seat stands for as many as it has.
    """

    by_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPod:
    """A pod to which the kubelet has given GPUs, and their ids, as the device plugin names them."""

    namespace: str
    name: str
    devices: tuple[str, ...]
