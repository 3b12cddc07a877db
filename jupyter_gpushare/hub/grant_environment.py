"""The variables that a grant may set in a server: names and shapes of values, checked by the Hub.

The Hub, often root, puts the broker's answer into the environment of a process
of a user.  A broker that is taken over must not get code into it that way, so
everything that is not in `ALLOWED` is refused, and the library for LD_PRELOAD
must be one that only root or the Hub's user can change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jupyter_gpushare.channel import writer_of
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.native import PRELOAD_NAME

_BOOLEAN = "true|false"
# A path without the separators of LD_PRELOAD (blanks, colons) and without "..".  On Kubernetes the name
# begins with a digest of the library (`native.install_preload`).
_LIBRARY = rf"(/(?!\.\.?/)[^/\s:;$]+)+/([0-9a-f]{{16}}-)?{re.escape(PRELOAD_NAME)}"

ALLOWED: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        name: re.compile(shape)
        for name, shape in {
            "GPUSHARE_LEASE": r"[a-z0-9][a-z0-9-]{0,63}",
            "GPUSHARE_LEASE_DIR": r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+",
            "GPUSHARE_MEMORY_LIMIT": r"[0-9]{1,16}",
            # UUIDs of NVML; older drivers name MIG instances MIG-GPU-<uuid>/<gi>/<ci>.
            "CUDA_VISIBLE_DEVICES": r"((GPU|MIG)-[0-9A-Za-z/-]{1,80}(,(?!$)|$)){1,64}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "LD_PRELOAD": _LIBRARY,
            "TF_FORCE_GPU_ALLOW_GROWTH": _BOOLEAN,
            "XLA_PYTHON_CLIENT_PREALLOCATE": _BOOLEAN,
        }.items()
    }
)
_MAX_VALUE_LENGTH = 8_192


def checked(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a grant.

    Raises:
        GpuShareError: a name that a grant may not set, or a value of another shape.
    """
    for name, value in given.items():
        shape = ALLOWED.get(name)
        if shape is None:
            raise GpuShareError(f"a grant may not set the variable {name[:60]!r}")
        if len(value) > _MAX_VALUE_LENGTH or not shape.fullmatch(value):
            raise GpuShareError(f"a grant may not set {name} to {value[:100]!r}")
    library = Path(given.get("LD_PRELOAD", "/"))
    # One that is not here lies in the image of a container.
    if library.is_file() and (why := writer_of(library.resolve(), {0, os.geteuid()})):
        raise GpuShareError(f"{library} may not be loaded into servers: {why}")
    return dict(given)
