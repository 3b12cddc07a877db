"""Start Hubs as forks of a process that has already imported JupyterHub, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tests.forks import Forked, Forks

_PREPARE = "import jupyterhub.app, jupyterhub.apihandlers, jupyterhub.handlers, jupyter_gpushare.hub"
_RUN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from jupyterhub.app import main
main()
"""
_made: list[Forks] = []
_users = 0  # folders of this run with the fixture; each has a fixture of its own


def fork_hub(config: Path, env: Mapping[str, str], folder: Path, log: IO[Any]) -> Forked | None:
    """Start a Hub as a fork, or return None if no folder of this run uses `hubs_are_forks`."""
    if not _users:
        return None
    if not _made:
        _made.append(Forks(_PREPARE, env))
    if not _made[0].can_start(env):
        return None
    return _made[0].start(_RUN, ["-f", str(config)], env=env, cwd=folder, stdout=log, stderr=log)


@pytest.fixture(scope="session", autouse=True)
def hubs_are_forks() -> Iterator[None]:
    """Start Hubs as forks; a traced Hub, or one with another interpreter, is a separate program."""
    global _users
    _users += 1
    yield
    _users -= 1
    while _made and not _users:
        _made.pop().close()
