"""The living processes of leases, and by which keys their accounts name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jupyter_gpushare.gpu.leases.lease import Key, Lease
from jupyter_gpushare.gpu.leases.own_memory import LOOK_S
from jupyter_gpushare.gpu.leases.processes import Process, Processes


def living_of(
    processes: Processes, leases: Sequence[Lease], within_s: float = LOOK_S
) -> dict[str, tuple[Process, ...]]:
    """Return the living processes of every lease by its name, looked up now, oldest first.

    A process that does not answer belongs to the lease that has it in its account or record.

    Raises:
        OSError: no descriptor or memory is left to look.
    """
    owners = {lease.name: lease.asked.uid for lease in leases}
    found = processes.scan(owners, within_s)
    claimed = [lease.claim(processes) for lease in leases]
    if any(claimed):
        found = processes.scan(owners)
    for lease in leases:
        lease.files.know(keys_by_inner(found[lease.name]))
    return found


def keys_by_inner(processes: Iterable[Process]) -> dict[Key, Key]:
    """Return the keys of processes by those that they write into accounts; none that two of them have."""
    found: dict[Key, Key] = {}
    twice: set[Key] = set()
    for process in processes:
        if found.setdefault(process.inner_key, process.key) != process.key:
            twice.add(process.inner_key)
    return {inner: key for inner, key in found.items() if inner not in twice}
