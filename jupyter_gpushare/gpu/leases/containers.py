"""The pods of this node, and the lease of each.

On Kubernetes all users may have one uid, and a user's process may make namespaces of its own, change
its root and drop its environment.  It cannot leave the cgroup of its pod.  So a pod belongs to a lease
when the directory of the lease is mounted in one of its containers, and from then on every process in
that pod's cgroup does.  A process of any other pod belongs to no lease, whatever it says.

* The outermost ``pod<UID>`` in /proc/PID/cgroup names the pod: cgroups that a user may create are below.
* A mount is compared by its file system (major:minor) and by its root within that, both from
  /proc/PID/mountinfo.  The kernel answers; no path below /proc/PID/root is resolved, which a user
  controls.  Only the node's kubelet mounts a folder of the node in a pod.

What was found is written to a private file, so that the next helper knows it too: by then the first
process of the pod may have left its mounts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from jupyter_gpushare import procfs

log = logging.getLogger(__name__)

CGROUP_BYTES = 8192
MOUNTINFO_BYTES = 1 << 20
MAX_PODS = 1024
# Of each pod without a lease so many processes are looked at in each scan, the oldest first.
MOST_LOOKS = 16

_POD = re.compile(rb"pod([0-9a-f]{8}[-_]?(?:[0-9a-f]{4}[-_]?){3}[0-9a-f]{12})(?:\.slice)?(?=/|\n|$)")
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_Mount = tuple[bytes, bytes, bytes]  # major:minor, root in that file system, mount point


def pod_of(cgroup: bytes) -> str:
    """Return the UID of the pod in the contents of /proc/PID/cgroup; empty: no pod."""
    found = _POD.search(cgroup)
    return found.group(1).decode().replace("_", "-") if found else ""


class NoPods:
    """A machine where processes are in no pods of ours."""

    def counts(self, pod: str) -> bool:
        """Return whether the processes of a pod belong to its lease, or to none."""
        return False

    def lease_of(self, pod: str) -> str:
        """Return the lease of a pod; empty: none is known."""
        return ""

    def learn(self, seen: Iterable[tuple[str, int]], leases: Collection[str]) -> None:
        """Look for the directories of ``leases`` in pods; ``seen`` has pods and pids, the oldest first."""


class Pods(NoPods):
    """The leases of the pods of a node; several threads may ask and `learn`."""

    def __init__(self, leases: Path, file: Path, boot_id: str) -> None:
        """``leases``: where the directories of leases are; ``file`` remembers the pods of this boot."""
        self._file = file
        self._boot_id = boot_id
        self._device, self._root = _place(leases.resolve())
        self._bound = self._read()
        self._guard = threading.Lock()
        self._own = pod_of(procfs.read(0, "cgroup", CGROUP_BYTES))

    def counts(self, pod: str) -> bool:
        """Return whether the processes of a pod belong to its lease, or to none: not in the helper's own."""
        return bool(pod) and pod != self._own

    def lease_of(self, pod: str) -> str:
        """Return the lease of a pod; empty: none is known."""
        return self._bound.get(pod, "")

    def learn(self, seen: Iterable[tuple[str, int]], leases: Collection[str]) -> None:
        """Look for the directories of ``leases`` in pods; ``seen`` has pods and pids, the oldest first."""
        found: dict[str, str] = {}
        looks = Counter[str]()
        for pod, pid in seen:
            looks[pod] += 1
            if pod in self._bound or pod in found or looks[pod] > MOST_LOOKS:
                continue
            if lease := self._mounted_in(pid, leases):
                found[pod] = lease
        if not found:
            return
        with self._guard:
            kept = {pod: lease for pod, lease in self._bound.items() if lease in leases}
            if len(kept) + len(found) > MAX_PODS:
                log.error("%d pods have leases: a further one counts as without", MAX_PODS)
                return
            self._bound = kept | found
            self._write()
        for pod, lease in found.items():
            log.info("lease=%s pod=%s", lease, pod)

    def _mounted_in(self, pid: int, leases: Collection[str]) -> str:
        prefix = self._root.rstrip(b"/") + b"/"
        for device, root, _ in mounts(pid):
            if device == self._device and root.startswith(prefix):
                name = os.fsdecode(root.removeprefix(prefix))
                if name in leases:
                    return name
        return ""

    def _read(self) -> dict[str, str]:
        try:
            value = json.loads(self._file.read_bytes())
            if value["boot_id"] == self._boot_id:
                return {str(pod): str(lease) for pod, lease in value["pods"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s cannot be read, pods are looked for again: %s", self._file, error)
        return {}

    def _write(self) -> None:
        new = self._file.with_name(f".{self._file.name}.new")
        try:
            new.write_text(json.dumps({"boot_id": self._boot_id, "pods": self._bound}), encoding="utf-8")
            new.rename(self._file)
        except OSError as error:
            log.error("%s cannot be written, the next helper may miss pods: %s", self._file, error)


def mounts(pid: int) -> list[_Mount]:
    """Return the mounts that a process sees, as far as `MOUNTINFO_BYTES` tell; 0 is this process."""
    raw = procfs.read_whole(pid, "mountinfo", MOUNTINFO_BYTES)
    found = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        words = line.split(b" ", 5)
        if len(words) == 6:
            found.append((words[2], _unescaped(words[3]), _unescaped(words[4])))
    return found


def _place(folder: Path) -> tuple[bytes, bytes]:
    """Return the file system of a folder of this process, and the folder's path within it."""
    path = os.fsencode(folder)
    device, root, longest = b"", path, -1
    for at, within, point in mounts(0):
        inside = path == point or path.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= longest:  # the last of two on one point is the one on top
            rest = path[len(point.rstrip(b"/")) :]
            device, root, longest = at, within.rstrip(b"/") + rest, len(point)
    return device, root


def _unescaped(field: bytes) -> bytes:
    return _ESCAPED.sub(lambda found: bytes([int(found.group(1), 8) & 255]), field)
