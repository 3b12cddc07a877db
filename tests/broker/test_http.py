"""The REST interface over real HTTP, with a Hub that knows a few tokens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from jupyterhub.services.auth import HubOAuth
from tornado import httpserver, web
from tornado.testing import bind_unused_port

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.broker import metrics, openapi
from jupyter_gpushare.broker.access import ADMIN_SCOPE, JOBS_SCOPE, Access
from jupyter_gpushare.broker.handlers import ROUTES, Metrics, NoSuchPath, Service, pattern
from jupyter_gpushare.broker.pages import AdminPage
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotFound
from tests.broker.fake_backend import GROUPS, Site

PREFIX = "/services/gpushare/"
ACCESS = "access:services!service=gpushare"
SPAWNER = "the-spawners-own-token"


def _person(name: str, *scopes: str) -> dict[str, Any]:
    return {"kind": "user", "name": name, "groups": [], "admin": False, "scopes": [ACCESS, *scopes]}


TOKENS: dict[str, dict[str, Any]] = {
    "ada": _person("ada", JOBS_SCOPE),
    "bo": _person("bo", JOBS_SCOPE),
    "bo-reads": _person("bo"),
    "root": _person("root", JOBS_SCOPE, ADMIN_SCOPE),
    "ada-server": _person("ada", JOBS_SCOPE, "access:servers!server=ada/"),
    "ada-two": _person("ada", "access:servers!server=ada/", "access:servers!server=ada/x"),
    "bo-as-ada": _person("bo", "access:servers!server=ada/"),
    "prometheus": {"kind": "service", "name": "prometheus", "scopes": [ACCESS, "read:metrics"]},
    "no-access": {"kind": "user", "name": "eve", "groups": [], "scopes": []},
}


class _HubUser(web.RequestHandler):
    """What the Hub answers to whom it gave a token."""

    def get(self) -> None:
        known = self.application.settings["tokens"]
        token = self.request.headers.get("Authorization", "").partition(" ")[2]
        if token == "hub-is-down":
            raise web.HTTPError(503)
        if token not in known:
            raise web.HTTPError(403)
        self.write(known[token])


class Http:
    """A broker that listens, on a site in memory, in real time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.tokens = dict(TOKENS)
        self.servers: list[httpserver.HTTPServer] = []

    async def open(self) -> None:
        self.broker = await self.site.start_broker(running=False)
        await self.broker.loop.measure()
        hub_url = self._listen(
            web.Application([("/hub/api/user", _HubUser)], tokens=self.tokens, log_function=_silent)
        )
        auth = HubOAuth(
            api_url=f"{hub_url}/hub/api",
            api_token="broker",
            oauth_client_id="service-gpushare",
            base_url=PREFIX,
            hub_prefix="/hub/",
            hub_host="",
            access_scopes={ACCESS},
            cache_max_age=1,
        )
        self.service = Service(
            book=self.broker.book,
            desk=self.broker.desk,
            views=self.broker.views,
            access=Access(auth, SPAWNER, self.broker.backend),
            registry=metrics.registry(self.broker.book),
            prefix=PREFIX,
            openapi=lambda: openapi.describe(PREFIX),
            waiting={},
        )
        options = {"service": self.service}
        self.url = self._listen(
            web.Application(
                [
                    *((f"{PREFIX}api/v1/{pattern(r)}", r.handler, options) for r in ROUTES),
                    (PREFIX + "metrics", Metrics, options),
                    (PREFIX + "?", AdminPage, options),
                    (".*", NoSuchPath, options),
                ],
                cookie_secret=b"secret",
                log_function=_silent,
            ),
            max_body_size=wire.MAX_BODY_BYTES,
        )
        self.api = f"{self.url}{PREFIX}api/v1"
        self.client = httpx.AsyncClient(base_url=self.api + "/", trust_env=False, timeout=10)

    def _listen(self, application: web.Application, **options: Any) -> str:
        socket, port = bind_unused_port()
        server = httpserver.HTTPServer(application, **options)
        server.add_socket(socket)
        self.servers.append(server)
        return f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        await self.client.aclose()
        for server in self.servers:
            server.stop()
            await server.close_all_connections()
        await self.site.close()

    async def ask(self, method: str, path: str, who: str | None = "bo", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"token {who}"} if who else {}
        headers |= options.pop("headers", {})
        return await self.client.request(method, path, headers=headers, **options)

    async def refused(
        self, method: str, path: str, who: str | None = "bo", **options: Any
    ) -> wire.ErrorAnswer:
        """Return the error of a request that must be refused; it always has the same shape."""
        response = await self.ask(method, path, who, **options)
        assert response.status_code >= 400, response.text
        answer = msgspec.json.decode(response.content, type=wire.ErrorAnswer)
        assert answer.status == response.status_code
        assert answer.message
        assert answer.reason
        assert response.headers["Content-Type"] == "application/json"
        return answer

    async def submit(self, who: str = "bo", **more: Any) -> wire.Job:
        response = await self.ask("POST", "jobs", who, json={"command": ["true"], **more})
        assert response.status_code == 201, response.text
        return msgspec.json.decode(response.content, type=wire.Job)


def _silent(_handler: Any) -> None:
    return None


@pytest.fixture
async def http(tmp_path) -> AsyncIterator[Http]:
    site = Site(tmp_path)
    http = Http(site)
    await http.open()
    yield http
    await http.close()


# ---- who asks --------------------------------------------------------------------


async def test_without_a_token_everything_but_health_is_401(http):
    for route in ROUTES:
        if route.path.startswith(("health", "openapi", "spawner/")):
            continue
        for method in route.answers:
            path = _example(route.path)
            answer = await http.refused(method.upper(), path, None, json={})
            assert (route.path, answer.status, answer.reason) == (route.path, 401, "login")
    assert (await http.ask("GET", "health", None)).status_code == 200


def _example(path: str) -> str:
    examples = {"id": "abc", "n": "1", "name": "nlp", "action": "lend", "kernel": "k-1"}
    for name, value in examples.items():
        path = path.replace("{" + name + "}", value)
    return path


async def test_an_unknown_token_is_401_and_one_without_access_403(http):
    assert (await http.refused("GET", "status", "unknown")).status == 401
    answer = await http.refused("GET", "status", "no-access")
    assert (answer.status, answer.reason) == (403, "not_allowed")


async def test_a_hub_that_does_not_answer_is_503_not_401(http):
    answer = await http.refused("GET", "status", "hub-is-down")
    assert (answer.status, answer.reason) == (503, "unavailable")


async def test_groups_that_cannot_be_read_are_503(http, monkeypatch):
    async def groups(_user):
        raise HubError("the Hub does not answer")

    monkeypatch.setattr(http.broker.backend, "groups", groups)
    assert (await http.refused("GET", "offers")).status == 503


async def test_bearer_tokens_work_too(http):
    response = await http.ask("GET", "status", None, headers={"Authorization": "Bearer bo"})
    assert response.status_code == 200


async def test_jobs_need_their_scope(http):
    for method, path in [("POST", "jobs"), ("DELETE", "jobs/abc"), ("POST", "jobs/abc/retry")]:
        answer = await http.refused(
            method, path, "bo-reads", json={"command": ["true"]} if path == "jobs" else None
        )
        assert answer.status == 403
        assert JOBS_SCOPE in answer.message


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
    assert http.broker.book.jobs[job.id].result == ""
    assert (await http.ask("GET", f"jobs/{job.id}", "root")).status_code == 200


async def test_a_kernel_is_released_by_its_own_server(http):
    job = await http.submit("bo")
    path = f"leases/j{job.id}/kernels/k-1/release"
    assert (await http.refused("POST", path, "bo")).status == 409  # it does not run yet
    server = http.broker.book.get(f"j{job.id}").server
    http.site.servers[ServerKey("bo", server)] = "ready"
    response = await http.ask("POST", path, "bo")
    assert response.status_code == 307
    # The Hub says where: each user may have a host of their own.
    assert response.headers["Location"] == f"https://bo.hub.test/user/bo/{server}/gpushare/{path}"


async def test_lists_show_what_is_mine_and_all_only_to_an_admin(http):
    mine, other = await http.submit("bo"), await http.submit("ada")

    async def ids(path: str, who: str) -> set[str]:
        response = (await http.ask("GET", path, who)).json()
        return {x["id"] for x in response.get("jobs", response.get("leases", ()))}

    assert await ids("jobs", "bo") == {mine.id}
    assert await ids("jobs?all=1", "bo") == {mine.id}
    assert await ids("jobs?all=1", "root") == {mine.id, other.id}
    assert await ids("leases?all=1", "ada") == {f"j{other.id}"}
    assert await ids("leases?all=1", "root") == {f"j{mine.id}", f"j{other.id}"}
    status = (await http.ask("GET", "status", "bo")).json()
    assert [j["id"] for j in status["jobs"]] == [mine.id]
    assert [p["name"] for p in status["projects"]] == ["nlp"]
    for path in ("decisions", "projects", "devices"):
        assert (await http.ask("GET", path, "bo")).status_code == 200


async def test_the_spawners_paths_take_its_token_only(http):
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": {"fraction": "1/2"}}
    for who in ("bo", "root", None, "", SPAWNER + "x"):
        for method, path in [
            ("GET", "spawner/offers?user=bo"),
            ("POST", "spawner/start"),
            ("POST", "spawner/stop"),
        ]:
            assert (await http.refused(method, path, who, json=start)).status == 403
    assert not http.broker.book.leases
    offers = await http.ask("GET", "spawner/offers?user=bo&group=nlp&group=x,y", SPAWNER)
    assert [o["label"] for o in offers.json()["offers"]] == ["1/4 GPU", "1/2 GPU", "1 GPU"]
    grant = (await http.ask("POST", "spawner/start", SPAWNER, json=start)).json()
    assert grant["lease"] in http.site.held
    stop = {"user": "bo", "server": ""}
    for _ in range(2):
        assert (await http.ask("POST", "spawner/stop", SPAWNER, json=stop)).status_code == 204


async def test_an_empty_spawner_token_lets_nobody_in(http):
    http.service.access._spawner_token = ""
    for header in ("token", "token x", "x"):
        assert (
            await http.refused("POST", "spawner/stop", None, headers={"Authorization": header})
        ).status == 403


async def test_a_start_beyond_what_is_there_is_409_no_room(http):
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": {"gpus": 2}}
    assert (await http.ask("POST", "spawner/start", SPAWNER, json=start)).status_code == 200
    answer = await http.refused("POST", "spawner/start", SPAWNER, json=start | {"server": "more"})
    assert (answer.status, answer.reason) == (409, "no_room")
    forged = start | {"server": "jabcdefghij-1"}
    answer = await http.refused("POST", "spawner/start", SPAWNER, json=forged)
    assert (answer.status, answer.reason) == (409, "not_expected")


async def test_only_the_server_of_an_attempt_may_report_about_it(http):
    job = await http.submit("bo", gpus="2")
    await http.broker.loop.decide()
    name = f"j{job.id}-1"
    http.tokens["its-server"] = _person("bo", f"access:servers!server=bo/{name}")
    http.tokens["older"] = _person("bo", f"access:servers!server=bo/j{job.id}-0")
    http.tokens["other"] = _person("bo", "access:servers!server=bo/jaaaaaaaaaa-1")
    http.tokens["stolen"] = _person("ada", f"access:servers!server=bo/{name}")
    path, ended = f"jobs/{job.id}/attempts/1/report", {"state": "ended", "exit_code": 0}
    for who in ("bo", "ada", "root", "ada-server", "older", "other", "stolen"):
        assert (await http.refused("POST", path, who, json=ended)).status == 403
    assert http.broker.job(_record(http, job)).exit_code is None
    assert (await http.ask("POST", path, "its-server", json=ended)).status_code == 204
    assert http.broker.job(_record(http, job)).exit_code == 0


def _record(http: Http, job: wire.Job) -> Any:
    return http.broker.book.jobs[job.id]


async def test_activity_comes_from_the_server_it_is_about(http):
    report = {"kernels": [{"id": "k", "busy": True, "idle_s": 0.0}]}
    for who in ("ada", "ada-two", "bo-as-ada"):
        assert (await http.refused("POST", "servers/activity", who, json=report)).status == 403
    assert (await http.ask("POST", "servers/activity", "ada-server", json=report)).status_code == 204


async def test_only_an_admin_changes_projects(http):
    assert (await http.refused("PUT", "projects/nlp", "bo", json={"quota": 2})).status == 403
    changed = (await http.ask("PUT", "projects/nlp", "root", json={"quota": 1.5})).json()
    assert {p["name"]: (p["quota_milli"], p["overridden"]) for p in changed["projects"]} == {
        "nlp": (1500, True),
        "vision": (1000, False),
    }
    assert (await http.refused("PUT", "projects/nosuch", "root", json={})).status == 404


async def test_metrics_need_their_scope_and_name_no_user(http):
    await http.submit("bo")
    path = f"{http.url}{PREFIX}metrics"
    assert (await http.refused("GET", path, "bo")).status == 403
    assert (await http.refused("GET", path, "root")).status == 403
    text = (await http.ask("GET", path, "prometheus")).text
    assert 'gpushare_leases{kind="train",project="nlp",state="pending"} 1.0' in text
    assert "bo" not in text.replace("broker", "")


# ---- what is sent ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "JobRequest"),
        (b"null", "JobRequest"),
        (b'"x"', "JobRequest"),
        (b"{}", "command"),
        (b'{"command": "true"}', "command"),
        (b'{"command": [1]}', "command"),
        (b'{"command": ["a"], "command": ["b"]}', "twice"),
        (b'{"command": ["a"], "grace_s": NaN}', "NaN"),
        (b'{"command": ["a"], "grace_s": Infinity}', "Infinity"),
        (b'{"command": ["a"], "grace_s": 1e999}', "grace_s"),
        (b'{"command": ["a"], "nosuch": 1}', "nosuch"),
        (b'{"command": ["a"], "checkpoint": "maybe"}', "maybe"),
        (b'{"command": ["a"], "gpus": 1}', "gpus"),
        (b'{"command": ["a"], "gpus": "0.33333"}', "GPU fraction"),
        (b'{"command": ["\\ud800"]}', "character"),
        (b'{"command": ["a"], "name": "\\udfff"}', "character"),
        (b'{"command": ["\xff"]}', "JSON"),
        (b"[" * 100_000, "JSON"),
    ],
)
async def test_a_bad_body_is_400_and_says_what_is_wrong(http, body, says):
    answer = await http.refused("POST", "jobs", content=body)
    assert answer.status == 400
    assert says in answer.message
    assert not http.broker.book.jobs


async def test_a_body_of_two_mebibytes_is_refused_and_the_broker_goes_on(http):
    body = json.dumps({"command": ["a" * (2 << 20)]})
    try:
        response = await http.ask("POST", "jobs", content=body)
        assert response.status_code in (400, 413)
    except httpx.TransportError:
        pass  # the connection is closed on who sends too much
    assert (await http.ask("GET", "health")).status_code == 200
    assert not http.broker.book.jobs


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
async def test_a_body_that_is_not_called_json_is_refused(http, kind):
    answer = await http.refused(
        "POST", "jobs", content=b'{"command": ["true"]}', headers={"Content-Type": kind}
    )
    assert answer.status == 400
    assert "Content-Type" in answer.message


@pytest.mark.parametrize(
    ("text", "refused"), [("\0", True), ("\\\0", True), ("\\u0000", False), ("\\\\u0000", False)]
)
async def test_a_nul_in_a_body_is_refused_before_it_can_reach_the_database(http, text, refused):
    body = {"state": "ended", "exit_code": 0, "reason": f"bye {text}"}
    job = await http.submit()
    http.tokens["runner"] = _person("bo", f"access:servers!server=bo/j{job.id}-1")
    response = await http.ask("POST", f"jobs/{job.id}/attempts/1/report", "runner", json=body)
    assert response.status_code == (400 if refused else 204), response.text


async def test_a_cookie_alone_changes_nothing(http):
    response = await http.client.post(
        "jobs", json={"command": ["true"]}, headers={"Cookie": "service-gpushare=x"}
    )
    assert response.status_code == 401


@pytest.mark.parametrize(
    ("mode", "status"), [("navigate", 200), (None, 200), ("cors", 401), ("same-origin", 401)]
)
async def test_a_script_in_a_page_of_another_reads_nothing_with_the_cookie_of_its_reader(http, mode, status):
    """All servers and this service are one origin to a browser, unless the Hub has subdomains."""
    cookie = web.create_signed_value(b"secret", "service-gpushare", "root").decode()
    headers = {"Cookie": f"service-gpushare={cookie}"} | ({"Sec-Fetch-Mode": mode} if mode else {})
    assert (await http.client.get("jobs?all=1", headers=headers)).status_code == status
    page = await http.client.get(http.url + PREFIX, headers=headers)
    assert page.status_code == (200 if status == 200 else 302)
    headers = {"Authorization": "token root"} | ({"Sec-Fetch-Mode": mode} if mode else {})
    assert (await http.client.get("jobs?all=1", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "nosuch", 404),
        ("GET", "../../nosuch", 404),
        ("PUT", "jobs", 405),
        ("DELETE", "status", 405),
        ("GET", "jobs/NOT-AN-ID", 404),
        ("GET", "jobs/" + "a" * 500, 404),
        ("GET", "jobs/..%2f..%2fetc", 404),
        ("POST", "leases/abc/eat", 404),
        ("GET", "status?after=x", 400),
        ("GET", "jobs?limit=lots", 400),
        ("GET", "offers?project=vision", 404),
    ],
)
async def test_a_path_or_verb_that_is_not_there_is_told_in_the_same_shape(http, method, path, status):
    assert (await http.refused(method, path)).status == status


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "-5"])
async def test_odd_numbers_in_a_query_are_brought_into_bounds(http, number):
    assert (await http.ask("GET", f"status?after={number}")).status_code == 200
    assert (await http.ask("GET", f"jobs?limit={number}")).status_code == 200


async def test_the_same_idempotency_key_is_the_same_job(http):
    answers = await asyncio.gather(
        *(
            http.ask("POST", "jobs", json={"command": ["a"]}, headers={"Idempotency-Key": "k"})
            for _ in range(5)
        )
    )
    assert {a.status_code for a in answers} == {201}
    assert len({a.json()["id"] for a in answers}) == 1
    assert len(http.broker.book.jobs) == 1


async def test_a_cancelled_job_can_be_submitted_again(http):
    job = await http.submit("bo", name="x", env={"A": "é"})
    assert (await http.refused("POST", f"jobs/{job.id}/retry")).status == 409
    assert (await http.ask("DELETE", f"jobs/{job.id}")).json()["state"] == "cancelled"
    again = await http.ask("POST", f"jobs/{job.id}/retry")
    assert again.status_code == 201
    assert again.json()["id"] != job.id


async def test_offers_tell_what_a_job_would_get(http):
    def outlook(answer):
        return answer.json()["job"]

    assert (await http.ask("GET", "offers")).json()["job"] is None
    now = outlook(await http.ask("GET", "offers?gpus=1"))
    assert (now["starts"], now["position"], now["borrowed"]) == ("now", None, False)
    borrowed = outlook(await http.ask("GET", "offers?gpus=2&project=nlp"))
    assert (borrowed["starts"], borrowed["borrowed"]) == ("now", True)
    assert "borrowed" in borrowed["sentence"]
    assert (await http.ask("POST", "spawner/start", SPAWNER, json=_start("ada"))).status_code == 200
    waits = outlook(await http.ask("GET", "offers?gpus=2"))
    assert (waits["starts"], waits["position"]) == ("no", 1)
    assert "Number 1. Needs 2 GPUs; 1.5 are free. With 1 GPU it would start now." in waits["sentence"]
    for query, says in [("gpus=3", "the largest machine has 2"), ("gpus=x", "x"), ("memory=1", "")]:
        refused = await http.refused("GET", f"offers?{query}")
        assert refused.status == 400
        assert says in refused.message
    assert len(http.broker.book.jobs) == 0


def _start(user: str) -> dict[str, Any]:
    options = {"fraction": "0.5"}
    return {"user": user, "server": "", "groups": ["vision"], "uid": 1, "options": options}


async def test_the_timeline_of_a_job_is_its_owners(http):
    job = await http.submit("bo")
    told = (await http.ask("GET", f"jobs/{job.id}/timeline")).json()["moments"]
    assert [moment["what"] for moment in told] == ["submitted"]
    assert (await http.refused("GET", f"jobs/{job.id}/timeline", "ada")).status == 404
    week = (await http.ask("GET", "history")).json()
    assert week == {
        "days": [],
        "used_gpu_s": 0.0,
        "lent_gpu_s": 0.0,
        "helped_jobs": 0,
        "saved_gib_s": 0.0,
    }


async def test_where_a_job_came_from_is_kept_and_bounded(http):
    source = {"path": "a.ipynb", "kernel": "python3", "output": "b.ipynb", "parameters": {"lr": "0.1"}}
    job = await http.submit("bo", source=source, cwd="/tmp", env={"B": "1", "A": "2"})
    shown = (await http.ask("GET", f"jobs/{job.id}")).json()
    assert shown["source"] == source | {"arguments": ""}
    assert (shown["cwd"], shown["variables"]) == ("/tmp", ["A", "B"])
    for bad in ({"path": "a" * 100_001}, {"path": "a\0b"}, {"path": "a", "sudo": True}):
        body = {"command": ["true"], "source": bad}
        assert (await http.refused("POST", "jobs", json=body)).status == 400


# ---- waiting for news ----------------------------------------------------------------


async def test_a_long_poll_ends_when_something_changes(http):
    seq = (await http.ask("GET", "status")).json()["seq"]
    poll = asyncio.create_task(http.ask("GET", f"status?after={seq}&wait=25"))
    while not http.service.waiting:
        await asyncio.sleep(0.01)
    assert not poll.done()
    job = await http.submit("bo")
    answer = (await asyncio.wait_for(poll, 5)).json()
    assert answer["seq"] > seq
    assert [j["id"] for j in answer["jobs"]] == [job.id]
    assert http.service.waiting == {}


async def test_a_long_poll_that_is_behind_is_answered_at_once(http):
    await http.submit("bo")
    answer = await asyncio.wait_for(http.ask("GET", "status?after=0&wait=25"), 5)
    assert answer.json()["seq"] > 0


async def test_long_polls_are_bounded_per_user(http):
    most = http.site.policy.max_waiters_per_user
    polls = [asyncio.create_task(http.ask("GET", "status?after=99999&wait=25")) for _ in range(most)]
    while http.service.waiting.get("bo", 0) < most:
        await asyncio.sleep(0.01)
    answer = await http.refused("GET", "status?after=99999&wait=25")
    assert (answer.status, answer.reason) == (429, "too_many")
    assert (await http.ask("GET", "status")).status_code == 200
    other = asyncio.create_task(http.ask("GET", "status?after=99999&wait=25", "ada"))
    while "ada" not in http.service.waiting:
        await asyncio.sleep(0.01)
    http.broker.book.seq = 100_000
    await http.broker.book.bump()
    await asyncio.wait_for(asyncio.gather(*polls, other), 5)
    assert http.service.waiting == {}


async def test_a_page_that_is_closed_waits_no_longer(http):
    poll = asyncio.create_task(http.ask("GET", "status?after=99999&wait=25"))
    while not http.service.waiting:
        await asyncio.sleep(0.01)
    poll.cancel()
    async with asyncio.timeout(5):
        while http.service.waiting:
            await asyncio.sleep(0.01)


# ---- what describes it -------------------------------------------------------------


async def test_openapi_describes_every_route_and_nothing_else(http):
    document = (await http.ask("GET", "openapi.json", None)).json()
    described = {(p, m) for p, item in document["paths"].items() for m in item if m != "parameters"}
    assert described == {(f"/{r.path}", m) for r in ROUTES for m in r.answers}
    for route in ROUTES:
        verbs = {m for m in ("get", "post", "put", "delete") if m in vars(route.handler)}
        assert verbs == set(route.answers), route.path
        item = document["paths"][f"/{route.path}"]
        assert [p["name"] for p in item["parameters"]] == re.findall(r"{(\w+)}", route.path)
        for method in route.takes:
            assert "requestBody" in item[method]
    assert document["servers"] == [{"url": "/services/gpushare/api/v1"}]
    assert _references(document) <= {f"#/components/schemas/{n}" for n in document["components"]["schemas"]}


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(x) for x in node.values()))
    return set().union(*(_references(x) for x in node)) if isinstance(node, list) else set()


async def test_every_described_path_is_routed(http):
    document = (await http.ask("GET", "openapi.json", None)).json()
    for path, item in document["paths"].items():
        for method in item.keys() - {"parameters"}:
            response = await http.ask(method.upper(), _example(path).lstrip("/"), "root")
            assert "no such path" not in response.text, path
            assert response.status_code != 405


async def test_a_job_too_long_for_its_process_is_refused_when_it_is_submitted(http):
    body = {"command": ["x" * 60_000], "env": {"A": "x" * 90_000}}
    refused = await http.refused("POST", "jobs", json=body)
    assert refused.status == 400
    assert "at most 120 KiB" in refused.message
    assert (await http.ask("GET", "jobs")).json()["jobs"] == []


async def test_health_is_degraded_without_the_helper(http):
    assert (await http.ask("GET", "health", None)).json()["status"] == "ok"
    http.broker.book.sampled_at -= 60
    response = await http.ask("GET", "health", None)
    assert response.status_code == 503
    reasons = ["The device helper does not answer: nothing is granted until it does."]
    assert response.json()["reasons"] == reasons
    client = BrokerClient(http.api, "bo")
    health = await client.get("health", wire.Health)
    assert (health.status, health.reasons) == ("degraded", reasons)
    await client.close()


async def test_the_page_shows_what_is_mine_and_escapes_it(http):
    await http.submit("bo", name="<script>alert(1)</script>&'\"")
    response = await http.ask("GET", f"{http.url}{PREFIX}")
    assert response.status_code == 200
    assert "<script" not in response.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in response.text
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    other = await http.ask("GET", f"{http.url}{PREFIX}", "ada")
    assert "alert(1)" not in other.text
    assert "alert(1)" in (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text


async def test_who_is_not_logged_in_is_sent_to_the_hub(http):
    response = await http.client.get(f"{http.url}{PREFIX}", follow_redirects=False)
    assert response.status_code == 302
    assert "/hub/api/oauth2/authorize" in response.headers["Location"]


# ---- our own client -------------------------------------------------------------------


async def test_our_client_understands_answers_and_refusals(http):
    client = BrokerClient(http.api, "bo", retry_s=0.0)
    job = await client.post("jobs", wire.JobRequest(command=["true"]), wire.Job, key="k")
    assert (await client.get(f"jobs/{job.id}", wire.Job)).id == job.id
    assert [j.id for j in (await client.get("jobs", wire.JobList, params={"limit": 5})).jobs] == [job.id]
    with pytest.raises(InvalidRequest, match="needs a command"):
        await client.post("jobs", wire.JobRequest(command=[]), wire.Job)
    with pytest.raises(NotFound):
        await client.get("jobs/nosuch", wire.Job)
    with pytest.raises(Conflict) as refused:
        await client.post(f"jobs/{job.id}/retry", None, wire.Job)
    assert refused.value.reason == "conflict"
    assert (await client.delete(f"jobs/{job.id}", wire.Job)).state == "cancelled"
    await client.close()


def test_the_people_of_these_tests_are_those_of_the_site():
    assert {"ada", "bo"} <= GROUPS.keys()
