"""Open and close the turns of leases, in one thread.

The thread reads from each account what the processes of a lease do, lets `TurnRing` decide, and
writes each lease's turn into its limit page (`gpushare_lease.h`).  It does so every `CONTESTED_POLL_S` while
leases compute in turns, and less often otherwise.  It calls no driver and never waits for anybody.

The owner of a lease can write its account, and so can change the time that the lease is charged for.
A lease that lies there counts like one whose program bypasses the library.

* A process computes while it is not settled: the library's last check found work left to run, or the library
  counted a call since.  The library checks only while there are turns.  So a process that does not
  check, and has counted nothing for `REST_S`, does not compute.
* A lease that is suspended, moved or dropped has no turns from the moment of that change
  (`HelperLease.enter`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import HELD, NO_TURNS
from jupyter_gpushare.gpu.leases.lease import HelperLease, HelperTimeShare
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.gpu.turns.ring import LINGER_S, Contender, Turn, TurnRing
from jupyter_gpushare.protocol.helper import ComputeShare, Phase

log = logging.getLogger(__name__)

CONTESTED_POLL_S = 0.002
DRAINING_POLL_S = 0.0005  # while a turn drains
POLL_S = 0.02  # while several leases on a device may compute
IDLE_POLL_S = 0.2
PAUSE_PER_STEP = 5.0  # in durations of the step: the thread uses at most a sixth of a processor
REST_S = 0.2
# A waiting thread may have ended within its wait, so a wait counts at most this long.
WAIT_S = 60.0
# The turn of a held lease is rewritten this often; the library stops waiting 3 s after the last write.
RENEW_S = 1.0
SHOW_S = 0.5
# A process that the sampler has not seen yet counts for this long.
NEW_S = 2.0
_NUMBERS = 1 << 30


@dataclass(slots=True)
class _LeaseProcess:
    """A process of a lease, as its account shows it."""

    since: float
    work: int = -1
    worked_at: float = 0.0
    lived: bool = False  # the sampler has seen it


@dataclass(slots=True)
class _Lease:
    """The state of a lease while it may have turns."""

    lease: HelperLease
    seen: dict[Key, _LeaseProcess] = field(default_factory=dict)
    turn: Turn | None = None
    # Starts at a number that no earlier helper has written.
    number: int = field(default_factory=lambda: int(1000 * time.monotonic()))
    written_at: float = 0.0


class Turns:
    """The turns of all leases of this machine."""

    def __init__(self, registry: LeaseRegistry, devices: DeviceStates, *, proves_end: bool) -> None:
        """``proves_end``: see `Checkpoint`."""
        self._registry = registry
        self._devices = devices
        self._proves_end = proves_end
        self._ring = TurnRing()
        self._leases: dict[str, _Lease] = {}
        self._computed_at = float("-inf")  # any lease
        self._shown_at = float("-inf")

    def _in_force(self, lease: HelperLease) -> tuple[ComputeShare, str]:
        """Return how a lease shares time now, and why that is not what it requested ("" if it is)."""
        asked, _ = lease.shares_time
        if asked is ComputeShare.OFF:
            return asked, ""
        reason = self._devices.turns_obstacle(lease, proves_end=self._proves_end)
        return (ComputeShare.OFF, reason) if reason else (asked, "")

    def run(self) -> None:
        """Open and close turns for ever."""
        while True:
            began_at, pause_s = time.monotonic(), IDLE_POLL_S
            try:
                pause_s = self.step(began_at)
            except Exception:  # the outermost loop: a held lease continues after 3 s, but unfairly
                log.exception("the turns of leases cannot be kept")
            # With many leases a step takes milliseconds.
            time.sleep(max(pause_s, PAUSE_PER_STEP * (time.monotonic() - began_at)))

    def step(self, at: float) -> float:
        """Decide once what each lease may do and write it; return the seconds until the next step."""
        asking = self._asking()
        for name in self._leases.keys() - {lease.name for lease in asking}:
            self._leave(self._leases.pop(name))
        for lease in asking:
            known = self._leases.get(lease.name)
            if known is None or known.lease is not lease:
                self._leases[lease.name] = _Lease(lease)
        self._show(at)
        leases = [lease for lease in asking if lease.time_share.compute_share is not ComputeShare.OFF]
        # A lease that is alone on its devices does not compete.
        beside = Counter(uuid for lease in leases for uuid in lease.limits)
        contenders = {
            lease.name: self._contender(self._leases[lease.name], at)
            for lease in leases
            if lease.shares_time[0] is ComputeShare.STRICT or any(beside[uuid] > 1 for uuid in lease.limits)
        }
        if any(contender.computes for contender in contenders.values()):
            self._computed_at = at
        turns = self._ring.step(at, contenders)
        # Also if shares are not in force, because the page of a new strict lease says that it is held.
        for lease in asking:
            self._write(self._leases[lease.name], turns.get(lease.name, Turn.NONE), at)
        if self._ring.is_draining:
            return DRAINING_POLL_S
        # A strict lease has turns even while it computes nothing.
        if at - self._computed_at < LINGER_S and any(turn is not Turn.NONE for turn in turns.values()):
            return CONTESTED_POLL_S
        return POLL_S if contenders else IDLE_POLL_S

    def _show(self, at: float) -> None:
        """Store in each lease how it shares time, at once, and its measured share, every `SHOW_S`."""
        is_due = at - self._shown_at >= SHOW_S
        self._shown_at = at if is_due else self._shown_at
        for lease in self._registry.all():
            compute_share, reason = self._in_force(lease)
            measured = lease.time_share.measured
            if is_due:
                share = self._ring.measured_share(lease.name, at)
                measured = -1.0 if share is None else round(share, 4)
            shown = HelperTimeShare(compute_share, reason, measured)
            if shown != lease.time_share:
                lease.time_share = shown

    def _asking(self) -> list[HelperLease]:
        return [
            lease
            for lease in self._registry.all()
            if lease.phase is Phase.RUNNING
            and not lease.dropped
            and lease.shares_time[0] is not ComputeShare.OFF
        ]

    def _contender(self, known: _Lease, at: float) -> Contender:
        lease = known.lease
        living = {process.key for process in lease.processes}
        busy, waits = 0, False
        before, known.seen = known.seen, {}
        for slot in lease.files.turn_slots():
            seen = known.seen[slot.key] = before.get(slot.key) or _LeaseProcess(at)
            lives = slot.key in living
            if not lives and (seen.lived or at - seen.since > NEW_S):
                continue  # it has ended, but its slot is not swept yet
            seen.lived |= lives
            if slot.work != seen.work:
                seen.work, seen.worked_at = slot.work, at
            waits |= slot.waiting > 0 and at - seen.worked_at < WAIT_S
            busy += slot.work != slot.settled and (slot.looking or at - seen.worked_at < REST_S)
        compute_share, share = lease.shares_time
        return Contender(
            devices=tuple(lease.limits),
            share=share,
            strict=compute_share is ComputeShare.STRICT,
            busy=busy,
            waits=waits,
        )

    def _write(self, known: _Lease, turn: Turn, at: float) -> None:
        is_old = turn is Turn.HELD and at - known.written_at > RENEW_S
        if turn is known.turn and not is_old:
            return
        known.number = known.number % _NUMBERS + 1
        word = NO_TURNS if turn is Turn.NONE else 2 * known.number + (HELD if turn is Turn.HELD else 0)
        ahead_us = int(1e6 * self._ring.ahead_s(known.lease.name))
        if known.lease.take_turn(word, ahead_us):
            known.turn, known.written_at = turn, at

    def _leave(self, known: _Lease) -> None:
        """Let a lease that no longer shares time launch freely."""
        if known.turn not in (None, Turn.NONE):
            known.lease.take_turn(NO_TURNS, known.lease.ahead_us)
