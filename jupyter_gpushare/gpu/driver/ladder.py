"""Levels that can enforce a memory limit on a device, strongest first, and the memory never granted.

    whole_gpu  a lease that holds all of a device shares it with no other
    mig        an instance that the administrator created: separated by the hardware
    cgroup     the driver refuses a cgroup's processes what is beyond its limit
    preload    our library refuses it inside each process, and the watchdog compares
    hints      environment variables ask frameworks not to take everything at once

A rung is offered where its self-test passed on that device (`canary`), else it has
the reason.  A lease reports the weakest level among its devices: what is shown is
what is enforced.

A restore needs the saved bytes and a margin free.  So the reserve of a device is
what an empty device does not show as free plus the margin of its largest lease:
then a lease full to its limit can be restored alone and beside full neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.protocol.helper import Level, Rung

# Not measured on a GPU yet: contexts grow with modules and after a restore (llm-d, HAMi-core),
# and one restore out of memory loses the process, so it errs on the side of too much.
MARGIN_PERCENT = 3
MARGIN_FLOOR_BYTES = 512 << 20

_STRONGEST_FIRST = tuple(Level)


def margin_bytes(saved_bytes: int, grown_bytes: int = 0) -> int:
    """Bytes kept free beyond ``saved_bytes`` in a restore: 512 MiB, 3 %, or twice the growth measured."""
    return max(MARGIN_FLOOR_BYTES, saved_bytes * MARGIN_PERCENT // 100, 2 * grown_bytes)


def reserve_bytes(gpu: DriverGpu, hidden_bytes: int) -> int:
    """Bytes of a device that are never granted; ``hidden_bytes`` are used when it is empty."""
    return hidden_bytes + margin_bytes(gpu.memory_bytes)


def ladder_of(gpu: DriverGpu, tested: Mapping[Level, str]) -> tuple[Rung, ...]:
    """All rungs of a device; ``tested`` has the reason why a level failed its test, or ""."""
    fixed: dict[Level, str]
    if gpu.mig:
        fixed = {
            Level.WHOLE_GPU: "it is a MIG instance",
            Level.CGROUP: "the driver does not limit cgroups on MIG instances",
            Level.PRELOAD: "not needed beside MIG",
        }
    else:
        fixed = {Level.MIG: "the GPU is not in MIG mode"}
    why_not = {Level.HINTS: ""} | dict(tested) | fixed
    return tuple(
        Rung(level=level, offered=not (reason := why_not.get(level, "not tested")), reason=reason)
        for level in _STRONGEST_FIRST
    )


def strongest(rungs: tuple[Rung, ...]) -> Level:
    """The strongest level for a part of a device."""
    offered = [rung.level for rung in rungs if rung.offered and rung.level is not Level.WHOLE_GPU]
    return min(offered, key=_STRONGEST_FIRST.index, default=Level.HINTS)


def level_of(rungs: tuple[Rung, ...], *, whole: bool, in_cgroup: bool) -> Level:
    """The level that enforces a lease's limit on one device; ``whole``: it holds all that is granted."""
    offered = {rung.level for rung in rungs if rung.offered}
    if Level.MIG in offered:
        return Level.MIG
    if Level.WHOLE_GPU in offered and whole:
        return Level.WHOLE_GPU
    if Level.CGROUP in offered and in_cgroup:
        return Level.CGROUP
    return Level.PRELOAD if Level.PRELOAD in offered else Level.HINTS


def weakest(levels: list[Level]) -> Level:
    """The weakest of some levels; hints of none."""
    return max(levels, key=_STRONGEST_FIRST.index, default=Level.HINTS)
