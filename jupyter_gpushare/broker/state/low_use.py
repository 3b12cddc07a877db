"""Sessions that keep a GPU busy without computing: a program that only polls the driver is never idle."""

from __future__ import annotations

from dataclasses import dataclass

# Utilization from which a GPU computes, in percent.
COMPUTES_PERCENT = 2
# A session without a call of the driver for so long does not keep its GPU busy.
STILL_S = 600.0
# A longer time without a measurement counts for nothing.
GAP_S = 60.0


@dataclass(slots=True)
class LowUse:
    """Since when a session's processes enter the driver while its GPUs stay below `COMPUTES_PERCENT`.

    The driver does not split utilization between processes, so a fraction counts only while its
    neighbours do not compute either.  Not stored: it begins anew with the broker.
    """

    since_at: float | None = None
    entered_at: float = 0.0  # the last call of the driver
    seen_at: float = 0.0  # the last measurement
    is_told: bool = False  # once for each such time

    def saw(self, entered_at: float, utilization_percent: int | None, now: float) -> None:
        """Add a measurement: the last call of the driver, and the highest utilization of its GPUs."""
        computes = utilization_percent is None or utilization_percent >= COMPUTES_PERCENT
        if now - self.seen_at > GAP_S:
            self.reset()
        self.seen_at = now
        if computes or now - entered_at > STILL_S:
            self.reset()
        else:
            self.since_at = now if self.since_at is None else self.since_at
            self.entered_at = entered_at

    def reset(self) -> None:
        """Forget what was seen: the session computes, is idle, or has no GPU."""
        self.since_at, self.is_told = None, False

    @property
    def lasted_s(self) -> float:
        """For how long it has lasted, up to the last call of the driver, in seconds; 0: it does not."""
        return 0.0 if self.since_at is None else max(0.0, self.entered_at - self.since_at)
