"""Servers with the uid of a system user; needs root, and a Python that such a user can run."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.conftest import LOCAL, Hub, running_hub, wait_for
from tests.waiting import is_alive

USER = "nobody"


def python_for_all_users() -> str | None:
    """A Python that another user may execute (that of a virtual environment below /root is none)."""
    for name in ("/usr/bin/python3", shutil.which("python3") or ""):
        try:
            tried = subprocess.run([name, "-c", ""], user=USER, cwd="/", capture_output=True, check=False)
        except OSError:
            continue
        if tried.returncode == 0:
            return name
    return None


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    python = python_for_all_users()
    if python is None:
        pytest.skip(f"no Python that user {USER} can run")
    with tempfile.TemporaryDirectory(prefix="gpushare-users-") as folder:
        # The stub server lies here, for all users to read; secrets beside it have modes of their own.
        Path(folder).chmod(0o755)
        with running_hub(LOCAL, Path(folder), python=python, may_fork=False) as hub:
            yield hub


def test_the_server_and_the_request_have_the_uid_of_the_user(hub: Hub) -> None:
    hub.ensure_user(USER)
    assert hub.start_server(USER, {"fraction": "1/2"}).status_code == 201
    uid = pwd.getpwnam(USER).pw_uid
    assert hub.broker.of("spawner/start")[-1].body["uid"] == uid
    pid = hub.state(USER)["pid"]
    assert os.stat(f"/proc/{pid}").st_uid == uid
    assert hub.environment(USER)["GPUSHARE_LEASE"] == "abc-1"
    hub.stop_server(USER)
    assert not is_alive(pid)


def test_a_restarted_hub_finds_the_server_of_another_uid_again(hub: Hub) -> None:
    hub.ensure_user(USER)
    assert hub.start_server(USER, {"fraction": "1/2"}).status_code == 201
    pid = hub.state(USER)["pid"]
    hub.kill()
    hub.start()
    assert hub.wait_ready(USER)
    hub.stop_server(USER)
    wait_for(lambda: not is_alive(pid), "the server is gone")


def test_a_user_that_the_system_does_not_know_is_told_so(hub: Hub) -> None:
    hub.ensure_user("ghost")
    answer = hub.start_server("ghost", {"fraction": "1/2"})
    assert answer.status_code == 400
    assert "no system user ghost" in answer.json()["message"]


def test_the_server_cannot_read_the_token_of_the_spawners(hub: Hub) -> None:
    token = hub.folder / "spawner-token"
    tried = subprocess.run(["cat", str(token)], user=USER, cwd="/", capture_output=True, check=False)
    assert tried.returncode != 0
