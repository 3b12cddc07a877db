"""Each project's lag behind its fair share: updated every round, stored every few minutes.

A crash loses minutes of a horizon of a day.
"""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.broker.state.lease_index import LeaseIndex
from jupyter_gpushare.broker.state.records import Lags
from jupyter_gpushare.core.fairshare import Ledger
from jupyter_gpushare.core.model import Project


class FairnessTracker:
    """How far projects lag behind their fair share (`core.fairshare`)."""

    def __init__(self, stored: Lags) -> None:
        self.stored = stored
        self._ledger: Ledger | None = None
        self._counted = -1  # `LeaseIndex.changes`

    @property
    def lags_gpu_s(self) -> Mapping[str, float]:
        """GPU-seconds that each project is behind its fair share; empty before the first update."""
        return self._ledger.lags_gpu_s if self._ledger else {}

    def update(
        self, projects: tuple[Project, ...], capacity_milli: int, index: LeaseIndex, now: float
    ) -> None:
        """Bring the lags up to ``now``; from there on these projects, devices and leases count."""
        ledger = self._ledger
        if ledger is not None:
            ledger.advance(now)
        if ledger is None or (ledger.projects, ledger.capacity_milli) != (projects, capacity_milli):
            lags = ledger.lags_gpu_s if ledger else self.stored.gpu_s
            ledger = self._ledger = Ledger(projects, capacity_milli, lags, now=now)
            self._counted = -1
        if self._counted != index.changes:
            ledger.recount(record.lease for record in index.all.values())
            self._counted = index.changes

    def to_store(self) -> Lags | None:
        """Return the lags, or None where nothing is new."""
        if self._ledger is None:
            return None
        lags = Lags(gpu_s={name: round(lag, 1) for name, lag in self._ledger.lags_gpu_s.items()})
        if lags == self.stored:
            return None
        self.stored = lags
        return lags
