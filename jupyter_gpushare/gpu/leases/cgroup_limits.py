"""Have the driver limit a lease: its cgroup gets its limits, and its processes are moved there."""

from __future__ import annotations

import logging

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.protocol.helper import Phase

log = logging.getLogger(__name__)


def limit(lease: HelperLease, cgroups: Cgroups) -> None:
    """Have the driver limit a lease, if it can; ``lease.in_cgroup`` then says whether it does."""
    # Memory that a suspended lease has lent must not stay guaranteed to it.
    suspended = lease.phase is Phase.SUSPENDED
    guaranteed = dict.fromkeys(lease.limits, 0) if suspended else lease.asked.guaranteed
    try:
        cgroups.make(lease.name, lease.limits, guaranteed)
        lease.in_cgroup = True
    except (DeviceError, OSError) as error:
        log.warning("lease=%s is not limited by the driver: %s", lease.name, error)
        lease.in_cgroup = False
    lease.placed = frozenset()


def place(lease: HelperLease, cgroups: Cgroups, processes: Processes) -> None:
    """Move the processes of a lease into its cgroup; ``lease.in_cgroup`` is false if one cannot be moved.

    A process in a container stays in the container's cgroup: the container engine's limits hold only there.
    """
    keys = frozenset(process.key for process in lease.processes)
    if not lease.in_cgroup or keys <= lease.placed:
        return
    if any(processes.had_lease(process) for process in lease.processes):
        log.warning("lease=%s is not limited by the driver: it is in a container", lease.name)
        lease.in_cgroup = False
        return
    placed = lease.placed & keys
    for key in keys - lease.placed:
        if not processes.alive(key):
            continue
        try:
            cgroups.join(lease.name, key[0])
        except ProcessLookupError:
            continue
        except OSError as error:
            log.warning("lease=%s process %d is not limited by the driver: %s", lease.name, key[0], error)
            lease.in_cgroup = False
        else:
            placed |= {key}
    lease.placed = placed
