"""The levels that can enforce a memory limit on a device, and the memory that is never granted.

Strongest level first:

    whole_gpu  a lease that holds all of a device shares it with no other lease
    mig        the hardware separates an instance that the administrator created
    cgroup     the driver refuses allocations of a cgroup's processes beyond its limit
    preload    our library refuses them inside each process, and the watchdog checks it
    hints      environment variables ask frameworks not to take everything at once

A device offers a level if the level's self-test passed on it (`canary`); otherwise the rung
says why not.  A lease reports the weakest level among its devices, so what is shown is enforced.

A restore needs the saved bytes and a margin free.  So the reserve of a device is
what an empty device does not show as free, plus the margin of its largest lease.
A lease that is full to its limit can then be restored, alone or beside full neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.protocol.helper import Level, Rung

# Not measured on a GPU yet.  Contexts grow with modules and after a restore (llm-d, HAMi-core).
# A restore that runs out of memory loses the process, so the margin is rather too large.
MARGIN_PERCENT = 3
MARGIN_FLOOR_BYTES = 512 << 20

_STRONGEST_FIRST = tuple(Level)


def margin_bytes(saved_bytes: int, grown_bytes: int = 0) -> int:
    """Return the bytes that a restore needs beyond ``saved_bytes``.

    The largest of 512 MiB, 3 % of ``saved_bytes``, and twice the measured growth.
    """
    return max(MARGIN_FLOOR_BYTES, saved_bytes * MARGIN_PERCENT // 100, 2 * grown_bytes)


def reserve_bytes(gpu: DriverGpu, hidden_bytes: int) -> int:
    """Return the bytes of a device that are never granted; ``hidden_bytes`` are in use while it is empty."""
    return hidden_bytes + margin_bytes(gpu.memory_bytes)


def ladder_of(gpu: DriverGpu, tested: Mapping[Level, str]) -> tuple[Rung, ...]:
    """Return all rungs of a device; ``tested`` has the reason why a level failed its test, or ""."""
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
    """Return the strongest level offered for a part of a device."""
    offered = [rung.level for rung in rungs if rung.offered and rung.level is not Level.WHOLE_GPU]
    return min(offered, key=_STRONGEST_FIRST.index, default=Level.HINTS)


def level_of(rungs: tuple[Rung, ...], *, whole: bool, in_cgroup: bool) -> Level:
    """Return the level that enforces a lease's limit on one device.

    ``whole``: the lease holds all that can be granted of the device.
    """
    offered = {rung.level for rung in rungs if rung.offered}
    if Level.MIG in offered:
        return Level.MIG
    if Level.WHOLE_GPU in offered and whole:
        return Level.WHOLE_GPU
    if Level.CGROUP in offered and in_cgroup:
        return Level.CGROUP
    return Level.PRELOAD if Level.PRELOAD in offered else Level.HINTS


def weakest(levels: list[Level]) -> Level:
    """Return the weakest of some levels; hints if there are none."""
    return max(levels, key=_STRONGEST_FIRST.index, default=Level.HINTS)
