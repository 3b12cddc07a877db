"""What the command of a job gets to see, and why it may not start.

Exit codes of a job that cannot start follow the shells: 126 it (or its folder)
cannot be used, 127 it does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.job.progress import SOCKET_VARIABLE
from jupyter_gpushare.protocol import LIMIT_NAME
from jupyter_gpushare.protocol.wire import JobSpec

CANNOT_USE = 126
NOT_FOUND = 127

# The Hub's words to a server are not for the command; above all not its token.
_PRIVATE = ("JUPYTERHUB_", "JPY_", "GPUSHARE_JOB", "GPUSHARE_API_")
_KEPT = frozenset({"JUPYTERHUB_USER"})
# What makes the command a holder of its lease; a job's own environment cannot change it.
_LEASE = ("GPUSHARE_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_PRELOAD = "LD_PRELOAD"


class CannotStart(GpuShareError):
    """The command was not started; the text is for the user."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def lease_has_ended(runner: Mapping[str, str]) -> bool:
    """Return whether the device helper has removed the lease of this attempt.

    It does so when an attempt is stopped whose server the Hub still starts, and then ends the
    processes of the lease: a command that was started before is ended, none is started after.
    """
    folder = runner.get("GPUSHARE_LEASE_DIR", "")
    return bool(folder) and not os.path.exists(os.path.join(folder, LIMIT_NAME))


def command_environment(runner: Mapping[str, str], spec: JobSpec, progress_socket: str) -> dict[str, str]:
    """Return the environment of the command: the runner's, without secrets, with the job's own."""
    env = {key: value for key, value in runner.items() if key in _KEPT or not key.startswith(_PRIVATE)}
    for key, value in spec.env.items():
        if key == _PRELOAD:
            env[key] = ":".join(filter(None, (runner.get(_PRELOAD), value)))
        elif not key.startswith((*_PRIVATE, *_LEASE)):
            env[key] = value
    env["GPUSHARE_JOB_ID"] = spec.id
    env["GPUSHARE_JOB_ATTEMPT"] = str(spec.attempt)
    env[SOCKET_VARIABLE] = progress_socket
    return env


def working_directory(spec: JobSpec, home: str) -> str:
    """Return where the command runs.

    Raises:
        CannotStart: there is no such folder, or it may not be entered.
    """
    folder = spec.cwd or home
    if not os.path.isdir(folder):
        raise CannotStart(f"The folder {folder} does not exist.", CANNOT_USE)
    if not os.access(folder, os.X_OK):
        raise CannotStart(f"The folder {folder} may not be entered.", CANNOT_USE)
    return folder


def why_not(error: OSError | ValueError, argv: list[str]) -> CannotStart:
    """Return what a failed start means for the user."""
    name = argv[0][:200]
    if isinstance(error, FileNotFoundError):
        return CannotStart(f"There is no command {name}.", NOT_FOUND)
    if isinstance(error, OSError):
        return CannotStart(f"{name} cannot be run: {error.strerror}.", CANNOT_USE)
    return CannotStart(f"{name} cannot be run: {error}.", CANNOT_USE)
