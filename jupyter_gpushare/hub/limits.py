"""Limits of memory and processes for servers and jobs that are local processes.

With `cgroup_root` each server has a cgroup (v2) of its own, with `mem_limit` as its
memory.max, no swap beside it, and `processes_limit` as its pids.max; the kernel keeps all its
descendants there.  It belongs to the Hub, so a server with another uid cannot leave it.  It is
removed after the server; one in which processes were left is removed at a later start, once
it is empty.

Without `cgroup_root` the kernel counts processes per user (RLIMIT_NPROC), where the server
has a uid of its own, and memory is not limited: RLIMIT_AS would count what CUDA only
reserves, and no program could use a GPU.
"""

from __future__ import annotations

import inspect
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from traitlets import Integer, Unicode
from traitlets.config import LoggingConfigurable

from jupyter_gpushare.hub.refusals import NO_LIMITS, refusal

# A process joins its cgroup well within this time after that was made.
START_S = 60.0


class LimitedProcesses(LoggingConfigurable):
    """Goes before `LocalProcessSpawner` or a class that derives from it."""

    cgroup_root = Unicode(
        "",
        help="""
        Folder of a cgroup (v2) without processes, below which the Hub may create others,
        such as `/sys/fs/cgroup/gpushare`. Each server and job then has a cgroup of its
        own, limited to `mem_limit` of JupyterHub's `Spawner` and to `processes_limit`.

        Empty: `mem_limit` is not enforced. Where the device helper has a `--cgroup-root`,
        give both the same folder: a process is in one cgroup only.
        """,
    ).tag(config=True)

    processes_limit = Integer(
        0,
        min=0,
        help="""
        How many processes and threads one server or job may have; 0: no limit.

        Without `cgroup_root` it is the limit of all processes of that user on the machine,
        and holds only where servers have a user id of their own.
        """,
    ).tag(config=True)

    # From the spawner classes that this one is combined with.
    mem_limit: int | None
    name: str
    user: Any
    server_uid: Callable[[], int]  # of the uid that the server's processes will have
    _environment: dict[str, str]
    _tell_administrator: Callable[[str], None]

    _cgroup = ""
    _left: ClassVar[set[str]] = set()  # cgroups of ended servers that could not be removed

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the new process runs first: it takes its limits, then goes on as before.

        Raises:
            SpawnException: the limits cannot be set; the log says why.
        """
        inner: Callable[[], None] = super().make_preexec_fn(name)  # type: ignore[misc]
        limit = self._limits()

        def preexec() -> None:
            limit()
            inner()

        return preexec

    def _limits(self) -> Callable[[], None]:
        count = self.processes_limit
        self._cgroup = ""
        if self.cgroup_root and (count or self.mem_limit):
            try:
                self._cgroup = str(self._make_cgroup())
            except OSError as error:
                self._tell_administrator(f"the limits of servers cannot be set: {error}")
                raise refusal(NO_LIMITS, "no_limits", 503) from None
            procs = Path(self._cgroup, "cgroup.procs")
            return lambda: _write(procs, "0")  # 0 is the process that writes
        if count and self.server_uid() != os.getuid():
            return lambda: resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        return lambda: None

    def _make_cgroup(self) -> Path:
        """Return the cgroup of this start with its limits.

        Raises:
            OSError: it cannot be created or limited.
        """
        root, lease = Path(self.cgroup_root), self._environment.get("GPUSHARE_LEASE")
        # The device helper takes a process in the first of these for one of the lease.
        user, server = (quote(name, safe="") for name in (self.user.name, self.name))
        own = f"gpushare-{lease}" if lease else f"server-{user}:{server}"
        _write(root / "cgroup.subtree_control", "+memory +pids")
        self._remove_left(root)
        (root / own).mkdir(exist_ok=True)
        self._left.discard(str(root / own))
        _write(root / own / "memory.max", str(self.mem_limit or "max"))
        with suppress(FileNotFoundError):  # a kernel without swap
            _write(root / own / "memory.swap.max", "0" if self.mem_limit else "max")
        _write(root / own / "pids.max", str(self.processes_limit or "max"))
        return root / own

    def _remove_left(self, root: Path) -> None:
        """Remove cgroups of ended servers; the kernel refuses one with processes.

        Those that this Hub could not remove, and those without a lease that an earlier Hub left: an
        empty one of a lease may be the device helper's.
        """
        for folder in root.glob("server-*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > START_S:
                    self._left.add(str(folder))
        for left in list(self._left):
            self._remove(left)

    def _remove(self, cgroup: str) -> None:
        try:
            os.rmdir(cgroup)
        except FileNotFoundError:
            self._left.discard(cgroup)
        except OSError:  # processes are still in it
            self._left.add(cgroup)
        else:
            self._left.discard(cgroup)

    async def run_post_stop_hook(self) -> None:
        """Remove the cgroup, then run the site's hook."""
        if self._cgroup:
            self._remove(self._cgroup)
        result = super().run_post_stop_hook()  # type: ignore[misc]
        if inspect.isawaitable(result):
            await result

    def get_state(self) -> dict[str, Any]:
        """Return what the Hub stores, with the cgroup."""
        state: dict[str, Any] = super().get_state()  # type: ignore[misc]
        return {**state, "gpushare_cgroup": self._cgroup} if self._cgroup else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what the Hub stored, with the cgroup."""
        super().load_state(state)  # type: ignore[misc]
        self._cgroup = state.get("gpushare_cgroup", "")


def _write(path: Path, text: str) -> None:
    # Never creates: a file that the kernel does not have is missing here.
    with open(os.open(path, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(text)
