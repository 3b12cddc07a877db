"""Run a real systemd as process 1 of new namespaces, in a new cgroup (v2), on the machine's network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from tests.waiting import until

# ---- cgroups (v2) ------------------------------------------------------------


def cgroup2() -> Path:
    """Return the folder of the cgroup hierarchy; skip the test if none is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    pytest.skip("no cgroup (v2) is mounted here")


# ---- systemd -----------------------------------------------------------------

SYSTEMD = Path("/lib/systemd/systemd")
# This systemd does not know the machine's units, so these replace the ones that our units name.
TARGETS = ("default", "basic", "sysinit", "sockets", "shutdown", "network", "multi-user")
_BOOT = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
umount --lazy /sys/fs/cgroup || true
mount -t cgroup2 none /sys/fs/cgroup
mkdir /run/gpushare-test
find "$1" -maxdepth 1 -name '*.py' -exec cp {} /run/gpushare-test/ ';'
exec env -i PATH=/usr/bin:/bin container=test SYSTEMD_UNIT_PATH="$1"/units \
    "$2" --system --unit=default.target --log-target=kmsg --show-status=0
"""


class Systemd:
    """A systemd that knows only the units in ``folder``/units."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cgroup = cgroup2() / f"gpushare-test-{os.getpid()}"
        self.write_units(folder / "units")
        self.cgroup.mkdir()
        join = 'echo $$ > "$1"/cgroup.procs; shift; exec "$@"'
        own = ("unshare", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--fork", "--mount-proc")
        self._log = folder / "boot.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("bash", "-c", join, "bash", self.cgroup, *own, "--kill-child"),
                    *("bash", "-c", _BOOT, "bash", folder, SYSTEMD),
                ],
                stdout=log,
                stderr=log,
            )
        self.pid = 0

    def write_units(self, units: Path) -> None:
        """Create the folder of units."""
        units.mkdir()
        for name in TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")

    @classmethod
    @contextmanager
    def booted(cls, folder: Path) -> Iterator[Self]:
        """Yield a running systemd; skip the test if systemd cannot run."""
        if os.geteuid() != 0:
            pytest.skip("needs root: systemd is process 1 of a namespace")
        if not SYSTEMD.exists():
            pytest.skip(f"{SYSTEMD} is not installed")
        made = cls(folder)
        try:
            made.start()
            yield made
        finally:
            made.close()

    def start(self) -> None:
        until(lambda: self._process.poll() is not None or self._is_up(), "systemd takes orders")
        if self._process.poll() is not None:
            kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
            lines = [line for line in kernel.splitlines() if "systemd[1]" in line][-3:]
            pytest.skip(f"systemd does not run here: {self._log.read_text()[-500:]}{' / '.join(lines)}")

    def _is_up(self) -> bool:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0]) if children else 0
        return bool(children) and self.run("list-units", check=False).returncode == 0

    @property
    def beside(self) -> list[str]:
        """The prefix of a command line that runs a program in the namespaces of this systemd."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--cgroup", "--uts", "--ipc"]

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run systemctl for this systemd."""
        command = [*self.beside, "systemctl", "--no-pager", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    def write_programs(self, folder: Path) -> None:
        """Write scripts systemd-run and systemctl with which a Hub outside controls this systemd."""
        for name in ("systemd-run", "systemctl"):
            path = folder / name
            path.write_text(f'#!/bin/sh\nexec {" ".join(self.beside)} {shutil.which(name)} "$@"\n')
            path.chmod(0o755)

    def properties(self, unit: str, *names: str) -> list[str]:
        """Return the values of a unit's properties."""
        shown = self.run("show", unit, *(f"--property={name}" for name in names)).stdout.splitlines()
        values = dict(line.split("=", 1) for line in shown)
        return [values[name] for name in names]

    def pids(self, unit: str) -> list[int]:
        """Return the pids of a unit's processes as the test sees them; none if the unit does not run."""
        try:
            return [
                int(pid) for pid in (self.cgroup / "system.slice" / unit / "cgroup.procs").read_text().split()
            ]
        except OSError:
            return []

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # this kills process 1, and so all others
        self._process.wait()
        until(lambda: _removed(self.cgroup), "its cgroups are removed")


def _removed(cgroup: Path) -> bool:
    for path in sorted(cgroup.rglob("*"), reverse=True):
        if path.is_dir():
            try:
                path.rmdir()
            except OSError:
                return False
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True
