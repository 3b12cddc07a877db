"""Requests of seats to the device helper of their node, and the helper's reports about seats.

A seat is the pod that Kubernetes places and evicts for one lease.  It sends lines of JSON, in the
format of `protocol.helper`, to the helper over a unix socket that only root can use:

* ``sit`` (`Sit`) comes once and first, and is answered with `Seated`.  From then on the open connection
  is the seat.  A lease has device memory only while one of its seats with all its devices is connected.
* ``vacate`` (`Vacate`) comes once, and is answered with `Vacated` when the driver shows no memory of
  the lease, or when another seat of it is connected.

A seat names a lease by its id.  For the helper each attempt ``<id>-<number>`` is a lease
(`LeaseRecord.handle`), which has the seats of its id.

`Sit.epoch` is the epoch of the broker that created the seat.  A helper that has seen a newer broker
refuses a seat that it has never accepted, but accepts one that returns (`Sit.returns`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SeatOutcome(enum.StrEnum):
    """The outcome for the device memory of a lease whose seat left."""

    EMPTY = "empty"  # there was none
    SUSPENDED = "suspended"  # it is in host memory
    ENDED = "ended"  # its processes were ended, because they could not be suspended in time
    SEATED = "seated"  # another seat of the lease is connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Sit:
    """Connect a seat, with the UUIDs of the devices that the driver shows in it."""

    seat: str
    lease: str  # the id, without the number of an attempt
    epoch: int
    devices: tuple[str, ...]
    grace_s: float  # between the request to end and the kill of the seat
    returns: bool = False  # this helper or an earlier one has accepted the seat before
    leaving: bool = False  # it was requested to end, so `Vacate` follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """The seat is connected."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacate:
    """Take the memory of the lease off the devices, within the ``left_s`` that remain of the seat's grace."""

    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacated:
    """No device memory of the lease needs this seat any more."""

    outcome: SeatOutcome
    reason: str = ""  # why the processes were ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatSample:
    """One seat that is connected to the helper, or whose connection has just been lost."""

    seat: str
    lease: str  # the id
    devices: tuple[str, ...]
    connected: bool = True
    leaving: bool = False  # it has sent `Vacate`


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSeats:
    """Request ``count_seats`` of the broker, and its answer: what a seat must have for its lease.

    With ``by_number``, in a unit pool, the broker chooses the devices of leases, and a seat stands for the
    number of its devices.  Else it stands for its own devices.
    """

    by_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPod:
    """A pod to which the kubelet has given GPUs, with their ids in the device plugin."""

    namespace: str
    name: str
    devices: tuple[str, ...]
