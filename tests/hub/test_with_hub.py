"""The spawner in a real JupyterHub: what is asked, granted, refused and given back."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from jupyter_gpushare.channel import api_url
from tests.hub.conftest import Hub, wait_for
from tests.hub.fake_broker import GRANT, SPAWNER_TOKEN
from tests.waiting import is_alive

PRELOAD = GRANT["env"]["LD_PRELOAD"]


def test_a_start_by_rest_asks_the_broker_and_puts_its_answer_into_the_environment(hub: Hub) -> None:
    assert hub.start_server("ada", {"fraction": "1/2", "project": "vision"}).status_code == 201
    (asked,) = hub.broker.of("spawner/start")
    assert asked.token == SPAWNER_TOKEN
    assert asked.body == {
        "user": "ada",
        "server": "",
        "groups": ["vision"],
        "uid": os.getuid(),
        "options": {"fraction": "1/2", "memory": None, "gpus": None, "profile": None, "project": "vision"},
        "created": hub.made_at("ada"),
        "own_uid": False,
        "admin": False,
        "not_nodes": [],
        "may_gain": True,
        "sees_all_gpus": True,
        "ticket": "",
        "patience_s": 3.0,
    }
    env = hub.environment("ada")
    assert {key: env[key] for key in GRANT["env"]} == GRANT["env"]
    assert env["GPUSHARE_API_URL"] == api_url(hub.broker.url)


def test_a_server_without_gpu_sees_no_device_and_carries_no_library_of_ours(hub: Hub) -> None:
    assert hub.start_server("ada").status_code == 201
    env = hub.environment("ada")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "LD_PRELOAD" not in env
    assert not [key for key in env if key.startswith("GPUSHARE_LEASE")]


def test_a_start_without_gpu_after_one_with_gpu_keeps_nothing_of_it(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.stop_server("ada")
    hub.start_server("ada", {"gpus": 0})
    env = hub.environment("ada")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "GPUSHARE_LEASE" not in env


def test_options_of_last_time_are_checked_and_asked_again(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.stop_server("ada")
    hub.broker.asked.clear()
    assert hub.api("POST", "users/ada/server").status_code == 201
    assert hub.broker.of("spawner/start")[0].body["options"]["fraction"] == "1/2"


def test_the_token_of_a_server_may_ask_the_broker_and_submit_jobs(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    token = hub.environment("ada")["JUPYTERHUB_API_TOKEN"]
    scopes = hub.api("GET", "user", token=token).json()["scopes"]
    assert {
        "custom:gpushare:jobs",
        "access:services!service=gpushare",
        "access:servers!server=ada/",
    } <= set(scopes)


def test_nonsense_is_refused_with_a_reason_before_the_broker_is_asked(hub: Hub) -> None:
    answer = hub.start_server("ada", {"fraction": "lots"})
    assert answer.status_code == 400
    assert len(answer.json()["message"]) > 20
    assert not hub.broker.of("spawner/start")
    assert hub.server("ada") is None
    assert hub.start_server("ada", {"fraction": "0.5"}).status_code == 201


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (409, "no_capacity", "Nothing is free: 2 of 2 GPUs are in use."),
        (400, "too_large", "Asks for 10 GPUs; this machine has 2."),
        (403, "not_allowed", "You are not in project <secret>."),
    ],
)
def test_what_the_broker_refuses_is_said_in_its_words(
    hub: Hub, status: int, reason: str, message: str
) -> None:
    hub.broker.refuse = (status, reason, message)
    answer = hub.start_server("ada", {"gpus": 10})
    assert answer.status_code == status
    assert answer.json()["message"] == message
    assert hub.server("ada") is None
    # Nothing was given, so nothing is given back: a release could hit a start that comes later.
    assert not hub.broker.of("spawner/stop")


def test_a_refusal_stands_readable_on_the_spawn_page(hub: Hub) -> None:
    hub.broker.refuse = (403, "not_allowed", "You are not in project <secret>.")
    with hub.browser("ada") as browser:
        page = hub.submit_form(
            browser, "ada", {"gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "1/2"}'}
        )
    assert page.status_code == 403
    assert "You are not in project &lt;secret&gt;." in page.text
    assert "SpawnException" not in page.text


def test_no_refusal_counts_towards_the_end_of_the_hub(hub: Hub) -> None:
    hub.broker.refuse = (409, "no_capacity", "Nothing is free.")
    for _ in range(3):  # the limit is 2
        assert hub.start_server("ada", {"gpus": 1}).status_code == 409
    for _ in range(3):
        assert hub.start_server("ada", {"fraction": "lots"}).status_code == 400
    hub.broker.down()
    for _ in range(3):
        assert hub.start_server("ada", {"gpus": 1}).status_code == 503
    hub.broker.up()
    hub.broker.refuse = None
    assert "consecutive spawn" not in hub.log()
    assert hub.start_server("ada", {"gpus": 1}).status_code == 201


def test_with_the_broker_down_a_server_without_gpu_starts_and_one_with_gpu_is_refused(hub: Hub) -> None:
    hub.broker.down()
    refused = hub.start_server("ada", {"fraction": "1/2"})
    assert refused.status_code == 503
    assert "does not answer" in refused.json()["message"]
    assert hub.start_server("ada").status_code == 201
    assert hub.environment("ada")["CUDA_VISIBLE_DEVICES"] == ""
    hub.stop_server("ada")


def test_a_start_survives_a_broker_that_is_back_within_a_second(hub: Hub) -> None:
    hub.broker.down()
    back = threading.Timer(1.0, hub.broker.up)
    back.start()
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    back.join()


def test_a_broker_that_hangs_is_not_waited_for(hub: Hub) -> None:
    hub.broker.hang_s = 20
    assert hub.start_server("ada").status_code == 201
    assert hub.start_server("cy", {"fraction": "1/2"}).status_code == 503
    with hub.browser("bo") as browser:
        assert "does not answer just now" in browser.get("/hub/spawn/bo").text


def test_the_lease_is_given_back_when_the_server_is_stopped(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.stop_server("ada")
    wait_for(lambda: hub.broker.of("spawner/stop"), "the lease is given back")
    stop = {"user": "ada", "server": "", "created": hub.made_at("ada")}
    assert hub.broker.of("spawner/stop")[0].body == {**stop, "by_hub": True}


def test_the_lease_is_given_back_when_the_server_dies(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    os.kill(hub.state("ada")["pid"], signal.SIGKILL)
    wait_for(lambda: hub.broker.of("spawner/stop"), "the Hub has noticed, the lease is given back")
    assert hub.broker.of("spawner/stop")[0].body["by_hub"] is False


def test_the_lease_is_given_back_when_the_start_fails(hub: Hub) -> None:
    # More than execve(2) takes as one variable: the program cannot be started.
    hub.broker.grant_job(name="x" * 200_000)
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 500
    wait_for(lambda: hub.broker.of("spawner/stop"), "the lease is given back")
    hub.broker.grant = None
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201


def test_a_server_stops_while_the_broker_is_down(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    pid = hub.state("ada")["pid"]
    hub.broker.down()
    hub.stop_server("ada")
    assert not is_alive(pid)


def test_a_forged_job_is_refused_whatever_the_options_say(hub: Hub) -> None:
    hub.broker.refuse = (409, "not_expected", "No job is to start under this name.")
    token = hub.user_token("ada")
    forged = {"job": {"command": ["touch", "/tmp/x"]}, "fraction": "1/2"}
    assert hub.start_server("ada", forged, "j0123456789-1", token).status_code == 400  # unknown key
    answer = hub.start_server("ada", {"fraction": "1/2"}, "j0123456789-1", token)
    assert (answer.status_code, answer.json()["message"]) == (409, "No job is to start under this name.")
    hub.broker.refuse = None
    hub.broker.down()
    # It is unknown whether it is expected.
    assert hub.start_server("ada", None, "j0123456789-1", token).status_code == 503


def test_a_server_with_forged_job_options_is_a_server(hub: Hub) -> None:
    hub.ensure_user("ada")
    body = {"user_options": {"job": {"command": ["false"]}, "GPUSHARE_JOB": "{}"}}
    assert hub.api("POST", "users/ada/server", body).status_code == 201
    assert "GPUSHARE_JOB" not in hub.environment("ada")


def test_the_progress_page_tells_what_was_granted(hub: Hub) -> None:
    hub.ensure_user("ada")
    # The Hub tells no more once the server is up, which a stub may be within the same moment.
    for _ in range(5):
        hub.broker.reset()
        hub.broker.hang_s = 1.0
        starting = threading.Thread(target=hub.start_server, args=("ada", {"fraction": "1/2"}))
        starting.start()
        wait_for(lambda: hub.broker.of("spawner/start"), "the start is under way")
        events = hub.api("GET", "users/ada/server/progress").text
        starting.join()
        assert "Asking for your GPU." in events
        if "Your half GPU (40 GiB of an H100) is ready." in events:
            return
        hub.stop_server("ada")
    raise AssertionError(events)


# ---- the page ----------------------------------------------------------------


def test_the_spawn_page_shows_the_offers_and_starts_what_was_chosen(hub: Hub) -> None:
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada").text
        assert "1/2 GPU" in page
        assert "Only 1 GPU is free." in page
        assert "No GPU" in page
        asked = hub.broker.of("spawner/offers")[0]
        assert asked.query == {"user": ["ada"], "group": ["vision"]}
        answer = hub.submit_form(
            browser, "ada", {"gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "1/2"}'}
        )
        assert answer.status_code == 302
    hub.wait_ready("ada")
    options = hub.broker.of("spawner/start")[0].body["options"]
    assert (options["fraction"], options["project"]) == ("1/2", "vision")


def test_the_spawn_page_of_a_member_of_two_projects_has_offers_of_both(hub: Hub) -> None:
    hub.broker.projects = ["nlp", "vision"]
    with hub.browser("cy") as browser:
        page = browser.get("/hub/spawn/cy").text
    assert 'name="gpushare_size:nlp"' in page
    assert 'name="gpushare_size:vision"' in page
    assert hub.broker.of("spawner/offers")[0].query["group"] == ["nlp", "vision"]


def test_the_last_choice_is_preselected(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "0.5", "project": "vision"})
    hub.stop_server("ada")
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada").text
    checked = [line for line in page.splitlines() if 'type="radio"' in line and " checked" in line]
    assert len(checked) == 1
    assert "1/2" in checked[0]


def test_the_spawn_page_without_broker_offers_a_server_without_gpu(hub: Hub) -> None:
    hub.broker.down()
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada").text
        assert "does not answer just now" in page
        answer = hub.submit_form(browser, "ada", {"gpushare_project": "", "gpushare_size:": '{"gpus": 0}'})
        assert answer.status_code == 302
    hub.wait_ready("ada")


# ---- restarts of the Hub -----------------------------------------------------


def test_a_restarted_hub_finds_its_servers_again_and_can_stop_them(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    pid = hub.state("ada")["pid"]
    hub.kill()
    assert is_alive(pid)
    hub.start()
    assert hub.wait_ready("ada")
    assert not hub.broker.of("spawner/stop")
    hub.stop_server("ada")
    assert not is_alive(pid)
    wait_for(lambda: hub.broker.of("spawner/stop"), "the lease is given back")


def test_a_restarted_hub_with_the_broker_down_finds_its_servers_again(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.kill()
    hub.broker.down()
    hub.start()
    assert hub.wait_ready("ada")


def test_a_restarted_hub_neither_adopts_nor_signals_a_stranger_with_the_same_pid(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    state = hub.state("ada")
    hub.kill()
    os.kill(state["pid"], signal.SIGKILL)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        key = next(key for key in state if key != "pid" and "process" in key)
        hub.set_state("ada", {**state, "pid": stranger.pid, key: [stranger.pid, *state[key][1:]]})
        hub.start()
        wait_for(
            lambda: hub.broker.of("spawner/stop"), "the Hub has noticed the end, the lease is given back"
        )
        assert hub.server("ada") is None
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
