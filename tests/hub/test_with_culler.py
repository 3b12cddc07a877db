"""jupyterhub-idle-culler beside our spawner: it stops idle sessions, and no running job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dateutil.parser import parse

from tests.hub.conftest import ADMIN_TOKEN, SIMPLE, Hub, running_hub, wait_for
from tests.hub.test_jobs_with_hub import NAME, expect_job

TIMEOUT_S = 8
EXTRA = """
c.Spawner.environment["JUPYTERHUB_ACTIVITY_INTERVAL"] = "1"
c.JupyterHub.activity_resolution = 1
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(SIMPLE, tmp_path, extra=EXTRA) as hub:
        yield hub
        hub.stop_server("ada", NAME, remove=True)


def active_s(hub: Hub) -> float:
    """Seconds from the job's start to its last sign of life; fails when it was stopped."""
    job = hub.server("ada", NAME)
    assert job is not None, hub.log()[-3000:]
    return (parse(job["last_activity"]) - parse(job["started"])).total_seconds()


@contextmanager
def culler(hub: Hub) -> Iterator[Path]:
    """A culler of idle servers; yields its log."""
    command = [sys.executable, "-m", "jupyterhub_idle_culler", f"--url={hub.url}/hub/api"]
    command += [f"--timeout={TIMEOUT_S}", "--cull-every=1"]
    log = hub.folder / "culler.log"
    with log.open("wb") as file:
        env = {**os.environ, "JUPYTERHUB_API_TOKEN": ADMIN_TOKEN}
        process = subprocess.Popen(command, cwd=hub.folder, env=env, stdout=file, stderr=file)
    try:
        yield log
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait()


@pytest.mark.long
def test_an_idle_session_is_stopped_and_gives_its_lease_back_while_a_job_runs_on(hub: Hub) -> None:
    assert hub.start_server("cy", {"fraction": "1/2"}).status_code == 201, hub.log()[-3000:]
    expect_job(hub, "sleep", "600")
    assert hub.start_server("ada", name=NAME).status_code in (201, 202), hub.log()[-3000:]
    hub.wait_ready("ada", NAME)
    with culler(hub) as log:
        wait_for(lambda: not hub.server("cy"), "the idle session is stopped", log=log)
        longer = "the job runs for longer than the session"
        wait_for(lambda: active_s(hub) > 2 * TIMEOUT_S, longer, log=log)
    assert [(each.body["user"], each.body["by_hub"]) for each in hub.broker.of("spawner/stop")] == [
        ("cy", True)
    ]
