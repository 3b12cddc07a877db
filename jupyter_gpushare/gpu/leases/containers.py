"""The lease of each container of this machine; a pod counts as one container.

All users of containers may have one uid.  A user's process may make its own namespaces, change its root
and drop its environment, but it cannot leave the cgroup of its container (`gpu.os.containers`).  So a
container belongs to a lease if the directory of the lease is mounted in it.  From then on every process in
its cgroup belongs to the lease.  A process of any other container belongs to no lease, whatever it claims.

A mount is compared by its file system (major:minor) and by its root within that, both from
/proc/PID/mountinfo.  The kernel answers that; no path below /proc/PID/root, which a user controls, is
resolved.  Mounts that a user made in its own user namespace do not count.

The answers are written to a private file, because the first process of a container may have left its
mounts when the next helper starts.  They outlive the lease: what runs in its container then has no lease.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.os.containers import CGROUP_BYTES, Mount, container_of, mount_root, mounts
from jupyter_gpushare.gpu.os.files import write_whole
from jupyter_gpushare.gpu.os.processes import Key

log = logging.getLogger(__name__)

# Containers that have or had a lease.  The oldest ones whose lease has ended make room for new ones.
MAX_CONTAINERS = 1024
# Of each container without a lease, each scan reads the mounts of this many processes, oldest first.
MAX_READS = 16


class Containers:
    """The lease of each container; safe to use from several threads."""

    def __init__(self, leases: Path, file: Path | None = None, boot_id: str = "") -> None:
        """``leases`` is the folder of the directories of leases; ``file`` keeps the answers of this boot."""
        self._file = file
        self._boot_id = boot_id
        self._device, self._root = mount_root(leases.resolve())
        self._leases = self._read()  # by container
        self._guard = threading.Lock()
        self.own = container_of(procfs.read(0, "cgroup", CGROUP_BYTES))

    def decides(self, container: str) -> bool:
        """Return whether a container decides the lease of its processes: all but the helper's own do."""
        return bool(container) and container != self.own

    def lease_of(self, container: str) -> str:
        """Return the lease that a container has or had; empty if none is known."""
        return self._leases.get(container, "")

    def has(self, lease: str) -> bool:
        """Return whether a lease has a container; then no process outside it belongs to the lease."""
        return lease in self._leases.values()

    def learn(self, seen: Iterable[tuple[str, Key]], leases: Collection[str]) -> None:
        """Note the containers in which the directory of one of ``leases`` is mounted.

        ``seen`` has each container with a process in it, oldest process first.
        """
        found: dict[str, str] = {}
        reads = Counter[str]()
        for container, key in seen:
            reads[container] += 1
            if container in self._leases or container in found or reads[container] > MAX_READS:
                continue
            if lease := self._mounted_in(key, leases):
                found[container] = lease
        if not found:
            return
        with self._guard:
            known = dict(self._leases)
            ended = (each for each, lease in self._leases.items() if lease not in leases)
            for container in ended:
                if len(known) + len(found) <= MAX_CONTAINERS:
                    break
                del known[container]
            if len(known) + len(found) > MAX_CONTAINERS:
                log.error("%d containers have leases: a further one counts as without", MAX_CONTAINERS)
                return
            self._leases = known | found
            self._write()
        for container, lease in found.items():
            log.info("lease=%s container=%s", lease, container)

    def _mounted_in(self, key: Key, leases: Collection[str]) -> str:
        """Return the lease whose directory root mounted in the mounts of a process; empty if none."""
        pid, start_ticks = key
        if procfs.maker(pid, "mnt") != procfs.maker(0, "user"):
            return ""
        lease = self._lease_in(mounts(pid), leases)
        # Another process may have got the pid meanwhile.
        return lease if procfs.is_running(pid, start_ticks) else ""

    def _lease_in(self, found: list[Mount], leases: Collection[str]) -> str:
        prefix = self._root.rstrip(b"/") + b"/"
        for device, root, _ in found:
            if device == self._device and root.startswith(prefix):
                name = os.fsdecode(root.removeprefix(prefix))
                if name in leases:
                    return name
        return ""

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            value = json.loads(self._file.read_bytes())
            if value["boot_id"] == self._boot_id:
                return {str(container): str(lease) for container, lease in value["containers"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s cannot be read, containers are looked for again: %s", self._file, error)
        return {}

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            stored = {"boot_id": self._boot_id, "containers": self._leases}
            write_whole(self._file, json.dumps(stored).encode())
        except OSError as error:
            log.error("%s cannot be written, the next helper may miss containers: %s", self._file, error)
