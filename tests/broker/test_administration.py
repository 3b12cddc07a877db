"""What administrators do with the sessions and jobs of others, and the log of it."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.http.routes import _ID
from jupyter_gpushare.messages import text
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import UnleasedProcess


def log_of(http) -> list[str]:
    return [entry.sentence for entry in http.broker.registry.decisions.latest if entry.action == "admin"]


async def submitted(http, user: str = "bo", **more) -> str:
    job = await http.ask("POST", "jobs", user, json={"command": ["x"], "gpus": "1", "project": "nlp"} | more)
    assert job.status_code == 201, job.text
    return job.json()["id"]


async def test_an_administrator_changes_the_priority_of_a_job_beyond_its_right(http):
    id = await submitted(http)
    lease = f"j{id}"
    raised = await http.ask("PUT", f"jobs/{id}", "root", json={"priority": 7})
    assert raised.status_code == 200, raised.text
    registry = http.broker.registry
    assert registry.leases[lease].lease.priority == 7
    assert log_of(http) == ["bo's job x (1 GPU) got priority 7 from root, was 0."]
    await http.ask("PUT", f"jobs/{id}", "root", json={"priority": 7})
    assert len(log_of(http)) == 1
    # Its owner may change other things, and not raise another job so.
    assert (await http.ask("PUT", f"jobs/{id}", "bo", json={"max_run_s": 60})).status_code == 200
    assert registry.leases[lease].lease.priority == 7
    assert (await http.ask("PUT", f"jobs/{id}", "bo", json={"priority": 8})).status_code == 400
    await http.ask("DELETE", f"jobs/{id}", "bo")
    again = await http.ask("POST", f"jobs/{id}/retry", "bo")
    assert registry.leases[f"j{again.json()['id']}"].lease.priority == 0
    late = await http.ask("PUT", f"jobs/{id}", "root", json={"priority": 1})
    assert late.status_code == 409


@pytest.mark.parametrize("change", [{"priority": 101}, {"gpus": "2"}, {"priority": 1, "gpus": "2"}, {}])
async def test_an_administrator_changes_nothing_else_of_a_job(http, change):
    id = await submitted(http)
    assert (await http.ask("PUT", f"jobs/{id}", "root", json=change)).status_code == 400
    assert (await http.ask("PUT", f"jobs/{id}", "ada", json={"priority": -1})).status_code == 404
    assert log_of(http) == []


async def test_a_stopped_job_names_the_administrator_and_its_owner_is_not_named(http):
    first, second, third = [await submitted(http) for _ in range(3)]
    assert (await http.ask("DELETE", f"jobs/{first}", "bo")).status_code == 200
    assert (await http.ask("DELETE", f"jobs/{second}", "root")).status_code == 200
    assert (await http.ask("POST", f"leases/j{third}/stop", "root")).status_code == 204
    assert {http.broker.registry.jobs[id].result for id in (first, second, third)} == {"cancelled"}
    assert log_of(http) == ["root asked to stop bo's job x (1 GPU)."] * 2
    mine = await http.ask("GET", "decisions", "bo")
    told = [d["sentence"] for d in mine.json()["decisions"] if d["action"] == "admin"]
    assert told == ["root asked to stop your job x (1 GPU)."] * 2


async def test_an_administrator_lends_and_stops_a_session(http):
    lease = (await http.session()).id
    await http.broker.loop.observer.measure()
    for action in ("lend", "stop"):
        answer = await http.ask("POST", f"leases/{lease}/{action}", "root")
        assert answer.status_code == 200, answer.text
        assert (await http.ask("POST", f"leases/{lease}/{action}", "bo")).status_code == 404
    assert "stop_server" in http.site.effects
    session = "ada's session (1/2 GPU)"
    assert log_of(http) == [f"root asked to lend the GPU of {session}.", f"root asked to stop {session}."]


async def test_an_act_is_in_the_log_before_it_is_done(http):
    lease, before = (await http.session()).id, []
    http.service.access.stop_server = lambda _key: before.append(log_of(http)) or asyncio.sleep(0)
    assert (await http.ask("POST", f"leases/{lease}/stop", "root")).status_code == 200
    job, cancel = await submitted(http), http.service.control.requests.cancel
    http.service.control.requests.cancel = lambda job: before.append(log_of(http)) or cancel(job)
    assert (await http.ask("DELETE", f"jobs/{job}", "root")).status_code == 200
    session, work = "root asked to stop ada's session (1/2 GPU).", "root asked to stop bo's job x (1 GPU)."
    assert before == [[session], [session, work]]


async def test_an_administrator_is_not_sent_with_a_token_to_the_server_of_another_user(http):
    lease = (await http.session()).id
    http.site.servers[ServerKey("ada", "")] = "ready"
    path = f"leases/{lease}/kernels/k-1/release"
    assert (await http.ask("POST", path, "bo")).status_code == 404
    assert (await http.ask("POST", path, "ada")).status_code == 307
    refused = await http.ask("POST", path, "root")
    assert (refused.status_code, "Location" in refused.headers) == (403, False)
    assert log_of(http) == []


def test_each_action_has_its_line():
    for action in _ID["action"].split("|"):
        assert text(f"notice.admin_{action}", wire.Text(key="duration.seconds", args=["1"]), "root")


def unleased(http, **more: object) -> UnleasedProcess:
    """A process without a lease on the first GPU, in the next sample."""
    values = {
        "process": "4711-99",
        "pid": 4711,
        "uid": 1003,
        "name": "python",
        "used_bytes": 2**30,
        "kept": "",
    }
    process = UnleasedProcess(**values | more)
    http.site.unleased["GPU-0"] = [process]
    return process


async def test_an_administrator_ends_a_process_without_a_lease(http):
    unleased(http, name="py\x1bthon")
    await http.broker.loop.observer.measure()
    shown = (await http.ask("GET", "devices", "root")).json()["devices"][0]["unleased"]
    assert [(p["process"], p["uid"], p["name"], p["ending"]) for p in shown] == [
        ("4711-99", 1003, "py?thon", False)
    ]
    assert (await http.ask("GET", "devices", "bo")).json()["devices"][0]["unleased"] == []
    path = "devices/GPU-0/processes/4711-99"
    assert (await http.ask("DELETE", path, "bo")).status_code == 403
    assert (await http.ask("DELETE", path, "root")).status_code == 200
    assert "end_process GPU-0 4711-99" in http.site.effects
    assert log_of(http) == [
        "root asked to end process 4711 (py?thon) of uid 1003 on GPU GPU-0: it has no lease."
    ]


async def test_a_process_that_is_left_alone_or_gone_is_not_ended(http):
    unleased(http, kept="it belongs to a system user")
    await http.broker.loop.observer.measure()
    path = "devices/GPU-0/processes/4711-99"
    kept = await http.ask("DELETE", path, "root")
    assert kept.status_code == 409
    assert "is left alone: it belongs to a system user" in kept.text
    for other in ("devices/GPU-0/processes/4711-98", "devices/GPU-9/processes/4711-99"):
        assert (await http.ask("DELETE", other, "root")).status_code == 404
    assert log_of(http) == []
    unleased(http)
    await http.broker.loop.observer.measure()
    http.site.unleased.clear()  # it ends between sample and request
    late = await http.ask("DELETE", path, "root")
    assert late.status_code == 409
    assert "was not ended: no such process" in late.text
