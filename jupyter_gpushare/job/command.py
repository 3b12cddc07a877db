"""The environment and folder of a job's command, and the reasons why it cannot start.

Exit codes of a command that cannot start follow the shells: 126 if the command or its folder
cannot be used, 127 if the command does not exist.
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

# Variables of the Hub for its server, such as the token, which the command must not get.
_PRIVATE = ("JUPYTERHUB_", "JPY_", "GPUSHARE_JOB", "GPUSHARE_API_")
_KEPT = frozenset({"JUPYTERHUB_USER"})
# Variables that tie the command to its lease; the job's environment cannot change them.
_LEASE = ("GPUSHARE_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_PRELOAD = "LD_PRELOAD"


class CannotStart(GpuShareError):
    """The command was not started; the text is for the user."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def lease_has_ended(runner: Mapping[str, str]) -> bool:
    """Return whether the device helper has removed the lease of this attempt.

    It does so if an attempt is stopped while the Hub still starts its server, and then ends the processes
    of the lease.  So a command that was started before is ended, and none may be started after.
    """
    folder = runner.get("GPUSHARE_LEASE_DIR", "")
    return bool(folder) and not os.path.exists(os.path.join(folder, LIMIT_NAME))


def command_environment(runner: Mapping[str, str], spec: JobSpec, progress_socket: str) -> dict[str, str]:
    """Return the environment of the command: the runner's without secrets, and the job's."""
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
    """Return the folder in which the command runs.

    Raises:
        CannotStart: the folder does not exist, or may not be entered.
    """
    folder = spec.cwd or home
    if not os.path.isdir(folder):
        raise CannotStart(f"The folder {folder} does not exist.", CANNOT_USE)
    if not os.access(folder, os.X_OK):
        raise CannotStart(f"The folder {folder} may not be entered.", CANNOT_USE)
    return folder


def start_error(error: OSError | ValueError, argv: list[str]) -> CannotStart:
    """Return the error for the user after a failed start."""
    name = argv[0][:200]
    if isinstance(error, FileNotFoundError):
        return CannotStart(f"There is no command {name}.", NOT_FOUND)
    if isinstance(error, OSError):
        return CannotStart(f"{name} cannot be run: {error.strerror}.", CANNOT_USE)
    return CannotStart(f"{name} cannot be run: {error}.", CANNOT_USE)
