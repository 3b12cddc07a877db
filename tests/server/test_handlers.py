"""``/gpushare/*`` of a real Jupyter Server: one server and one broker for all tests here."""

from __future__ import annotations

import httpx
import pytest


@pytest.fixture(scope="module")
def running(start_both, tmp_path_factory):
    with start_both(tmp_path_factory.mktemp("server")) as both:
        yield both


@pytest.fixture
def broker(running):
    broker, _ = running
    broker.answers.clear()
    broker.seen.clear()
    return broker


@pytest.fixture
def server(running):
    return running[1]


def test_status_is_the_brokers_answer_and_what_only_this_server_knows(server, golden):
    mine = {"enabled": True, "server": "", "silent_since": None}
    assert server.get("gpushare/status") == golden("status_active") | mine


def test_nobody_gets_in_without_a_login(server):
    for method, path in [
        ("GET", "gpushare/status"),
        ("GET", "gpushare/offers"),
        ("GET", "gpushare/jobs"),
        ("POST", "gpushare/jobs"),
        ("GET", "gpushare/jobs/k3v9m2x7qa"),
        ("DELETE", "gpushare/jobs/k3v9m2x7qa"),
        ("POST", "gpushare/leases/b7q2mzk4x9/resume"),
    ]:
        answer = httpx.request(method, f"{server.url}/{path}", trust_env=False, timeout=30)
        assert answer.status_code in (302, 403), (method, path)


def test_cookie_alone_writes_nothing_without_the_xsrf_token(server, broker, golden):
    broker.answer("POST leases/b7q2mzk4x9/lend", golden("status_asleep")["leases"][0])
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as browser:
        login = browser.get("/login")
        xsrf = browser.cookies["_xsrf"]
        entered = browser.post("/login", data={"password": "secret-of-this-server", "_xsrf": xsrf})
        assert (login.status_code, entered.status_code) == (200, 302)
        origin = {"Origin": server.url}
        forged = browser.post("/gpushare/leases/b7q2mzk4x9/lend", headers=origin)
        assert forged.status_code == 403
        assert not broker.asked("POST leases/b7q2mzk4x9/lend")
        headers = origin | {"X-XSRFToken": browser.cookies["_xsrf"]}
        assert browser.post("/gpushare/leases/b7q2mzk4x9/lend", headers=headers).status_code == 200
    assert len(broker.asked("POST leases/b7q2mzk4x9/lend")) == 1


def test_lease_verbs_and_jobs_are_passed_on_with_this_servers_identity(server, broker, golden):
    lease = golden("status_active")["leases"][0]
    for verb in ("resume", "keep", "lend"):
        broker.answer(f"POST leases/b7q2mzk4x9/{verb}", lease)
        assert server.request("POST", f"gpushare/leases/b7q2mzk4x9/{verb}").json() == lease
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[0].json == {"minutes": 30.0}
    server.request("POST", "gpushare/leases/b7q2mzk4x9/keep", json={"minutes": 5})
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[1].json == {"minutes": 5.0}

    broker.answer("POST jobs", golden("job"), 201)
    asked = golden("job_request")
    answer = server.request("POST", "gpushare/jobs", json=asked, headers={"Idempotency-Key": "once"})
    assert (answer.status_code, answer.json()) == (201, golden("job"))
    assert broker.asked("POST jobs")[0].json == asked
    assert broker.asked("POST jobs")[0].headers["Idempotency-Key"] == "once"
    for name, path in [("job", "jobs/k3v9m2x7qa"), ("job_list", "jobs"), ("offers", "offers")]:
        broker.answer(f"GET {path}", golden(name))
        assert server.get(f"gpushare/{path}") == golden(name)
    broker.answer("DELETE jobs/k3v9m2x7qa", golden("job"))
    assert server.request("DELETE", "gpushare/jobs/k3v9m2x7qa").json() == golden("job")


def test_refusals_and_bad_bodies_are_error_answers(server, broker, golden):
    broker.answer("POST jobs", golden("error"), 409)
    refused = server.request("POST", "gpushare/jobs", json={"command": ["x"]})
    assert (refused.status_code, refused.json()) == (409, golden("error"))
    for body, says in [(b"{", "not JSON"), (b'{"command": ["x"], "root": 1}', "root"), (b"[NaN]", "NaN")]:
        answer = server.request("POST", "gpushare/jobs", content=body)
        assert answer.status_code == 400
        assert says in answer.json()["message"]
    answer = server.request("POST", "gpushare/jobs", content=b'"' + b"x" * (2 << 20) + b'"')
    assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
    assert len(broker.asked("POST jobs")) == 1
    assert server.request("POST", "gpushare/leases/..%2Fx/resume").status_code == 404
    assert server.request("POST", "gpushare/leases/b7q2mzk4x9/destroy").status_code == 404
    assert "Traceback" not in server.log.read_text()


def test_asking_for_the_status_is_no_activity_of_the_user(server):
    before = server.get("api/status?no_track_activity=1")["last_activity"]
    for path in ("gpushare/status", "gpushare/jobs"):
        server.request("GET", path)
    assert server.get("api/status?no_track_activity=1")["last_activity"] == before
