"""Limits of memory and processes for servers and jobs that are local processes.

With `cgroup_root` each server has a cgroup (v2) of its own: memory.max is `mem_limit`, swap is
off, and pids.max is `processes_limit`.  The kernel keeps all descendants in it.  The cgroup
belongs to the Hub, so a server with another uid cannot leave it.  The Hub removes it after the
server's end, or, if processes remain in it, at a later start when it is empty.

Without `cgroup_root` the kernel counts processes per user (RLIMIT_NPROC), if servers have a uid
other than the Hub's.  Memory is not limited then: RLIMIT_AS would count what CUDA only reserves,
and no program could use a GPU.
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

# A new cgroup may stay empty this long, until its process joins it.
START_S = 60.0


class LimitedProcesses(LoggingConfigurable):
    """Mixin in front of `LocalProcessSpawner`, or of a class that derives from it."""

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
    server_uid: Callable[[], int]  # returns the uid that the server's processes will have
    _environment: dict[str, str]
    _tell_administrator: Callable[[str], None]

    _cgroup = ""
    _leftover: ClassVar[set[str]] = set()  # cgroups of ended servers that could not be removed

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return the function that a new process runs first: it sets the limits, then runs the site's own.

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
        # The device helper assigns a process in "gpushare-LEASE" to that lease.
        user, server = (quote(name, safe="") for name in (self.user.name, self.name))
        own = f"gpushare-{lease}" if lease else f"server-{user}:{server}"
        _write(root / "cgroup.subtree_control", "+memory +pids")
        self._remove_leftover(root)
        (root / own).mkdir(exist_ok=True)
        self._leftover.discard(str(root / own))
        _write(root / own / "memory.max", str(self.mem_limit or "max"))
        with suppress(FileNotFoundError):  # a kernel without swap
            _write(root / own / "memory.swap.max", "0" if self.mem_limit else "max")
        _write(root / own / "pids.max", str(self.processes_limit or "max"))
        return root / own

    def _remove_leftover(self, root: Path) -> None:
        """Remove the cgroups of ended servers; the kernel refuses to remove one with processes.

        These are the cgroups that this Hub could not remove, and the `server-*` ones of an earlier Hub.
        A `gpushare-*` cgroup that is empty may be in use by the device helper.
        """
        for folder in root.glob("server-*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > START_S:
                    self._leftover.add(str(folder))
        for cgroup in list(self._leftover):
            self._remove(cgroup)

    def _remove(self, cgroup: str) -> None:
        try:
            os.rmdir(cgroup)
        except FileNotFoundError:
            self._leftover.discard(cgroup)
        except OSError:  # processes are still in it
            self._leftover.add(cgroup)
        else:
            self._leftover.discard(cgroup)

    async def run_post_stop_hook(self) -> None:
        """Remove the cgroup, then run the site's hook."""
        if self._cgroup:
            self._remove(self._cgroup)
        result = super().run_post_stop_hook()  # type: ignore[misc]
        if inspect.isawaitable(result):
            await result

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores, with the cgroup."""
        state: dict[str, Any] = super().get_state()  # type: ignore[misc]
        return {**state, "gpushare_cgroup": self._cgroup} if self._cgroup else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the state that the Hub stored, with the cgroup."""
        super().load_state(state)  # type: ignore[misc]
        self._cgroup = state.get("gpushare_cgroup", "")


def _write(path: Path, text: str) -> None:
    # Without O_CREAT: a file that this kernel does not have stays missing.
    with open(os.open(path, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(text)
