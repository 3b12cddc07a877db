"""Training jobs as named servers of a real Hub: our runner, started by our spawner."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest

from jupyter_gpushare.protocol.wire import LaunchRequest
from jupyter_gpushare.server.launch import job_of
from tests.hub.conftest import SIMPLE, Hub, running_hub, wait_for
from tests.hub.fake_broker import GRANT
from tests.hub.fake_broker import JOB_NAME as NAME
from tests.waiting import is_alive

SECOND = "j0123456789-2"


def expect_job(hub: Hub, *command: str, attempt: int = 1, **job: Any) -> None:
    """Let the broker expect this job."""
    # Without a preload library: there is none at that path, and the linker would say so in the log.
    env = {key: value for key, value in GRANT["env"].items() if key != "LD_PRELOAD"}
    # Its lease exists, as the device helper has made it.
    lease = hub.folder / "lease"
    lease.mkdir(exist_ok=True)
    (lease / "limit").touch()
    env["GPUSHARE_LEASE_DIR"] = str(lease)
    hub.broker.grant = {**GRANT, "env": env}
    hub.broker.grant_job(name="train", command=list(command), attempt=attempt, grace_s=20.0, **job)
    shutil.rmtree(hub.folder / "home/ada/.local", ignore_errors=True)


def run_job(hub: Hub, *command: str) -> str:
    """Start this job, and return what it says first."""
    expect_job(hub, *command)
    hub.start_server("ada", name=NAME)
    hub.wait_ready("ada", NAME)
    return str(wait_for(lambda: log(hub), "the job runs"))


def ended(hub: Hub, attempt: int = 1) -> dict[str, Any]:
    """The report of the end of an attempt."""

    def found() -> dict[str, Any] | None:
        asked = hub.broker.of(f"jobs/0123456789/attempts/{attempt}/report")
        return next((each.body for each in asked if each.body["state"] == "ended"), None)

    return dict(wait_for(found, f"the end of attempt {attempt} is reported"))


def log(hub: Hub, attempt: int = 1) -> str:
    path = hub.folder / f"home/ada/.local/share/gpushare/jobs/0123456789/attempt-{attempt}.log"
    return path.read_text() if path.exists() else ""


def test_a_command_that_ends_at_once_is_a_result_not_a_failed_start(hub: Hub) -> None:
    expect_job(hub, "sh", "-c", "echo $GPUSHARE_LEASE; exit 3")
    assert hub.start_server("ada", name=NAME).status_code in (201, 202)
    assert ended(hub)["exit_code"] == 3
    wait_for(lambda: hub.broker.of("spawner/stop"), "the Hub has noticed the end, the lease is given back")
    stop = {"user": "ada", "server": NAME, "created": hub.made_at("ada")}
    assert hub.broker.of("spawner/stop")[0].body == {**stop, "by_hub": False}
    assert log(hub) == "abc-1\n"
    assert "failed to start" not in hub.log()


def test_the_job_is_run_by_the_runner_whatever_options_were_sent(hub: Hub) -> None:
    expect_job(hub, "echo", "what the broker said")
    hub.ensure_user("ada")
    body = {"user_options": {"job": {"command": ["touch", "forged"]}, "cmd": ["touch", "forged"]}}
    assert hub.api("POST", f"users/ada/servers/{NAME}", body).status_code in (201, 202)
    assert ended(hub)["exit_code"] == 0
    assert "what the broker said" in log(hub)
    assert not (hub.folder / "home/ada/forged").exists()


def test_the_ticket_of_the_broker_comes_back_with_the_start(hub: Hub) -> None:
    expect_job(hub, "true")
    hub.ensure_user("ada")
    answer = hub.api("POST", f"users/ada/servers/{NAME}", {"gpushare_start": "7.mac"})
    assert answer.status_code in (201, 202)
    assert ended(hub)["exit_code"] == 0
    assert hub.broker.of("spawner/start")[0].body["ticket"] == "7.mac"


def test_deleting_the_server_of_a_job_stops_it_with_its_grace(hub: Hub) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', flush=True)\n"
        "    while not os.path.exists('go'): time.sleep(.05)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    go = hub.folder / "home/ada/go"
    go.unlink(missing_ok=True)
    run_job(hub, sys.executable, "-c", code)
    assert hub.api("DELETE", f"users/ada/servers/{NAME}", {"remove": True}).status_code == 202
    wait_for(lambda: "saving" in log(hub), "the job was told")
    # Longer than the Hub leaves to a notebook server here (interrupt_timeout 2 s).
    wait_for(lambda: go.touch() or ended(hub), "the job ended by itself")
    assert (ended(hub)["exit_code"], ended(hub)["stopped"]) == (0, True)


def test_the_log_page_needs_the_login_of_the_owner(hub: Hub) -> None:
    run_job(hub, "sh", "-c", "echo secret; exec sleep 600")
    base = f"http://127.0.0.1:{hub.port_of('ada', NAME)}/user/ada/{NAME}/"

    def get(token: str | None) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"token {token}"}
        return httpx.get(f"{base}log", headers=headers, trust_env=False)

    assert get(None).status_code == 302
    assert get(hub.user_token("bo")).status_code == 403
    assert get(hub.user_token("ada")).text == "secret\n"
    hub.stop_server("ada", NAME, remove=True)


def test_the_link_of_a_running_job_leads_its_owner_to_the_log(hub: Hub) -> None:
    run_job(hub, "sh", "-c", "echo step 1; exec sleep 600")
    with hub.browser("ada") as browser:
        page = follow(hub, browser, f"/user/ada/{NAME}/")
    assert (page.status_code, page.url.path) == (200, f"/user/ada/{NAME}/")
    assert "<h1>train</h1>" in page.text
    assert "step 1" in page.text
    hub.stop_server("ada", NAME, remove=True)


def follow(hub: Hub, browser: httpx.Client, path: str) -> httpx.Response:
    """Open a page as a browser does behind the Hub's proxy, of which this Hub has none."""
    runner = f"http://127.0.0.1:{hub.port_of('ada', NAME)}"
    for _ in range(10):
        base = hub.url if path.startswith("/hub/") else runner
        page = browser.get(f"{base}{path}", follow_redirects=False)
        if not page.has_redirect_location:
            return page
        path = httpx.URL(page.headers["Location"]).raw_path.decode()
    raise AssertionError(f"redirected without end, last to {path}")


def test_starting_the_name_of_a_job_by_hand_is_refused_before_any_form(hub: Hub) -> None:
    with hub.browser("ada") as browser:
        page = browser.get(f"/hub/spawn/ada/{NAME}")
    assert page.status_code == 409
    assert "This is the name of a training job" in page.text
    assert 'type="radio"' not in page.text
    assert not hub.broker.asked


@pytest.mark.oracle
def test_a_job_survives_a_kill_of_the_hub_and_is_stopped_by_the_next_one(hub: Hub) -> None:
    code = "trap 'echo saved; exit 0' TERM; echo $$; while :; do sleep 0.1; done"
    pid = int(run_job(hub, "sh", "-c", code))
    hub.kill()
    assert is_alive(pid)
    hub.start()
    assert hub.wait_ready("ada", NAME)
    hub.stop_server("ada", NAME, remove=True)
    assert not is_alive(pid)
    assert "saved" in log(hub)


@pytest.mark.oracle
def test_a_killed_runner_takes_its_command_along_and_the_lease_is_given_back(hub: Hub) -> None:
    pid = int(run_job(hub, "sh", "-c", "echo $$; exec sleep 600"))
    os.kill(hub.state("ada", NAME)["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the command is gone")
    wait_for(lambda: hub.broker.of("spawner/stop"), "the lease is given back")


def test_a_late_stop_of_an_attempt_does_not_reach_the_next_one(hub: Hub) -> None:
    expect_job(hub, "sh", "-c", "exec sleep 600")
    hub.start_server("ada", name=NAME)
    hub.wait_ready("ada", NAME)
    expect_job(hub, "sh", "-c", "echo second; exec sleep 600", attempt=2)
    hub.start_server("ada", name=SECOND)
    hub.wait_ready("ada", SECOND)
    hub.stop_server("ada", NAME, remove=True)
    assert is_alive(hub.state("ada", SECOND)["pid"])
    assert [each.body["server"] for each in hub.broker.of("spawner/stop")] == [NAME]


def test_after_a_job_the_same_name_without_a_job_is_a_notebook_server_again(hub: Hub) -> None:
    expect_job(hub, "true")
    hub.start_server("ada", name="other")
    ended(hub)
    wait_for(lambda: not hub.server("ada", "other"), "the server of the job is gone")
    hub.broker.grant = None
    assert hub.start_server("ada", name="other").status_code == 201
    assert hub.wait_ready("ada", "other")
    hub.stop_server("ada", "other", remove=True)


def test_a_hub_whose_locale_is_not_utf_8_runs_jobs_of_any_text(tmp_path: Path) -> None:
    locale = ["LC_ALL=POSIX", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]
    with running_hub(SIMPLE, tmp_path, interpreter=("env", *locale, sys.executable)) as hub:
        work = tmp_path / "home/ada/müsli"
        work.mkdir(parents=True)
        expect_job(hub, "sh", "-c", 'echo héllo "$name"; pwd', cwd=str(work), env={"name": "wörld"})
        assert hub.start_server("ada", name=NAME).status_code in (201, 202)
        assert ended(hub)["exit_code"] == 0
        assert log(hub) == f"héllo wörld\n{work}\n"

        cell = nbformat.v4.new_code_cell("raise ValueError('naïve')")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), work / "Übung.ipynb")
        asked = LaunchRequest(path="Übung.ipynb")
        command = job_of(asked, work, [], {}, datetime(2026, 11, 29)).command
        expect_job(hub, *command, attempt=2, cwd=str(work))
        assert hub.start_server("ada", name=SECOND).status_code in (201, 202)
        assert "ValueError: naïve" in ended(hub, attempt=2)["reason"]
        assert f"[gpushare] the output notebook is {work}/Übung-20261129-000000.ipynb\n" in log(
            hub, attempt=2
        )
