"""Which identity may request what, over HTTP."""

from __future__ import annotations

from typing import Any

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.broker.http.listener import Rate
from jupyter_gpushare.protocol import wire
from tests.broker.http_site import PREFIX, SPAWNER, Http, person


async def test_a_hub_that_does_not_answer_is_503_not_401(http):
    answer = await http.refused("GET", "status", "hub-is-down")
    assert (answer.status, answer.reason) == (503, "unavailable")


async def test_groups_that_cannot_be_read_are_503(http, monkeypatch):
    async def user(_name):
        raise HubError("the Hub does not answer")

    monkeypatch.setattr(http.broker.hub, "user", user)
    assert (await http.refused("GET", "offers")).status == 503


async def test_bearer_tokens_work_too(http):
    response = await http.ask("GET", "status", None, headers={"Authorization": "Bearer bo"})
    assert response.status_code == 200


async def test_jobs_and_leases_of_others_are_404_not_403(http):
    job = await http.submit("bo")
    lease = f"j{job.id}"
    for method, path in [
        ("GET", f"jobs/{job.id}"),
        ("DELETE", f"jobs/{job.id}"),
        ("POST", f"jobs/{job.id}/retry"),
        ("POST", f"leases/{lease}/resume"),
        ("POST", f"leases/{lease}/keep"),
        ("POST", f"leases/{lease}/lend"),
        ("POST", f"leases/{lease}/kernels/k-1/release"),
    ]:
        there = await http.refused(method, path, "ada")
        nowhere = await http.refused(method, path.replace(job.id, "aaaaaaaaaa"), "ada")
        assert (there.status, there.reason) == (404, "not_found")
        assert there.message.replace(job.id, "X") == nowhere.message.replace("aaaaaaaaaa", "X")
    assert http.broker.registry.jobs[job.id].result == ""
    assert (await http.ask("GET", f"jobs/{job.id}", "root")).status_code == 200


async def test_a_kernel_is_released_by_its_own_server(http):
    job = await http.submit("bo")
    path = f"leases/j{job.id}/kernels/k-1/release"
    assert (await http.refused("POST", path, "bo")).status == 409  # it does not run yet
    server = http.broker.registry.get(f"j{job.id}").server
    http.site.servers[ServerKey("bo", server)] = "ready"
    response = await http.ask("POST", path, "bo")
    assert response.status_code == 307
    # The Hub says where: each user may have a host of their own.
    assert response.headers["Location"] == f"https://bo.hub.test/user/bo/{server}/gpushare/{path}"


async def test_lists_show_what_is_mine_and_all_only_to_an_admin(http):
    mine, other = await http.submit("bo"), await http.submit("ada")

    async def ids(path: str, identity: str) -> set[str]:
        response = (await http.ask("GET", path, identity)).json()
        return {x["id"] for x in response.get("jobs", response.get("leases", ()))}

    assert await ids("jobs", "bo") == {mine.id}
    assert await ids("jobs?all=1", "bo") == {mine.id}
    assert await ids("jobs?all=1", "root") == {mine.id, other.id}
    assert await ids("leases?all=1", "ada") == {f"j{other.id}"}
    assert await ids("leases?all=1", "root") == {f"j{mine.id}", f"j{other.id}"}
    status = (await http.ask("GET", "status", "bo")).json()
    assert [j["id"] for j in status["jobs"]] == [mine.id]
    assert [p["name"] for p in status["projects"]] == ["nlp"]


async def test_the_spawner_sees_offers_and_starts_and_stops_a_server(http):
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": {"fraction": "1/2"}}
    for token in (SPAWNER + "x", ""):
        assert (await http.refused("POST", "spawner/start", token, json=start)).status == 403
    assert not http.broker.registry.leases
    offers = await http.ask("GET", "spawner/offers?user=bo&group=nlp&group=x,y", SPAWNER)
    assert [o["label"] for o in offers.json()["offers"]] == ["1/4 GPU", "1/2 GPU", "1 GPU"]
    grant = (await http.ask("POST", "spawner/start", SPAWNER, json=start)).json()
    assert grant["lease"] in http.site.held
    stop = {"user": "bo", "server": ""}
    for _ in range(2):
        assert (await http.ask("POST", "spawner/stop", SPAWNER, json=stop)).status_code == 204


async def test_the_spawners_token_is_refused_on_plain_tcp_with_what_to_set(http):
    headers = {"Authorization": f"token {SPAWNER}"}
    for method, path in (("GET", "offers"), ("POST", "start"), ("POST", "stop")):
        refused = await http.client.request(method, f"spawner/{path}", headers=headers)
        assert refused.status_code == 403
        assert refused.json()["reason"] == "unverified_channel"
        assert "c.GPUShareMixin.broker_url" in refused.json()["message"]


async def test_an_empty_spawner_token_admits_no_caller(http):
    http.service.access.spawner_tokens = ()
    for header in ("token", "token x", "x"):
        assert (
            await http.refused("POST", "spawner/stop", None, headers={"Authorization": header})
        ).status == 403


async def test_only_the_server_of_an_attempt_may_report_about_it(http):
    job = await http.submit("bo", gpus="2")
    await http.broker.loop.decide()
    name = f"j{job.id}-1"
    http.tokens["its-server"] = person("bo", f"access:servers!server=bo/{name}")
    http.tokens["older"] = person("bo", f"access:servers!server=bo/j{job.id}-0")
    http.tokens["other"] = person("bo", "access:servers!server=bo/jaaaaaaaaaa-1")
    http.tokens["stolen"] = person("ada", f"access:servers!server=bo/{name}")
    path, ended = f"jobs/{job.id}/attempts/1/report", {"state": "ended", "exit_code": 0}
    for identity in ("bo", "ada", "root", "ada-server", "older", "other", "stolen"):
        assert (await http.refused("POST", path, identity, json=ended)).status == 403
    assert http.broker.job(_record(http, job)).exit_code is None
    assert (await http.ask("POST", path, "its-server", json=ended)).status_code == 200
    assert http.broker.job(_record(http, job)).exit_code == 0


def _record(http: Http, job: wire.Job) -> Any:
    return http.broker.registry.jobs[job.id]


async def test_a_server_that_reports_all_the_time_is_told_when_to_come_again(http):
    http.service.limits.reports = Rate(per_s=0.5, burst=3, clock=lambda: 0.0)
    report = {"kernels": [{"id": "k", "busy": True, "idle_s": 0.0}]}
    for _ in range(3):
        assert (await http.ask("POST", "servers/activity", "ada-server", json=report)).status_code == 204
    refused = await http.ask("POST", "servers/activity", "ada-server", json=report)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    assert "at most 0.5 of these a second" in refused.json()["message"]


async def test_activity_comes_from_the_server_it_is_about(http):
    report = {"kernels": [{"id": "k", "busy": True, "idle_s": 0.0}]}
    for identity in ("ada", "ada-two", "bo-as-ada"):
        assert (await http.refused("POST", "servers/activity", identity, json=report)).status == 403
    assert (await http.ask("POST", "servers/activity", "ada-server", json=report)).status_code == 204


async def test_only_an_admin_changes_projects(http):
    assert (await http.refused("PUT", "projects/nlp", "bo", json={"quota": 2})).status == 403
    changed = (await http.ask("PUT", "projects/nlp", "root", json={"quota": 0.5})).json()
    assert {p["name"]: (p["quota_milli"], p["overridden"]) for p in changed["projects"]} == {
        "nlp": (500, True),
        "vision": (1000, False),
    }
    assert (await http.refused("PUT", "projects/nosuch", "root", json={})).status == 404


async def test_an_admin_takes_changes_of_a_project_back_and_the_log_names_the_admin(http):
    assert (await http.refused("DELETE", "projects/nlp", "bo")).status == 403
    assert (await http.refused("DELETE", "projects/nosuch", "root")).status == 404
    before = {p["name"]: p for p in (await http.ask("GET", "projects", "root")).json()["projects"]}
    await http.ask("PUT", "projects/nlp", "root", json={"quota": 0.5, "weight": 4, "limit": 2})
    for _ in range(2):  # a repeated call changes nothing
        after = (await http.ask("DELETE", "projects/nlp", "root")).json()["projects"]
        assert {p["name"]: p for p in after} == before
    log = [d for d in http.broker.registry.decisions.latest if d.action == "project"]
    numbers = [messages.text("project.numbers_limit", 0.5, 4, 2), messages.text("project.numbers", 1, 1)]
    assert log[0].texts[0].args[2:] == numbers
    assert [d.sentence for d in log] == [
        "root set project nlp to quota 0.5, weight 4, limit 2, was quota 1, weight 1.",
        "root set project nlp to quota 1, weight 1, as configured, was quota 0.5, weight 4, limit 2.",
    ]


async def test_a_guarantee_beyond_the_machine_is_refused_unless_forced(http):
    refused = await http.refused("PUT", "projects/nlp", "root", json={"quota": 99})
    assert (refused.status, refused.reason) == (409, "beyond_machine")
    assert "this machine has 2 GPUs, fewer than the " in refused.message
    forced = (await http.ask("PUT", "projects/nlp", "root", json={"quota": 99, "force": True})).json()
    assert next(p for p in forced["projects"] if p["name"] == "nlp")["quota_milli"] == 99_000
    # A change of another number does not have to be forced again, nor a lower guarantee.
    await http.ask("PUT", "projects/nlp", "root", json={"weight": 2})
    await http.ask("PUT", "projects/nlp", "root", json={"quota": 50, "weight": 3})


async def test_guarantees_of_all_projects_together_are_held_against_the_machine(http):
    refused = await http.refused("PUT", "projects/nlp", "root", json={"quota": 1.5})
    assert (refused.status, refused.reason) == (409, "beyond_machine")
    assert "the 2.5 that the projects would be guaranteed together" in refused.message
    await http.ask("PUT", "projects/vision", "root", json={"quota": 0.5})
    assert (await http.ask("GET", "devices", "bo")).json()["guaranteed_milli"] == 1500
    await http.ask("PUT", "projects/nlp", "root", json={"quota": 1.5})
    assert (await http.ask("GET", "devices", "bo")).json()["guaranteed_milli"] == 2000


async def test_metrics_need_their_scope_and_name_no_user(http):
    await http.submit("bo")
    path = f"{http.url}{PREFIX}metrics"
    assert (await http.refused("GET", path, "bo")).status == 403
    assert (await http.refused("GET", path, "root")).status == 403
    text = (await http.ask("GET", path, "prometheus")).text
    assert 'gpushare_leases{kind="train",project="nlp",state="pending"} 1.0' in text
    assert "bo" not in text.replace("broker", "")
