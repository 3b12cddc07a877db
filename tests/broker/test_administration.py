"""What administrators do with the sessions and jobs of others, and the log of it."""

from __future__ import annotations

import pytest

from jupyter_gpushare.broker.http.routes import _ID
from jupyter_gpushare.broker.state.transitions import Started
from jupyter_gpushare.messages import text
from jupyter_gpushare.protocol import wire
from tests.broker.site import spawn


def log_of(http) -> list[str]:
    return [entry.sentence for entry in http.broker.registry.decisions.latest if entry.action == "admin"]


async def granted(http, user: str = "ada") -> str:
    await http.broker.admission.start(spawn(user, "1/2"))
    record = http.broker.registry.by_server(user, "")
    await http.broker.registry.advance(record, Started())
    return record.id


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
    assert log_of(http) == ["bo's job x (1 GPU) was stopped by root."] * 2
    mine = await http.ask("GET", "decisions", "bo")
    assert [d["sentence"] for d in mine.json()["decisions"] if d["action"] == "admin"] == log_of(http)


async def test_an_administrator_lends_and_stops_a_session(http):
    lease = await granted(http)
    await http.broker.loop.observer.measure()
    for action in ("lend", "stop"):
        answer = await http.ask("POST", f"leases/{lease}/{action}", "root")
        assert answer.status_code == 200, answer.text
        assert (await http.ask("POST", f"leases/{lease}/{action}", "bo")).status_code == 404
    assert "stop_server" in http.site.effects
    session = "ada's session (1/2 GPU)"
    assert log_of(http) == [f"{session} was lent by root.", f"{session} was stopped by root."]


def test_each_action_has_its_line():
    for action in _ID["action"].split("|"):
        assert text(f"notice.admin_{action}", wire.Text(key="duration.seconds", args=["1"]), "root")
