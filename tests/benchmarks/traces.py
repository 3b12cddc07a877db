"""The public traces, for the benchmarks of the simulator: see `tests.traces`."""

from tests.traces import public as trace

__all__ = ["trace"]
