"""Decide whose turn it is, so that leases that compute on one device together share its time by weight.

This module decides only; it has no clocks, threads or files.  `TurnRing.step` gets what the leases do
now (`Contender`) and returns the turn of each.  A lease that computes alone on its devices has no
turns (`Turn.NONE`) and is never held.

* **Order.**  A lease has a virtual time on each of its devices: the device time that it got, divided by
  its share (stride scheduling, Waldspurger and Weihl 1995).  The virtual time of a device is the lowest of
  the leases that compute on it.  The lease with the lowest lead over the device goes first (its virtual
  time minus the device's).  A lease that computes again after a pause starts at the device's virtual time,
  minus at most `CREDIT_S` for unused time.  With such credit it gets the next turn, and the running turn
  ends early.
* **Length.**  Each lease gets its part of a round of at most `ROUND_S` by weight, from `SHORTEST_S` to
  `LONGEST_S`.  A lease whose part would be shorter skips rounds, because its virtual time runs ahead.
* **End.**  A turn closes early enough for the work that the lease has in flight (`ahead_s`).  The next turn
  begins once the library has proved that this work is done, or after `DRAIN_S`.
* **Debt.**  A lease is charged until that proof, also after its turn: work that runs over delays its next
  turns (the deficit of Shreedhar and Varghese 1996).  If several leases have work on a device, the driver
  divides the device equally between their *processes*, and they are charged the same way.
* A **fair** lease gives up its turn as soon as it has nothing to compute.  A **strict** lease never gets
  more than its share of the time, even alone: it has a token bucket of `LONGEST_S`.
* A lease of several devices has its turn on all of them at once.  Its place in the order is the one on the
  device with its highest lead, because virtual times of two devices cannot be compared.  While it waits for
  its devices, no turn begins on a free one of them that would not end in time.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LONGEST_S = 0.2
SHORTEST_S = 0.01
ROUND_S = 0.4
DRAIN_S = 0.1
# The work that a lease may have in flight: a fraction of the length of its turn, and a minimum.
AHEAD_OF_TURN = 0.1
MIN_AHEAD_S = 0.002
# The maximum credit for time that a lease did not use, and the maximum debt.
CREDIT_S = 0.1
DEBT_S = 10.0
# A lease of several devices gets less of one device while it waits for another: its maximum credit for that.
WAITED_S = 1.0
# Work that was in flight before the lease had turns is not charged outside its turns for this long.
FORGIVEN_S = 10.0
# After a step that comes later than this, who computed since is unknown (the helper was stopped).
LATE_S = 1.0
# A measured share is the mean over this time.
MEASURED_S = 60
# After the last competition a lease that is alone keeps its turns for this long, ready for the next rival.
LINGER_S = 1.0
_EPSILON = 1e-9


class Turn(enum.Enum):
    """What a lease may do on its devices."""

    NONE = "none"  # it is alone and may launch
    OPEN = "open"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Contender:
    """What a lease does now, and its share."""

    devices: tuple[str, ...]
    share: float  # of the time of each device: above 0, at most 1
    strict: bool = False
    busy: int = 0  # processes with work that is not proved to be done
    waits: bool = False  # one of its calls is held

    @property
    def computes(self) -> bool:
        """Whether it uses, or wants to use, its devices."""
        return self.busy > 0 or self.waits


@dataclass(slots=True)
class _Member:
    now: Contender
    active: bool = False
    competes: bool = False
    virtual_s: dict[str, float] = field(default_factory=dict)  # by device
    lead_s: float = 0.0  # the highest lead over the virtual time of one of its devices
    arrived: int = 0  # a number that grows with each arrival
    cuts: bool = False  # it has just begun to compute, with credit, and ends a running turn early
    is_open: bool = False
    opened_at: float = 0.0
    ends_at: float = 0.0
    length_s: float = LONGEST_S
    drains_since: float | None = None  # when its turn closed with work that is not yet proved to be done
    # Processes with work from before it had a rival; that work is not charged outside its turns.
    forgiven: int = 0
    forgiven_until: float = 0.0
    tokens_s: float = 0.0  # strict: device time that it may use
    history: deque[_Second] = field(default_factory=lambda: deque(maxlen=MEASURED_S))

    @property
    def uses(self) -> int:
        """The number of its processes among which a device divides its time."""
        return max(1, self.now.busy) if self.is_open else self.now.busy

    @property
    def holds(self) -> bool:
        """Whether it keeps turns of other leases from beginning on its devices."""
        return self.is_open or self.drains_since is not None


@dataclass(slots=True)
class _Second:
    """A second in which a lease competed: the time that it competed, and the device time that it got."""

    number: int
    competed_s: float = 0.0
    got_s: float = 0.0


class TurnRing:
    """The turns of all leases of a machine; times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        # By device: the leases that compute on it, the lowest of their virtual times, the last competition.
        self._active: dict[str, list[_Member]] = {}
        self._virtual_s: dict[str, float] = {}
        self._contested_at: dict[str, float] = {}
        self._at: float | None = None
        self._arrivals = 0

    def step(self, at: float, contenders: Mapping[str, Contender]) -> dict[str, Turn]:
        """Return the turn of each lease from ``at`` on; a lease missing from ``contenders`` is forgotten.

        The time since the last step is charged by the state that the last step left.
        """
        if self._at is not None:
            self._charge(at, min(LATE_S, max(0.0, at - self._at)))
        self._at = at
        self._members = {name: m for name, m in self._members.items() if name in contenders}
        for name, now in contenders.items():
            self._see(self._members.setdefault(name, _Member(now, tokens_s=_bucket(now))), now, at)
        self._active = {device: [] for member in self._members.values() for device in member.now.devices}
        for member in self._members.values():
            for device in member.now.devices if member.active else ():
                self._active[device].append(member)
        self._advance_virtual_time()
        members = self._members.values()
        for member in members:
            member.competes = member.active and (member.now.strict or bool(self._rivals(member)))
        contested = [member for member in members if member.competes]
        for member in contested:
            if self._is_quiet(member, at):
                member.forgiven, member.forgiven_until = member.now.busy, at + FORGIVEN_S
        for member in contested:
            self._contested_at |= dict.fromkeys(member.now.devices, at)
        for member in members:
            self._end(member, at)
        self._begin(at)
        return {name: self._turn(member, at) for name, member in self._members.items()}

    def ahead_s(self, name: str) -> float:
        """Return the seconds of work that a lease may have in flight.

        While its rivals do nothing this is limited by its share, because they wait for that work when they
        come back.
        """
        member = self._members.get(name)
        if member is None:
            return _ahead_s(LONGEST_S)
        return _ahead_s(member.length_s if self._rivals(member) else LONGEST_S * member.now.share)

    @property
    def is_draining(self) -> bool:
        """Whether a turn has closed whose work is not yet proved to be done."""
        return any(member.drains_since is not None for member in self._members.values())

    def measured_share(self, name: str, at: float) -> float | None:
        """Return the part of its devices' time that a lease got while it competed, in the last minute.

        None if it did not compete.
        """
        member = self._members.get(name)
        seconds = [s for s in member.history if s.number > int(at) - MEASURED_S] if member else []
        competed_s = sum(each.competed_s for each in seconds)
        return min(1.0, sum(each.got_s for each in seconds) / competed_s) if competed_s > 0 else None

    def _turn(self, member: _Member, at: float) -> Turn:
        if self._is_quiet(member, at) and not member.now.strict:
            return Turn.NONE
        return Turn.OPEN if member.is_open else Turn.HELD

    def _is_quiet(self, member: _Member, at: float) -> bool:
        """Return whether there was no competition on its devices within `LINGER_S`."""
        return all(
            at - self._contested_at.get(device, -LINGER_S) >= LINGER_S for device in member.now.devices
        )

    # What happened since the last step

    def _charge(self, at: float, elapsed_s: float) -> None:
        processes = Counter[str]()  # by device
        for member in self._members.values():
            for device in member.now.devices:
                processes[device] += member.uses
        for member in self._members.values():
            got = {
                device: elapsed_s * member.uses / max(1, processes[device]) for device in member.now.devices
            }
            got_s = sum(got.values()) / len(got)
            charged = 1.0 if member.is_open or not got_s else 1 - member.forgiven / member.uses
            for device, each_s in got.items():
                member.virtual_s[device] += each_s * charged / member.now.share
            if member.now.strict:
                member.tokens_s += elapsed_s * member.now.share - got_s
                member.tokens_s = min(_bucket(member.now), max(-DEBT_S, member.tokens_s))
            if member.competes:
                if not member.history or member.history[-1].number != int(at):
                    member.history.append(_Second(int(at)))
                member.history[-1].competed_s += elapsed_s
                member.history[-1].got_s += got_s

    def _see(self, member: _Member, now: Contender, at: float) -> None:
        begins = now.computes and not member.active
        member.now, member.active = now, now.computes
        member.forgiven = min(member.forgiven, now.busy) if at < member.forgiven_until else 0
        least_s = {device: self._virtual_s.get(device, 0.0) for device in now.devices}
        if begins:
            self._arrivals += 1
            member.arrived = self._arrivals
            lead_s = max(member.virtual_s.get(device, 0.0) - each_s for device, each_s in least_s.items())
            member.cuts = lead_s < -SHORTEST_S / now.share
            least_s = {device: each_s - CREDIT_S / now.share for device, each_s in least_s.items()}
            member.virtual_s = {d: max(member.virtual_s.get(d, 0.0), least_s[d]) for d in least_s}
        else:
            member.virtual_s = {d: member.virtual_s.get(d, each_s) for d, each_s in least_s.items()}

    def _advance_virtual_time(self) -> None:
        for device, active in self._active.items():
            if active:
                only_here = [m.virtual_s[device] for m in active if len(m.now.devices) == 1]
                for member in active if only_here else ():
                    least_s = min(only_here) - WAITED_S / member.now.share
                    member.virtual_s[device] = max(member.virtual_s[device], least_s)
                lowest_s = min(member.virtual_s[device] for member in active)
                self._virtual_s[device] = max(self._virtual_s.get(device, 0.0), lowest_s)
        for member in self._members.values():
            leads = {d: each_s - self._virtual_s.get(d, 0.0) for d, each_s in member.virtual_s.items()}
            leads = {d: min(lead_s, DEBT_S / member.now.share) for d, lead_s in leads.items()}
            member.virtual_s = {d: self._virtual_s.get(d, 0.0) + lead_s for d, lead_s in leads.items()}
            member.lead_s = max(leads.values())

    # Turns end

    def _end(self, member: _Member, at: float) -> None:
        drains_s = 0.0 if member.drains_since is None else at - member.drains_since
        if not member.now.busy or drains_s >= DRAIN_S - _EPSILON:
            member.drains_since = None
        if not member.is_open:
            return
        rivals = [rival for rival in self._rivals(member) if not rival.is_open]
        if not member.active or (member.now.strict and member.tokens_s <= 0):
            self._close(member, at)
        elif at >= self._last_moment(member, rivals):
            length_s = self._length_s(member)
            is_longest = at + length_s - member.opened_at > LONGEST_S + _EPSILON
            if rivals and (is_longest or min(map(_order, rivals)) < _order(member)):
                self._close(member, at)
            else:
                self._open(member, at, length_s)

    def _last_moment(self, member: _Member, rivals: Iterable[_Member]) -> float:
        if any(rival.cuts for rival in rivals):
            return min(member.ends_at, member.opened_at + SHORTEST_S)
        return member.ends_at - _ahead_s(member.length_s) + _EPSILON

    def _close(self, member: _Member, at: float) -> None:
        member.is_open = False
        member.drains_since = at if member.now.busy else None

    # Turns begin

    def _begin(self, at: float) -> None:
        taken = {d: m for m in self._members.values() if m.holds for d in m.now.devices}
        # Free devices that are kept for a lease of several devices, with the time at which it may begin.
        kept: dict[str, float] = {}
        for member in sorted((m for m in self._members.values() if m.active and not m.holds), key=_order):
            if not self._may_run(member):
                continue
            devices = member.now.devices
            length_s = self._length_s(member)
            blockers = [taken[device] for device in devices if device in taken]
            if blockers:
                # A draining turn ends soon; a short turn on the free device would then block that device.
                free_at = max(b.ends_at if b.is_open else at for b in blockers)
                kept |= {d: max(free_at, kept.get(d, at)) for d in devices if d not in taken}
                continue
            length_s = min([length_s, *(kept[d] - at for d in devices if d in kept)])
            if length_s < SHORTEST_S - _EPSILON:
                continue
            self._open(member, at, length_s)
            taken |= dict.fromkeys(devices, member)

    def _open(self, member: _Member, at: float, length_s: float) -> None:
        if not member.is_open:
            member.opened_at = at
        member.is_open, member.cuts = True, False
        member.length_s, member.ends_at = length_s, at + length_s

    def _may_run(self, member: _Member) -> bool:
        return not member.now.strict or member.tokens_s >= _bucket(member.now) / 2 - _EPSILON

    def _length_s(self, member: _Member) -> float:
        shares = [member.now.share, *(rival.now.share for rival in self._rivals(member))]
        round_s = min(ROUND_S, LONGEST_S * sum(shares) / max(shares))
        length_s = round_s * member.now.share / sum(shares)
        return max(SHORTEST_S, min(LONGEST_S, length_s))

    def _rivals(self, member: _Member) -> list[_Member]:
        """Return the other leases that compute on one of its devices and may run."""
        others = {id(m): m for device in member.now.devices for m in self._active[device] if m is not member}
        return [m for m in others.values() if m.holds or self._may_run(m)]


def _bucket(now: Contender) -> float:
    return max(SHORTEST_S, LONGEST_S * now.share)


def _ahead_s(length_s: float) -> float:
    return max(MIN_AHEAD_S, AHEAD_OF_TURN * length_s)


def _order(member: _Member) -> tuple[bool, float, int]:
    return not member.cuts, member.lead_s, -member.arrived
