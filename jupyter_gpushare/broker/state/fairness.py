"""Each project's lag behind its fair share: updated every round, stored every few minutes.

A crash loses minutes of a horizon of a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jupyter_gpushare.broker.state.records import Lags
from jupyter_gpushare.core.fairshare import Ledger
from jupyter_gpushare.core.model import Device, Lease, Project


class FairnessTracker:
    """How far projects lag behind their fair share (`core.fairshare`)."""

    def __init__(self, stored: Lags) -> None:
        self.stored = stored
        self._ledger: Ledger | None = None
        self._built_from: tuple[object, ...] = ()
        self._counted: object = None

    @property
    def lags_gpu_s(self) -> Mapping[str, float]:
        """GPU-seconds that each project is behind its fair share; empty before the first update."""
        return self._ledger.lags_gpu_s if self._ledger else {}

    def update(
        self,
        projects: tuple[Project, ...],
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags up to ``now``; from there on these projects, devices and leases count.

        ``leases`` are asked for when ``version`` is another than at the last call.
        """
        ledger, built_from = self._ledger, (projects, devices)
        if ledger is not None:
            ledger.advance(now)
        if ledger is None or built_from != self._built_from:
            lags = ledger.lags_gpu_s if ledger else self.stored.gpu_s
            ledger = self._ledger = Ledger(projects, devices, lags, now=now)
            self._built_from, self._counted = built_from, None
        if self._counted != version:
            ledger.recount(leases())
            self._counted = version

    def to_store(self) -> Lags | None:
        """Return the lags, or None where nothing is new."""
        if self._ledger is None:
            return None
        lags = Lags(gpu_s={name: round(lag, 1) for name, lag in self._ledger.lags_gpu_s.items()})
        if lags == self.stored:
            return None
        self.stored = lags
        return lags
