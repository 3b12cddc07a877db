"""One lease as the helper knows it, and the table of its phases.

    RUNNING -> SUSPENDING -> SUSPENDED -> RESUMING -> RUNNING

A lease may also only be LOCKED, out of SUSPENDING: stopped where it is, its memory on
the device.  From there it is resumed, or suspended for good.

A move that fails goes back to where it came from; a process that the driver
gave up makes the lease LOST until that process has ended.  Only `Lease.enter`
changes the phase, and only along `TRANSITIONS`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from .isolation import NO_COUNTERS, Account, Counters, LeaseDirectory, PagePhase
from .journal import Parked, Record
from .processes import Process
from .verbs import Phase

if TYPE_CHECKING:
    from .hindrance import Failure

log = logging.getLogger(__name__)

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.RUNNING: frozenset({Phase.SUSPENDING, Phase.SUSPENDED}),
        Phase.SUSPENDING: frozenset({Phase.SUSPENDED, Phase.LOCKED, Phase.RUNNING, Phase.LOST}),
        Phase.LOCKED: frozenset({Phase.SUSPENDING, Phase.RUNNING, Phase.LOST}),
        Phase.SUSPENDED: frozenset({Phase.RESUMING, Phase.RUNNING, Phase.LOST}),
        Phase.RESUMING: frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.LOST}),
        Phase.LOST: frozenset({Phase.RUNNING}),
    }
)

# What the processes of a lease may do in each phase.  After a loss the others go on.
PAGE = MappingProxyType(
    {
        Phase.RUNNING: PagePhase.RUNNING,
        Phase.SUSPENDING: PagePhase.SUSPENDING,
        Phase.SUSPENDED: PagePhase.SUSPENDED,
        Phase.LOCKED: PagePhase.SUSPENDED,
        Phase.RESUMING: PagePhase.RESUMING,
        Phase.LOST: PagePhase.RUNNING,
    }
)

# Not running, and nothing is being done about it: its calls wait until it is resumed.
ASLEEP = frozenset({Phase.SUSPENDED, Phase.LOCKED})

Key = tuple[int, int]  # pid, start ticks


class Lease:
    """What the helper knows about one lease; `moving` is held by whoever moves or changes it."""

    def __init__(self, record: Record, files: LeaseDirectory) -> None:
        self.name = record.lease
        self.uid = record.uid
        self.limits = record.limits
        self.guaranteed = record.guaranteed
        self.most = dict(record.limits)  # the highest limits so far: what was taken under them stays
        self.files = files
        self.phase = record.phase
        self.before = record.phase  # the phase it was in last
        self.moving = threading.Lock()
        self._page_guard = threading.Lock()
        self._holders = 0  # restores beside it, for which its allocations wait
        self.dropped = False
        # A driver call hung or failed on the way: to be settled later.
        self.unsettled = False
        self.unsaved = False  # the disk did not take the last record

        # While not RUNNING: what is locked or parked, and the counters it was parked with.
        self.parked = {each.key: each for each in record.parked}
        self.lost = {each.key: each for each in record.lost}
        self.baseline = counters_of(record)
        self.wanted = False
        self.queries_only = False
        self.told_at = 0.0  # when it was last said that the lease is wanted
        self.looked_at = b""  # the account as the waker last saw it

        # As last measured.
        self.processes: tuple[Process, ...] = ()
        self.used_bytes: dict[str, int] = {}
        self.by_process: dict[int, int] = {}
        self.account: Account | None = None
        self.seen = NO_COUNTERS
        self.active_at = time.monotonic()
        self.was_alive = False
        self.contexts: dict[str, int] = {}  # as charged in the limit page
        self.in_cgroup = False  # whether the driver itself limits it
        self.placed: frozenset[Key] = frozenset()  # its processes in that cgroup
        # Processes that the driver failed to move (`hindrance`).
        self.hindered: dict[Key, Failure] = {}

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes by device that are parked in host memory (while suspended)."""
        total: dict[str, int] = {}
        for parked in list(self.parked.values()):
            for uuid, count in parked.saved_bytes.items():
                total[uuid] = total.get(uuid, 0) + count
        return total

    @property
    def kept_bytes(self) -> dict[str, int]:
        """The part of `saved_bytes` whose processes still live, as the last sample found them."""
        living = {process.key for process in self.processes}
        total: dict[str, int] = {}
        for key, parked in list(self.parked.items()):
            for uuid, count in parked.saved_bytes.items():
                total[uuid] = total.get(uuid, 0) + (count if key in living else 0)
        return total

    def enter(self, phase: Phase) -> Phase:
        """Change the phase and the limit page; returns the phase before.

        Raises:
            ValueError: the table has no such transition; nothing changed.
        """
        before = self.phase
        if phase is before:
            return before
        if phase not in TRANSITIONS[before]:
            raise ValueError(f"lease {self.name}: no way from {before} to {phase}")
        with self._page_guard:
            self.before, self.phase = before, phase
            self._write_page()
        if phase in (Phase.RUNNING, Phase.LOST):
            self.parked = {}
            self.baseline = NO_COUNTERS
            self.active_at = time.monotonic()
        self.wanted = self.queries_only = False
        self.told_at, self.looked_at = 0.0, b""
        return before

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While this runs its processes wait before they allocate; what they hold and run goes on."""
        self._hold_back(1)
        try:
            yield
        finally:
            self._hold_back(-1)

    def _hold_back(self, step: int) -> None:
        with self._page_guard:
            self._holders += step
            if not self.dropped:
                self._write_page()

    def _write_page(self) -> None:
        held = self._holders and self.phase is Phase.RUNNING
        try:
            self.files.set_phase(PagePhase.RESUMING if held else PAGE[self.phase])
        except OSError as error:  # somebody with the helper's rights removed it
            log.error("lease=%s its limit page cannot be written: %s", self.name, error)

    def record(self, boot_id: str) -> Record:
        """The lease as it is to be written down."""
        return Record(
            boot_id=boot_id,
            lease=self.name,
            uid=self.uid,
            limits=self.limits,
            guaranteed=self.guaranteed,
            phase=self.phase,
            parked=tuple(self.parked.values()),
            lost=tuple(self.lost.values()),
            counted={
                f"{pid}:{start}": f"{calls}:{queries}"
                for (pid, start), (calls, queries) in self.baseline.entered.items()
            },
        )


def counters_of(record: Record) -> Counters:
    """The counters that a record kept."""
    entered = {}
    for process, counted in record.counted.items():
        pid, _, start = process.partition(":")
        calls, _, queries = counted.partition(":")
        entered[int(pid), int(start)] = (int(calls), int(queries))
    return Counters(entered)


def parked_of(keys: Mapping[Key, Mapping[str, int]]) -> dict[Key, Parked]:
    """Processes with their bytes by device, as they are kept."""
    return {
        (pid, start): Parked(pid=pid, start_ticks=start, saved_bytes=dict(saved))
        for (pid, start), saved in keys.items()
    }
