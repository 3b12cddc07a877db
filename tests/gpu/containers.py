"""Containers for tests: cgroups with the names of kubelets and engines, and programs in new namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.gpu.os.containers import container_of
from tests.gpu.machine import WORKER, Machine, Worker

_HIERARCHIES = ("unified", "", "freezer", "pids")

# Like a container runtime: a new /proc, and folders of the node.  A variable tells the simulated driver where
# the first /proc is; a real driver needs none.
CONTAINER = """
set -e
mkdir -p "$GPUSHARE_SIM_PROC"
mount --rbind /proc "$GPUSHARE_SIM_PROC"
for folder in $MOUNTS; do mount --bind "$folder" "$folder"; done
mount -t proc proc /proc
exec "$@"
"""
# Like a user: a root without the folders of the node, and only the driver's variables.
ESCAPE = """
set -e
top=/$(echo "$FOLDER" | cut -d/ -f2)
mkdir -p "$FOLDER/new"
mount -t tmpfs none "$FOLDER/new"
for found in /*; do
  case $found in /proc|/sys|$top) continue;; esac
  if [ -L "$found" ]; then cp -P "$found" "$FOLDER/new$found"
  elif [ -d "$found" ]; then mkdir "$FOLDER/new$found"; mount --rbind "$found" "$FOLDER/new$found"; fi
done
mkdir -p "$FOLDER/new$CHECKOUT" "$FOLDER/new$FOLDER" "$FOLDER/new/proc" "$FOLDER/new/old"
case $CHECKOUT in $top/*) mount --rbind "$CHECKOUT" "$FOLDER/new$CHECKOUT";; esac
mount --rbind "$FOLDER" "$FOLDER/new$FOLDER"
cd "$FOLDER/new"
pivot_root . old
mount -t proc proc /proc
umount -l /old
cd /
exec "$@"
"""


@contextlib.contextmanager
def pod_cgroup() -> Iterator[Path]:
    """Yield the cgroup of a new pod; skip the test if none can be created."""
    uid = str(uuid.uuid4())
    with _cgroup(f"kubepods-pod{uid.replace('-', '_')}.slice", uid) as folder:
        yield folder


@contextlib.contextmanager
def engine_cgroup() -> Iterator[Path]:
    """Yield the cgroup of a new container, as Docker creates it with systemd; skip the test if it cannot."""
    container = uuid.uuid4().hex + uuid.uuid4().hex
    with _cgroup(f"docker-{container}.scope", container) as folder:
        yield folder


@contextlib.contextmanager
def _cgroup(cgroup: str, container: str) -> Iterator[Path]:
    for name in _HIERARCHIES:
        folder = Path("/sys/fs/cgroup") / name / cgroup
        try:
            folder.mkdir()
            if not (folder / "cgroup.procs").exists():
                folder.rmdir()
                continue
            inside = subprocess.run(
                ["sh", "-c", f"echo $$ > {folder}/cgroup.procs && cat /proc/self/cgroup"],
                capture_output=True, check=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            continue
        if container_of(inside.stdout) != container:
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            _empty(folder)
        return
    pytest.skip("no cgroup can be made here, which needs root, or this is a container itself")


def _empty(folder: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{folder} has processes")


def in_container(
    machine: Machine, lease: str, *, cgroup: Path | None = None, mounts: tuple[Path, ...] = ()
) -> Worker:
    """Start a process of a lease in new pid and mount namespaces, with these folders of the machine."""
    return _start(machine, lease, ["--pid", "--mount", "--fork"], CONTAINER, cgroup, mounts)


def escaped(machine: Machine, cgroup: Path) -> Worker:
    """Start a process in a container that then leaves its namespaces, its root and its environment."""
    own = ["--user", "--map-root-user", "--pid", "--mount", "--fork"]
    script = CONTAINER.replace('exec "$@"', ESCAPE)
    return _start(machine, "", own, script, cgroup, ())


def _start(
    machine: Machine,
    lease: str,
    namespaces: list[str],
    script: str,
    cgroup: Path | None,
    mounts: tuple[Path, ...],
) -> Worker:
    given = {
        "GPUSHARE_SIM_PROC": machine.folder / "first-proc",
        "FOLDER": machine.folder,
        "CHECKOUT": Path(__file__).resolve().parents[2],
        "MOUNTS": " ".join(map(str, mounts)),
    }
    enter = f"echo $$ > {cgroup}/cgroup.procs; " if cgroup else ""
    command = [
        "env", *(f"{key}={value}" for key, value in given.items()),
        "sh", "-c", f'{enter}exec "$@"', "sh",
        "unshare", *namespaces, "sh", "-c", script, "sh", sys.executable, str(WORKER),
    ]  # fmt: skip
    worker = machine.worker(lease, command=command, wait=False)
    assert worker.answer() == "ready 0"
    return worker
