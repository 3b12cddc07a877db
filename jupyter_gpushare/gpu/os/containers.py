"""Find the container of a process, and the mounts that the process sees.

On Kubernetes the outermost ``pod<UID>`` in /proc/PID/cgroup names the pod, with all its containers.
Elsewhere the outermost container id of an engine does (64 hexadecimal digits: Docker, Podman).
A user may create cgroups only below these, or below a service that systemd delegates to the user.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jupyter_gpushare import procfs

CGROUP_BYTES = 8192
MOUNTINFO_BYTES = 1 << 20

_POD = re.compile(rb"pod([0-9a-f]{8}[-_]?(?:[0-9a-f]{4}[-_]?){3}[0-9a-f]{12})(?:\.slice)?(?=/|$)")
# Names of Docker, Podman, containerd and CRI-O; not of conmon, which is a process of the engine.
_ENGINE = re.compile(
    rb"/(?:docker-|libpod-|nerdctl-|cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?(?=/|$)"
)
_ESCAPED = re.compile(rb"\\([0-7]{3})")
Mount = tuple[bytes, bytes, bytes]  # major:minor, root in that file system, mount point


def container_of(cgroup: bytes, own: str = "") -> str:
    """Return the UID of the pod, or the id of the container, in a /proc/PID/cgroup; empty if in neither.

    ``own`` is the container of this process: a container inside it counts as another one.
    """
    for line in cgroup.splitlines():
        if found := _POD.search(line):
            return found.group(1).decode().replace("_", "-")
        names = [each.group(1).decode() for each in _ENGINE.finditer(line) if _is_of_root(line, each)]
        if own in names[:-1]:
            names = names[names.index(own) + 1 :]
        if names:
            return names[0]
    return ""


def _is_of_root(line: bytes, found: re.Match[bytes]) -> bool:
    """Return whether no service's cgroup is above.

    systemd may delegate one to a user (``user@1000.service``).
    """
    return b".service/" not in line[: found.start() + 1]


def mounts(pid: int) -> list[Mount]:
    """Return the mounts that a process sees, from the first `MOUNTINFO_BYTES`; pid 0 is this process."""
    raw = procfs.read(pid, "mountinfo", MOUNTINFO_BYTES)
    found = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        words = line.split(b" ", 5)
        if len(words) == 6:
            found.append((words[2], _unescaped(words[3]), _unescaped(words[4])))
    return found


def mount_root(folder: Path) -> tuple[bytes, bytes]:
    """Return the file system (major:minor) of a folder of this process, and the folder's path within it."""
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
