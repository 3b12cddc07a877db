"""Spawners for local processes: `gpushare-local` and, for trying out, `gpushare-simple`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyterhub import orm
from jupyterhub.auth import LocalAuthenticator
from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner
from jupyterhub.utils import maybe_future

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub.compat import keep_failure_count
from jupyter_gpushare.hub.limits import LimitedProcesses
from jupyter_gpushare.hub.process import PidCheckedSpawner
from jupyter_gpushare.hub.refusals import refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin

# ---- files for a system user, written by a process of that user
# The Hub is often root, and a folder in a user's home may be a link to any other folder.  So root writes,
# moves and chowns nothing there.

WRITE_S = 10.0
# $1 is the folder, $2 the file, $3 its size in bytes.  The file is renamed into place, so that a reader
# finds a whole version; its size is checked because the pipe closes early if the Hub ends.
_WRITE = (
    'umask 077 && mkdir -p "$1" && new=$(mktemp "$1/.XXXXXX") && cat > "$new" && '
    '[ "$(wc -c < "$new")" -eq "$3" ] && mv -f "$new" "$1/$2" || { rm -f "$new"; false; }'
)
_STDERR_BYTES = 500
_KILL_WAIT_S = 1.0


async def write_as(user: str, path: Path, content: bytes) -> None:
    """Write a file as ``user``, with mode 0600, and create missing folders above it.

    Raises:
        GpuShareError: the user's process could not write it, or not within `WRITE_S`.
    """
    errors, stderr = os.pipe()  # the kernel buffers 64 KiB, so the process never blocks
    try:
        os.set_blocking(errors, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _WRITE, "sh", str(path.parent), path.name, str(len(content))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                **_identity(user),
            )
        finally:
            os.close(stderr)
        await _feed(process, path, content)
        if process.returncode:
            output = b""
            with contextlib.suppress(BlockingIOError):  # no output, and a child still has the pipe open
                output = os.read(errors, _STDERR_BYTES)
            raise GpuShareError(f"{path} cannot be written: {output.decode(errors='replace').strip()}")
    finally:
        os.close(errors)


async def _feed(process: asyncio.subprocess.Process, path: Path, content: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await process.communicate(content)
    except TimeoutError:
        raise GpuShareError(f"{path} was not written within {WRITE_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # a process that waits for a disk cannot be killed
                async with asyncio.timeout(_KILL_WAIT_S):
                    await process.wait()


def _identity(user: str) -> dict[str, Any]:
    """Return the arguments that run a process as the user; none if the Hub is not root or the user is."""
    entry = pwd.getpwnam(user)
    if os.geteuid() != 0 or entry.pw_uid == 0:
        return {}
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


# ---- the spawners ------------------------------------------------------------


def uid_of(user: str) -> int:
    """Return the uid of a system user.

    Raises:
        SpawnException: no system user has this name.
    """
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise refusal(f"There is no system user {user} on this machine.", "no_system_user", 400) from None


def _contents(paths: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the key and certificate as one file, and the certificates of the trusted authorities."""
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

    def sees_all_gpus(self) -> bool:
        return True

    async def move_certs(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Copy a server's certificates to its owner's home (`JupyterHub.internal_ssl`); return the paths.

        All servers of a user share two files and may read them at any time.  The key and the certificate
        are in one file, so that they always match.  The stock class moves the files, as root, into a
        folder that it empties and gives to the user.

        Raises:
            SpawnException: the files cannot be written to the user's home.
        """
        name = self.user.name
        uid_of(name)
        folder = Path(pwd.getpwnam(name).pw_dir) / ".jupyterhub" / "jupyterhub-certs"
        pair, authorities = folder / "server.pem", folder / "authorities.pem"
        # Read now: the next start of a server of this user overwrites the sources.
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

    def sees_all_gpus(self) -> bool:
        return True


def warn_of_unknown_users() -> None:
    """Make the Hub of this process start although its configuration names users that the system lacks.

    JupyterHub exits if ``load_groups`` or ``load_roles`` names such a user (``LocalAuthenticator.add_user``):
    one that was removed, or any user while the machine's directory service is down.
    """
    app = sys.modules.get("jupyterhub.app")
    inner = getattr(app and app.JupyterHub, "_get_or_create_user", None)
    if app is None or inner is None:
        return

    @functools.wraps(inner)
    async def _get_or_create_user(hub: Any, username: str, hint: str) -> Any:
        try:
            return await inner(hub, username, hint)
        except KeyError:
            # The inner function adds the user to the database before it raises.
            user, known = orm.User.find(hub.db, username), hub.authenticator
            is_ours = issubclass(hub.spawner_class, GPUShareMixin) and user is not None
            if not is_ours or not isinstance(known, LocalAuthenticator):
                raise
            if await maybe_future(known.system_user_exists(user)):
                raise
            hub.log.warning(
                "The configuration names the user %s (%s), and the system has no such user: "
                "remove the name, or make the user.",
                *(username, hint),
            )
            return user

    app.JupyterHub._get_or_create_user = _get_or_create_user


warn_of_unknown_users()
