"""What can enforce a memory limit on each device, strongest first, and what does so for a lease.

    whole_gpu  a lease that holds all of a device has nobody to share it with
    mig        an instance that the administrator made: kept apart by the hardware
    cgroup     the driver refuses a cgroup's processes what is beyond its limit
    preload    our library refuses it inside each process, and the watchdog looks
    hints      environment variables ask frameworks not to take everything at once

A rung is offered where its self-test passed on that very device (`canary`), else
it says why not.  A lease is told the weakest level among its devices: what is
shown is what is enforced.
"""

from __future__ import annotations

from collections.abc import Mapping

from .nvml import Gpu
from .verbs import Level, Rung

RESERVE_PERCENT = 3
RESERVE_FLOOR_BYTES = 256 << 20

_STRONGEST_FIRST = tuple(Level)


def reserve_bytes(gpu: Gpu) -> int:
    """What is never granted of a device: the driver's own needs grow a little."""
    return max(gpu.memory_bytes * RESERVE_PERCENT // 100, RESERVE_FLOOR_BYTES)


def ladder_of(gpu: Gpu, tested: Mapping[Level, str]) -> tuple[Rung, ...]:
    """All rungs of a device; ``tested`` says of each that was tested why it failed, or ""."""
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


def level_of(gpu: Gpu, rungs: tuple[Rung, ...], limit_bytes: int, *, in_cgroup: bool) -> Level:
    """What enforces a lease's limit on one device."""
    offered = {rung.level for rung in rungs if rung.offered}
    if Level.MIG in offered:
        return Level.MIG
    if Level.WHOLE_GPU in offered and limit_bytes >= gpu.memory_bytes - reserve_bytes(gpu):
        return Level.WHOLE_GPU
    if Level.CGROUP in offered and in_cgroup:
        return Level.CGROUP
    return Level.PRELOAD if Level.PRELOAD in offered else Level.HINTS


def weakest(levels: list[Level]) -> Level:
    """The weakest of some levels; hints of none."""
    return max(levels, key=_STRONGEST_FIRST.index, default=Level.HINTS)
