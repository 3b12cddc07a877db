"""Host memory for sessions that sleep: GPU memory that is suspended moves into its server's memory limit.

The device helper suspends nothing that does not fit into the limit (`gpu/leases/host.py`), so a
site would have to add the largest GPU part to `mem_limit`, for users without a GPU as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from traitlets import Bool
from traitlets.config import LoggingConfigurable

from jupyter_gpushare.protocol.wire import SpawnGrant


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
