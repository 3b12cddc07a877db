"""What the codes 304 and 800 of a checkpoint call mean (issues of NVIDIA/cuda-checkpoint).

A caller gets 304 (OPERATING_SYSTEM) if it is not root and may not trace the process (issues 6, 41).
On some GPUs root gets it too, for every call (issue 37).  Root got 800 (NOT_PERMITTED) while
persistence mode was off (issue 25, driver 565.57.01); with persistence mode on, the call worked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.nvml import Nvml

CODES = frozenset({304, 800})

_STATUS_BYTES = 8192
_CAP_SYS_PTRACE = 19  # linux/capability.h


def explained(error: DeviceError, nvml: Nvml, uuids: Iterable[str]) -> str:
    """Return the text of a checkpoint call's error, with the likely cause if its code is in `CODES`.

    ``uuids`` are the devices of the process.
    """
    if error.code not in CODES:
        return str(error)
    if is_of_helper(error):
        return f"{error}: the helper needs root or CAP_SYS_PTRACE"
    if off := without_persistence(nvml, uuids):
        return f"{error}: persistence mode is off on {', '.join(off)}"
    return f"{error}: this GPU or driver may not support it"


def is_of_helper(error: DeviceError) -> bool:
    """Return whether an error comes from this helper's lack of rights."""
    return error.code in CODES and not _may_trace()


def without_persistence(nvml: Nvml, uuids: Iterable[str]) -> list[str]:
    """Return the devices on which persistence mode is off; this never changes the mode."""
    return [uuid for uuid in uuids if nvml.persistence_mode(uuid) is False]


def _may_trace() -> bool:
    """Return whether this helper is root and, if /proc says so, has CAP_SYS_PTRACE (capabilities(7))."""
    for line in procfs.read(0, "status", _STATUS_BYTES).splitlines():
        if line.startswith(b"CapEff:"):
            return os.geteuid() == 0 and bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return os.geteuid() == 0
