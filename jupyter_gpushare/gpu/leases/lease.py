"""One lease as the helper knows it, and the table of its phases.

    RUNNING -> SUSPENDING -> SUSPENDED -> RESUMING -> RUNNING

A move that fails returns to the phase before it.  When the driver has lost the GPU state of a process,
the lease is LOST until that process has ended.  Only `HelperLease.enter` changes the phase, and only along
`TRANSITIONS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from jupyter_gpushare.gpu.leases.files import (
    HELD,
    NO_COUNTERS,
    AccountFile,
    Counters,
    LeaseDirectory,
    PagePhase,
)
from jupyter_gpushare.gpu.leases.journal import JournalRecord, Leftover, Parked
from jupyter_gpushare.gpu.leases.processes import Process, Processes
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import GUEST_SHARE, ComputeShare, Phase

log = logging.getLogger(__name__)

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.RUNNING: frozenset({Phase.SUSPENDING, Phase.SUSPENDED}),
        Phase.SUSPENDING: frozenset({Phase.SUSPENDED, Phase.RUNNING, Phase.LOST}),
        Phase.SUSPENDED: frozenset({Phase.RESUMING, Phase.RUNNING, Phase.LOST}),
        Phase.RESUMING: frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.LOST}),
        Phase.LOST: frozenset({Phase.RUNNING}),
    }
)

# What the processes of a lease may do in each phase.  After a loss the other processes continue.
PAGE = MappingProxyType(
    {
        Phase.RUNNING: PagePhase.RUNNING,
        Phase.SUSPENDING: PagePhase.SUSPENDING,
        Phase.SUSPENDED: PagePhase.SUSPENDED,
        Phase.RESUMING: PagePhase.SUSPENDED,
        Phase.LOST: PagePhase.RUNNING,
    }
)

# Microseconds of work that may be in flight in a process's first turn; later turns set their own.
AHEAD_US = 20_000

MAX_WORK = 1 << 62  # an account may hold any number

BACKOFF_S = 60.0
MAX_BACKOFF_S = 3600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the driver failed to move a process, and when the move may be tried again (monotonic, seconds)."""

    reason: str
    until: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class HelperTimeShare:
    """How a lease shares the time of its devices now (`gpu.turns`); the fields are those of `LeaseSample`."""

    compute_share: ComputeShare = ComputeShare.OFF
    reason: str = ""
    measured: float = -1.0


class HelperLease:
    """The state of one lease; hold `moving` to move or change it."""

    def __init__(self, record: JournalRecord, files: LeaseDirectory) -> None:
        self.name = record.asked.lease
        self.asked = record.asked
        self.unconfirmed = record.unconfirmed  # no broker has confirmed its unrecorded resume
        # The highest limits so far: memory allocated under them stays after a lower limit.
        self.peak_limits = dict(record.asked.limits)
        self.files = files
        self.phase = record.phase
        self.names = record.names or tuple(record.asked.limits)
        self.moves_from = record.moves_from
        self.moving = threading.Lock()
        self.guests: dict[str, tuple[str, int]] = {}  # by device: the guest there, and the bytes that it has
        self.ended_as_guest = record.ended_as_guest
        self._page_guard = threading.Lock()
        self._pauses = 0  # restores on its devices, for which its allocations wait
        self.dropped = False
        # A driver call hung or failed during a move; `Mover.settle` ends the move later.
        self.unsettled = False
        self.unsaved = False  # the last record could not be written

        # While not RUNNING: processes that are locked or checkpointed, and the counters at suspension.
        self.parked = {each.key: each for each in record.parked}
        self.lost = {each.key: each for each in record.lost}
        # By moving process: the time since which every driver call about it has failed.
        self.failing: dict[Key, float] = {}
        # Memory of dead processes, and the living processes that keep it (`leftovers`).
        self.leftovers: dict[Key, Leftover] = {each.key: each for each in record.left}
        self.keepers: tuple[Process, ...] = ()
        self.free_since = 0.0  # time since which its devices show none of that memory; 0: they still do
        # Living processes that a failed checkpoint may have damaged.
        self.damaged = set(record.damaged)
        self.baseline = Counters(
            {(pid, start): (calls, asked) for pid, start, calls, asked in record.counted}
        )
        self.wanted = False
        self.queries_only = False
        self.stalled = False  # a process seems to wait in a call that the library does not count
        self.logged_reason = ""  # the last logged reason why it was not resumed while no broker answered
        self.wanted_published_at = 0.0
        self.compared_account = b""  # the account as the wake detector last compared it

        # As of the last sample.
        self.measured_at = 0.0
        self.processes: tuple[Process, ...] = ()
        self.held: dict[Key, dict[str, int]] = {}  # bytes by process and device
        self.leftover_bytes: dict[str, int] = {}  # bytes by device that dead processes hold
        self.account: AccountFile | None = None
        self.active_at = time.monotonic()
        self.memory_too_small = ""  # why its memory limit cannot hold its device memory
        self.lived = False  # it has had a process
        # Since when unread processes on its devices may belong to it; 0: there are none.
        self.unread_since = 0.0
        self.killed = False  # the broker ended it: SIGKILL was sent to every process that was found
        self.had_runner = False  # of a job: its runner was seen
        self.contexts: dict[str, int] = {}  # bytes by device as charged in the limit page
        self.beyond: dict[str, int] = {}  # bytes by device beyond the account, as last measured
        self.in_cgroup = False  # whether the driver itself limits it
        self.placed: frozenset[Key] = frozenset()  # its processes in that cgroup
        self.failures: dict[Key, Failure] = {}
        self.time_share = HelperTimeShare()
        self.work = 0  # work calls that its processes have counted so far, ended processes included
        self._worked: dict[Key, int] = {}  # work calls of each process in the last sample
        # Processes whose device memory the library did not count in the last sample, and whether one of them
        # was also in the sample before it.
        self.outside: frozenset[Key] = frozenset()
        self.bypasses_library = False

    @property
    def limits(self) -> dict[str, int]:
        """Bytes by device that it may hold."""
        return self.asked.limits

    @property
    def ahead_us(self) -> int:
        """Microseconds of work that a process may have in flight before its first turn; 0: it gets none."""
        return 0 if self.shares_time[0] is ComputeShare.OFF else AHEAD_US

    @property
    def is_guest(self) -> bool:
        """Whether it is now on the device of another lease."""
        return bool(self.asked.guest_of) and self.phase is not Phase.SUSPENDED

    @property
    def shares_time(self) -> tuple[ComputeShare, float]:
        """How it shares the time of its devices, and its part: 9 to 1 between a host and its guest."""
        if self.is_guest or self.guests:
            return ComputeShare.FAIR, GUEST_SHARE if self.is_guest else 1 - GUEST_SHARE
        return self.asked.compute_share, self.asked.share

    def kept_bytes_of(self, uuid: str) -> int:
        """Return the bytes of its limit on a device that another lease has.

        Of a host these are its guest's bytes; of a guest, all bytes except its own.
        """
        if self.asked.guest_of:
            return max(0, self.limits[uuid] - self.asked.guest_bytes)
        return self.guests[uuid][1] if uuid in self.guests and uuid in self.limits else 0

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes by device that are parked in host memory (while suspended)."""
        return added(each.saved_bytes for each in list(self.parked.values()))

    @property
    def kept_bytes(self) -> dict[str, int]:
        """The part of `saved_bytes` that belongs to processes alive in the last sample."""
        living = {process.key for process in self.processes}
        return added(each.saved_bytes for each in list(self.parked.values()) if each.key in living)

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes by device that its processes hold and that dead ones left, as last measured."""
        return added([*self.held.values(), self.leftover_bytes])

    @property
    def by_process(self) -> dict[int, int]:
        """Bytes by pid that its processes hold, as last measured."""
        return {pid: sum(held.values()) for (pid, _), held in self.held.items()}

    @property
    def out_of_step(self) -> dict[str, int]:
        """By device: the pid of a process of the lease about which every driver call fails."""
        found = [each for each in list(self.lost.values()) if each.out_of_step]
        return {uuid: each.pid for each in found for uuid in each.saved_bytes or self.limits}

    def counted_bytes(self, account: AccountFile | None, uuid: str, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the bytes that the library counts for these processes on a device, without contexts.

        The owner can write any number there.  The library never counts more than the highest limit for all
        processes together; if the account does, none of its numbers is used.
        """
        limits = list(self.limits)
        if account is None or uuid not in limits:
            return {}
        index = limits.index(uuid)
        held = account.held()
        counted = {key: held[key][index] for key in keys if key in held}
        return counted if sum(counted.values()) <= self.peak_limits[uuid] else {}

    def claim(self, processes: Processes) -> bool:
        """Claim processes of its user that its record names, and unread ones that its account names.

        The owner can write any process into the account.  Return whether a claim is new.
        """
        claimed = {*self.parked, *self.lost, *self.damaged}
        if unread := {process.key for process in processes.unread if process.uid == self.asked.uid}:
            account = self.files.account()
            claimed |= unread.intersection(account.slots if account else ())
        changed = [key for key in claimed if processes.claim(key, self.name, self.asked.uid)]
        return bool(changed)

    def allowed_bytes(self, uuid: str) -> int:
        """Return the bytes that it may hold on a device now."""
        if self.phase is Phase.SUSPENDED or uuid not in self.limits:
            return 0
        return self.limits[uuid] - (self.kept_bytes_of(uuid) if self.asked.guest_of else 0)

    def borrows(self, uuid: str) -> bool:
        """Return whether it has memory on a device that may be reclaimed."""
        limit_bytes = self.limits.get(uuid, 0)
        return self.asked.guaranteed.get(uuid, limit_bytes) < limit_bytes

    def enter(self, phase: Phase) -> Phase:
        """Change the phase and the limit page; return the phase before.

        Raises:
            ValueError: the table has no such transition; nothing changed.
        """
        before = self.phase
        if phase is before:
            return before
        if phase not in TRANSITIONS[before]:
            raise ValueError(f"lease {self.name}: no transition from {before} to {phase}")
        with self._page_guard:
            self.phase = phase
            self._write_page()
        if phase in (Phase.RUNNING, Phase.LOST):
            self.parked = {}
            self.baseline = NO_COUNTERS
            self.active_at = time.monotonic()
        if phase is Phase.SUSPENDED:
            self.unconfirmed = False
        self.wanted = self.queries_only = self.stalled = False
        self.wanted_published_at, self.compared_account, self.logged_reason = 0.0, b"", ""
        return before

    def put_on(self, devices: Iterable[str]) -> None:
        """Replace its devices, in their order; limits, charges and saved bytes move to the new devices.

        The caller writes the limit page (`files`).
        """
        before, devices = tuple(self.limits), tuple(devices)
        place = dict(zip(before, devices, strict=True))

        def moved(by_device: Mapping[str, int]) -> dict[str, int]:
            return {place.get(uuid, uuid): count for uuid, count in by_device.items()}

        def home(each: Parked) -> tuple[str, ...]:
            checkpointed_on = each.devices or before
            return () if checkpointed_on == devices else checkpointed_on

        asked = replace(self.asked, limits=moved(self.asked.limits), guaranteed=moved(self.asked.guaranteed))
        parked = {
            key: replace(each, saved_bytes=moved(each.saved_bytes), devices=home(each))
            for key, each in self.parked.items()
        }
        self.peak_limits = self.peak_limits | moved({uuid: self.peak_limits[uuid] for uuid in before})
        with self._page_guard:
            self.contexts, self.asked, self.parked = moved(self.contexts), asked, parked

    def count_work(self, account: AccountFile | None) -> None:
        """Add the work that its account shows since the last sample; a counter that fell adds nothing."""
        if account is None:
            return
        done = {slot.writer: slot.work for slot in account.slots.values()}
        added_work = sum(max(0, work - self._worked.get(key, 0)) for key, work in done.items())
        self.work, self._worked = min(self.work + added_work, MAX_WORK), done

    def write_kept(self) -> None:
        """Write into the limit page the bytes kept for other leases; a missing page is logged."""
        with self._page_guard:
            try:
                for index, uuid in enumerate(self.limits):
                    self.files.set_kept(index, self.kept_bytes_of(uuid))
            except OSError as error:  # removed by a process with the helper's rights
                log.error("lease=%s its limit page cannot be written: %s", self.name, error)

    def charge_context(self, index: int, uuid: str, context_bytes: int) -> None:
        """Charge the bytes of contexts, which the driver shows in addition to the account.

        ``index`` is the position of device ``uuid``; if the lease now has another device there, nothing
        changes.

        Raises:
            OSError: the limit page is missing.
        """
        with self._page_guard:
            if list(self.limits)[index] == uuid:
                self.contexts[uuid] = context_bytes
                self.files.set_context(index, context_bytes)

    def create_files(self, contexts: Mapping[str, int]) -> None:
        """Create its limit page; no process may carry the lease.  ``contexts`` are bytes by device.

        Raises:
            OSError: the page cannot be written.
        """
        self.contexts = dict(contexts)
        phase = PAGE[self.phase]
        kept = {uuid: self.kept_bytes_of(uuid) for uuid in self.limits}
        self.files.create(self.asked.uid, self.limits, phase, contexts, self.names, self.ahead_us, kept)
        if self.shares_time[0] is ComputeShare.STRICT:
            self.take_turn(HELD, self.ahead_us)  # its share is a cap from the first launch on

    def block(self, key: Key, reason: str) -> None:
        """Do not suspend a process for `BACKOFF_S`; each further failure doubles the wait."""
        now = time.monotonic()
        before = self.failures.get(key)
        wait_s = min(2 * before.wait_s, MAX_BACKOFF_S) if before else BACKOFF_S
        recent = {k: failure for k, failure in self.failures.items() if failure.until + MAX_BACKOFF_S > now}
        self.failures = recent | {key: Failure(reason, now + wait_s, wait_s)}

    @contextmanager
    def allocations_paused(self) -> Iterator[None]:
        """Make its processes wait before they allocate; they keep their memory and continue to run."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, step: int) -> None:
        with self._page_guard:
            self._pauses += step
            if not self.dropped:
                self._write_page()

    def take_turn(self, turn: int, ahead_us: int) -> bool:
        """Write its turn, and the microseconds of work that may be in flight in it.

        Return False if its processes do not run or the limit page is missing.
        """
        with self._page_guard:
            if self.phase is not Phase.RUNNING or self.dropped:
                return False
            try:
                self.files.set_turn(turn, ahead_us)
            except OSError:
                return False
            return True

    def _write_page(self) -> None:
        paused = self._pauses and self.phase is Phase.RUNNING
        try:
            self.files.set_phase(PagePhase.PAUSED if paused else PAGE[self.phase])
        except OSError as error:  # removed by a process with the helper's rights
            log.error("lease=%s its limit page cannot be written: %s", self.name, error)

    def record(self) -> JournalRecord:
        """Return the journal record of the lease."""
        return JournalRecord(
            asked=self.asked,
            phase=self.phase,
            parked=tuple(self.parked.values()),
            lost=tuple(self.lost.values()),
            left=tuple(self.leftovers.values()),
            damaged=tuple(sorted(self.damaged)),
            unconfirmed=self.unconfirmed,
            names=self.names if self.names != tuple(self.limits) else (),
            moves_from=self.moves_from,
            ended_as_guest=self.ended_as_guest,
            counted=tuple((*key, *counts) for key, counts in self.baseline.entered.items()),
        )


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of these bytes by device."""
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return dict(total)


def parked_of(keys: Mapping[Key, Mapping[str, int]]) -> dict[Key, Parked]:
    """Return the journal entry of each process, from its bytes by device."""
    return {
        (pid, start): Parked(pid=pid, start_ticks=start, saved_bytes=dict(saved))
        for (pid, start), saved in keys.items()
    }
