"""What the codes 304 and 800 of a checkpoint call mean (issues of NVIDIA/cuda-checkpoint).

304, OPERATING_SYSTEM, is what a caller gets that is neither root nor may trace the process
(issues 6, 41).  Root gets it too: on some GPUs for every call (issue 37).  800, NOT_PERMITTED, is
what root got while persistence mode was off (issue 25, driver 565.57.01: with it on it worked).
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
    """An error of a checkpoint call for a process on these devices, and the likely cause of `CODES`."""
    if error.code not in CODES:
        return str(error)
    if is_of_helper(error):
        return f"{error}: the helper needs root or CAP_SYS_PTRACE"
    if off := without_persistence(nvml, uuids):
        return f"{error}: persistence mode is off on {', '.join(off)}"
    return f"{error}: this GPU or driver may not support it"


def is_of_helper(error: DeviceError) -> bool:
    """Whether an error is one that this helper gets for want of rights."""
    return error.code in CODES and not _may_trace()


def without_persistence(nvml: Nvml, uuids: Iterable[str]) -> list[str]:
    """Those of the devices on which persistence mode is off; it is only read here, never set."""
    return [uuid for uuid in uuids if nvml.persistence_mode(uuid) is False]


def _may_trace() -> bool:
    """Whether this helper is root with access to all processes (capabilities(7)), as far as it knows."""
    for line in procfs.read(0, "status", _STATUS_BYTES).splitlines():
        if line.startswith(b"CapEff:"):
            return os.geteuid() == 0 and bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return os.geteuid() == 0
