"""Spawners for local processes: `gpushare-local` and, for trying out, `gpushare-simple`."""

from __future__ import annotations

import pwd

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from jupyter_gpushare.hub.limits import LimitedProcesses
from jupyter_gpushare.hub.process import PidCheckedSpawner
from jupyter_gpushare.hub.refusals import refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin


def uid_of(user: str) -> int:
    """Return the uid of a system user.

    Raises:
        SpawnException: the system does not know this name.
    """
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise refusal(f"There is no system user {user} on this machine.", "no_system_user", 400) from None


class GPUShareLocalSpawner(GPUShareMixin, LimitedProcesses, PidCheckedSpawner, LocalProcessSpawner):
    """Local processes with the uid of the system user of the same name."""

    def server_uid(self) -> int:
        return uid_of(self.user.name)


class GPUShareSimpleSpawner(GPUShareMixin, LimitedProcesses, PidCheckedSpawner, SimpleLocalProcessSpawner):
    """For trying out: all servers have the uid of the Hub, whatever the user's name."""
