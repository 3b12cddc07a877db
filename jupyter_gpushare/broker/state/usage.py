"""Use, lending and parked host memory, added up by day, user and project.

A stretch of a lease in one state counts when it ends; `lending` computes what was lent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from jupyter_gpushare.broker.state.records import LeaseRecord, UsageRecord
from jupyter_gpushare.core.model import WHOLE_GPU, State
from jupyter_gpushare.gibibytes import GIB

# Days of use that are shown.
WEEK_DAYS = 7
# Its device memory lies in host memory, until a resumption is over.
_ASLEEP = (State.SUSPENDED, State.RESUMING)


def use_of(record: LeaseRecord, day: str, seconds: float) -> UsageRecord | None:
    """Return what ``seconds`` in a lease's state count for: used, kept in host memory, or nothing."""
    lease, seconds = record.lease, max(0.0, seconds)
    use = UsageRecord(day=day, user=lease.user, project=lease.project)
    if lease.state is State.RUNNING:
        return replace(use, used_gpu_s=seconds * lease.held_milli * len(lease.devices) / WHOLE_GPU)
    if lease.state in _ASLEEP:
        return replace(use, saved_gib_s=seconds * lease.saved_bytes / GIB)
    return None


class Usage:
    """The sums of the last days; earlier ones are on disk only."""

    def __init__(self, stored: Iterable[UsageRecord] = ()) -> None:
        self.sums = {(u.day, u.user, u.project): u for u in stored}
        self._kept_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        for use in self.sums.values():
            self._kept_s[use.day, use.user] += use.kept_s

    def kept_s(self, day: str, user: str) -> float:
        """Return for how long a user kept idle sessions, seconds of a day's budget."""
        return self._kept_s.get((day, user), 0.0)

    def count(self, stretch: UsageRecord) -> UsageRecord:
        """Add a stretch of use to its day; returns the day's new sum."""
        key = (stretch.day, stretch.user, stretch.project)
        if stretch.kept_s:
            for yesterday in [key for key in self._kept_s if key[0] != stretch.day]:
                del self._kept_s[yesterday]
            self._kept_s[stretch.day, stretch.user] += stretch.kept_s
        before = self.sums.get(key)
        if before is not None:
            stretch = replace(
                stretch,
                used_gpu_s=before.used_gpu_s + stretch.used_gpu_s,
                lent_gpu_s=before.lent_gpu_s + stretch.lent_gpu_s,
                saved_gib_s=before.saved_gib_s + stretch.saved_gib_s,
                kept_s=before.kept_s + stretch.kept_s,
            )
        else:
            newest = sorted({day for day, _, _ in self.sums}, reverse=True)[:WEEK_DAYS]
            self.sums = {k: u for k, u in self.sums.items() if k[0] in newest}
        self.sums[key] = stretch
        return stretch
