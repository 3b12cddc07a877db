"""Spawners for local processes: `gpushare-local` and, for trying out, `gpushare-simple`."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from pathlib import Path

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub.compat import keep_failure_count
from jupyter_gpushare.hub.limits import LimitedProcesses
from jupyter_gpushare.hub.process import PidCheckedSpawner
from jupyter_gpushare.hub.refusals import refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin
from jupyter_gpushare.hub.user_files import write_as


def uid_of(user: str) -> int:
    """Return the uid of a system user.

    Raises:
        SpawnException: the system does not know this name.
    """
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise refusal(f"There is no system user {user} on this machine.", "no_system_user", 400) from None


def _contents(paths: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return key and certificate as one file, and the authorities to believe."""
    key, certificate, authorities = (
        Path(paths[name]).read_bytes() for name in ("keyfile", "certfile", "cafile")
    )
    return key + certificate, authorities


class GPUShareLocalSpawner(GPUShareMixin, LimitedProcesses, PidCheckedSpawner, LocalProcessSpawner):
    """Local processes with the uid of the system user of the same name."""

    own_uid = True

    def server_uid(self) -> int:
        return uid_of(self.user.name)

    def may_gain(self) -> bool:
        return True

    async def move_certs(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Return copies of a server's certificates in its owner's home (`JupyterHub.internal_ssl`).

        Two files for all servers of a user, which any of them may read at any time: key and certificate
        are one file, so that they always belong together.  The stock class moves them, as root, into a
        folder that it empties and gives to the user.

        Raises:
            SpawnException: the user's home takes no files.
        """
        name = self.user.name
        uid_of(name)
        folder = Path(pwd.getpwnam(name).pw_dir) / ".jupyterhub" / "jupyterhub-certs"
        pair, authorities = folder / "server.pem", folder / "authorities.pem"
        # Read at once: the next start of a server of this user overwrites them.
        own, trusted = _contents(paths)
        try:
            await write_as(name, authorities, trusted)
            await write_as(name, pair, own)
        except GpuShareError as error:
            self.log.error("user=%s server=%s cannot start: %s", name, self.name, error)
            keep_failure_count(self)
            raise refusal(f"Your server's certificates: {error}.", "no_certificates", 409) from None
        return {"keyfile": str(pair), "certfile": str(pair), "cafile": str(authorities)}


class GPUShareSimpleSpawner(GPUShareMixin, LimitedProcesses, PidCheckedSpawner, SimpleLocalProcessSpawner):
    """For trying out: all servers have the uid of the Hub, whatever the user's name."""

    def may_gain(self) -> bool:
        return True
