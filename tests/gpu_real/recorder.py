"""A C thread that records and waits as the library does at the end of a turn (recorder.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

ALWAYS = 1 << 62


@dataclass(frozen=True, slots=True)
class Recorded:
    """The thread's results: rounds, the time of a call and of its last drain, and its share of a CPU."""

    rounds: int
    record_us: float
    drain_ms: float
    cpu: float

    def __str__(self) -> str:
        """Return one word for each value, as a worker answers."""
        return f"{self.rounds} {self.record_us:.3f} {self.drain_ms:.4f} {self.cpu:.4f}"


class Recorder:
    """The thread, in the process of a worker."""

    def __init__(self, library: str) -> None:
        self._calls = ctypes.CDLL(library)

    def start(self, context: ctypes.c_void_p, period_us: int = 0, rounds: int = 1) -> bool:
        """Start the thread; return False if the driver lacks the call."""
        code = int(self._calls.recorder_start(context, period_us, ctypes.c_long(rounds)))
        assert code in (0, -1), code
        return not code

    def end(self, *, at_once: bool = False) -> Recorded:
        """Wait for the last round; with ``at_once`` no further round begins."""
        out = (ctypes.c_double * 6)()
        self._calls.recorder_end(int(at_once), out)
        rounds, code, record_ns, drain_ns, cpu_ns, wall_ns = out
        assert not code, f"code {code:.0f} of the driver"
        return Recorded(
            int(rounds), record_ns / max(rounds, 1) / 1e3, drain_ns / 1e6, cpu_ns / max(wall_ns, 1)
        )
