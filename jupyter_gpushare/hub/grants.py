"""What a grant changes in a server: its variables and its memory limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from traitlets import Bool
from traitlets.config import LoggingConfigurable

from jupyter_gpushare.channel import writer_of
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.native import PRELOAD_NAME
from jupyter_gpushare.protocol.wire import SpawnGrant

# ---- the variables that a grant may set in a server: names and shapes of values, checked by the Hub
# The Hub, often root, puts the broker's answer into the environment of a process
# of a user.  A broker that is taken over must not get code into it that way, so
# everything that is not in `ALLOWED` is refused, and the library for LD_PRELOAD
# must be one that only root or the Hub's user can change.

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


# ---- host memory -------------------------------------------------------------
# Host memory for sessions that sleep: GPU memory that is suspended moves into its server's memory limit.
#
# The device helper suspends nothing that does not fit into the limit (`gpu/leases/host_memory.py`), so a
# site would have to add the largest GPU part to `mem_limit`, for users without a GPU as well.


def saved_bytes(grant: SpawnGrant | None) -> int:
    """Return the host memory that the whole GPU memory of a lease takes while it sleeps."""
    if grant is None or grant.lease is None or any(device.startswith("MIG-") for device in grant.devices):
        return 0  # the driver cannot suspend a process on a MIG instance
    # As the device helper counts it: 5 % beside the bytes themselves.
    return grant.memory_limit_bytes + grant.memory_limit_bytes // 20


class MemoryForSleep(LoggingConfigurable):
    """Part of `GPUShareMixin`."""

    add_gpu_memory_to_mem_limit = Bool(
        True,
        help="""
        Add the GPU memory of a lease, and 5 %, to `mem_limit` of its server.

        That memory is needed while the lease is suspended; while it is not, programs of
        the server can use it as host memory. With False a lease is suspended only where
        its GPU memory fits into `mem_limit` beside what programs use.
        """,
    ).tag(config=True)

    # From the spawner class that this one is combined with.
    mem_limit: int | None

    @contextmanager
    def memory_for_sleep(self, grant: SpawnGrant | None) -> Iterator[None]:
        """Have `mem_limit` hold the GPU memory of a lease as well, where it limits anything."""
        site = self.mem_limit
        if site and self.add_gpu_memory_to_mem_limit:
            self.mem_limit = site + saved_bytes(grant)
        try:
            yield
        finally:
            self.mem_limit = site
