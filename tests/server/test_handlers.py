"""``/gpushare/*`` of a real Jupyter Server: one server and one broker for all tests here."""

from __future__ import annotations

import asyncio
import json
import secrets
import time

import httpx
import pytest

from jupyter_gpushare.protocol.heldlog import HeldLog
from jupyter_gpushare.protocol.jobfiles import BoundedLog, Disk, log_path
from jupyter_gpushare.server.handlers import FORWARDS
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The home of the server's user."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def running(start_both, folder):
    with start_both(folder) as both:
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
    mine = {"enabled": True, "server": "", "may_gain": False, "unreachable_since": None}
    assert server.get("gpushare/status") == golden("status_active") | mine


def test_no_request_is_answered_without_a_login(server):
    for method, path in [
        *((forward.method, forward.path.format("k3v9m2x7qa")) for forward in FORWARDS),
        ("GET", "status"),
        ("GET", "jobs/k3v9m2x7qa/log"),
        ("GET", "launch"),
        ("POST", "launch"),
        ("PUT", "leases/b7q2mzk4x9/size"),
        ("POST", "leases/b7q2mzk4x9/kernels/k/release"),
    ]:
        answer = httpx.request(method, f"{server.url}/gpushare/{path}", trust_env=False, timeout=PATIENCE_S)
        assert answer.status_code in (302, 403), (method, path)


def test_cookie_alone_writes_nothing_without_the_xsrf_token(server, broker, golden):
    broker.answer("POST leases/b7q2mzk4x9/lend", golden("status_asleep")["leases"][0])
    with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as browser:
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
    for verb in ("resume", "stay-asleep", "keep", "lend", "release"):
        broker.answer(f"POST leases/b7q2mzk4x9/{verb}", lease)
        assert server.request("POST", f"gpushare/leases/b7q2mzk4x9/{verb}").json() == lease
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[0].json == {"minutes": 30.0}
    server.request("POST", "gpushare/leases/b7q2mzk4x9/keep", json={"minutes": 5})
    assert broker.asked("POST leases/b7q2mzk4x9/keep")[1].json == {"minutes": 5.0}

    broker.answer("PUT leases/b7q2mzk4x9/size", lease)
    sized = server.request("PUT", "gpushare/leases/b7q2mzk4x9/size", json={"gpus": "1/4"}).json()
    assert sized == lease | {"env": {}, "restart": []}
    assert broker.asked("PUT leases/b7q2mzk4x9/size")[0].json["gpus"] == "1/4"

    broker.answer("POST jobs", golden("job"), 201)
    asked = golden("job_request")
    answer = server.request("POST", "gpushare/jobs", json=asked, headers={"Idempotency-Key": "once"})
    assert (answer.status_code, answer.json()) == (201, golden("job"))
    assert broker.asked("POST jobs")[0].json == asked
    assert broker.asked("POST jobs")[0].headers["Idempotency-Key"] == "once"
    for name, path in [
        ("job", "jobs/k3v9m2x7qa"),
        ("job_list", "jobs"),
        ("timeline", "jobs/k3v9m2x7qa/timeline"),
        ("history", "history"),
        ("offers", "offers"),
    ]:
        broker.answer(f"GET {path}", golden(name))
        assert server.get(f"gpushare/{path}") == golden(name)
    server.get("gpushare/offers?project=nlp&gpus=2&x=1")
    assert broker.asked("GET offers")[-1].query == {"project": "nlp", "gpus": "2"}
    server.get("gpushare/offers?profile=1g.10gb&borrow=0")
    assert broker.asked("GET offers")[-1].query == {"profile": "1g.10gb", "borrow": "0"}
    broker.answer("POST jobs/k3v9m2x7qa/retry", golden("job"), 201)
    assert server.request("POST", "gpushare/jobs/k3v9m2x7qa/retry").json() == golden("job")
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
    assert server.request("DELETE", "gpushare/history").status_code == 405
    assert "Traceback" not in server.log.read_text()


def test_asking_for_the_status_is_no_activity_of_the_user(server):
    before = server.get("api/status?no_track_activity=1")["last_activity"]
    for path in ("gpushare/status", "gpushare/jobs"):
        server.request("GET", path)
    assert server.get("api/status?no_track_activity=1")["last_activity"] == before


def test_a_dialog_for_a_script_becomes_a_job(server, broker, golden, folder):
    (folder / "work" / "train.py").write_text("print(1)")
    told = server.get("gpushare/launch?path=train.py")
    assert (told["kind"], told["cwd"], told["kernel"]) == ("script", str(folder / "work"), "python3")
    assert "python3" in [environment["name"] for environment in told["environments"]]
    broker.answer("POST jobs", golden("job"), 201)
    body = {"path": "train.py", "arguments": "--lr 1", "gpus": "0.5", "variables": ["A=1"]}
    answer = server.request("POST", "gpushare/launch", json=body, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()) == (201, golden("job"))
    (asked,) = broker.asked("POST jobs")
    assert asked.json["command"][1:] == [str(folder / "work" / "train.py"), "--lr", "1"]
    assert asked.json["env"] == {"PYTHONUNBUFFERED": "1", "A": "1"}
    assert asked.headers["Idempotency-Key"] == "k"
    refused = server.request("POST", "gpushare/launch", json={"path": "none.py"})
    assert (refused.status_code, refused.json()["reason"]) == (404, "not_found")


def test_a_repeated_request_of_the_dialog_is_the_same_job_for_a_server_that_knows_nothing_of_it(
    server, broker, golden, folder
):
    (folder / "work" / "a.ipynb").write_text(json.dumps({"cells": [], "metadata": {}}))
    broker.answer("POST jobs", golden("job"), 201)

    def launch(key, **more):
        body = {"path": "a.ipynb", "at": "2026-11-22T03:05:09.123Z", **more}
        answer = server.request("POST", "gpushare/launch", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 201, answer.text
        return broker.asked("POST jobs")[-1].json

    first = launch("k")
    time.sleep(1.1)  # the name of the output has the second in it
    assert launch("k") == first
    assert launch("k", gpus="0.5")["gpus"] == "0.5"
    later = launch("other", at="2026-11-22T03:05:10.123Z")
    assert later["source"]["output"] != first["source"]["output"]
    assert launch("k", at="")["source"]["output"] != first["source"]["output"]


@pytest.mark.parametrize("at", ["yesterday", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"])
def test_a_dialog_without_a_time_is_refused(server, folder, at):
    (folder / "work" / "b.ipynb").write_text(json.dumps({"cells": [], "metadata": {}}))
    refused = server.request("POST", "gpushare/launch", json={"path": "b.ipynb", "at": at})
    assert (refused.status_code, refused.json()["reason"]) == (400, "invalid")


def test_a_refused_key_is_told_in_words(server, broker, folder):
    (folder / "work" / "train.py").write_text("print(1)")
    error = {"status": 422, "reason": "key_reused", "message": "this Idempotency-Key belongs to job x"}
    broker.answer("POST jobs", error, 422)
    answer = server.request(
        "POST", "gpushare/launch", json={"path": "train.py"}, headers={"Idempotency-Key": "k"}
    )
    assert (answer.status_code, answer.json()["reason"]) == (422, "key_reused")
    assert answer.json()["message"] == error["message"]


def test_the_output_of_a_retry_is_the_notebook_that_it_really_writes(server, broker, golden, folder):
    job = golden("job") | {"source": {"path": "a.ipynb", "output": "a-1.ipynb"}}
    (folder / "work" / "a-1.ipynb").write_text("{}")
    broker.answer("GET jobs/k3v9m2x7qa", job)
    broker.answer("GET jobs", golden("job_list") | {"jobs": [job]})
    broker.status = golden("status_active") | {"jobs": [job]}

    def outputs() -> list[str]:
        jobs = [server.get("gpushare/jobs/k3v9m2x7qa")]
        jobs += server.get("gpushare/jobs")["jobs"] + server.get("gpushare/status")["jobs"]
        return [each["source"]["output"] for each in jobs]

    try:
        assert outputs() == ["a-1.ipynb"] * 3
        (folder / "work" / f"a-1-{job['id']}.ipynb").write_text("{}")
        assert outputs() == [f"a-1-{job['id']}.ipynb"] * 3
    finally:
        broker.status = golden("status_active")


def test_a_log_is_read_on_from_the_users_own_files(server, folder):
    path = log_path(folder, "k3v9m2x7qa", 2)
    path.parent.mkdir(parents=True)
    path.with_name("attempt-1.log").write_text("first\n")
    path.write_text("zero\none\n")

    def read(query: str) -> tuple[str, dict[str, str]]:
        answer = server.request("GET", f"gpushare/jobs/k3v9m2x7qa/log?{query}")
        assert answer.status_code == 200
        return answer.text, dict(answer.headers)

    text, headers = read("")
    assert (text, headers["x-gpushare-next"], headers["x-gpushare-attempts"]) == ("zero\none\n", "9", "2")
    assert read("offset=5")[0] == "one\n"
    assert read("offset=9")[0] == ""
    assert read("offset=-4")[0] == "one\n"
    assert headers["content-type"].startswith("text/plain")
    assert read("attempt=1")[0] == "first\n"
    with path.open("a") as file:
        file.write("two\n")
    assert read("offset=9")[0] == "two\n"
    assert headers["x-gpushare-first"] == "1"
    path.with_name("attempt-1.log").unlink()
    assert read("attempt=1")[0] == ""
    assert read("")[1]["x-gpushare-first"] == "2"
    path.write_text("a€b")
    assert [read(f"offset=-{n}")[0] for n in (1, 2, 3, 4)] == ["b", "b", "b", "€b"]
    assert 'filename="k3v9m2x7qa-2.log"' in read("download=1")[1]["content-disposition"]
    none = server.request("GET", "gpushare/jobs/aaaaaaaaaa/log")
    assert (none.status_code, none.text, none.headers["x-gpushare-attempts"]) == (200, "", "0")
    assert none.headers["x-gpushare-first"] == "0"
    assert server.request("GET", "gpushare/jobs/k3v9m2x7qa/log?offset=x").status_code == 400


def test_what_the_disk_did_not_take_of_a_log_comes_from_its_runner(server, folder):
    """A job whose home takes nothing: its folder is not even there."""
    job = secrets.token_hex(5)
    (folder / "file").touch()
    log = BoundedLog(folder / "file" / "attempt-3.log", Disk())
    log.write("x€".encode())
    log.flush()
    path = f"gpushare/jobs/{job}/log"

    async def read() -> None:
        async with HeldLog(job, 3, log):
            answer = await asyncio.to_thread(server.request, "GET", f"{path}?offset=-1000")
            assert (answer.text, answer.headers["x-gpushare-next"]) == ("x€", "4")
            for name, value in {"Attempts": "3", "First": "3", "Left-Out": "4", "Why": log.why}.items():
                assert answer.headers[f"X-Gpushare-{name}"] == value
            assert (await asyncio.to_thread(server.request, "GET", f"{path}?offset=1")).text == "€"
            assert (await asyncio.to_thread(server.request, "GET", f"{path}?download=1")).text == "x€"
            earlier = await asyncio.to_thread(server.request, "GET", f"{path}?attempt=2")
            assert earlier.text == ""
            assert "x-gpushare-left-out" not in earlier.headers

    asyncio.run(read())
    after = server.request("GET", path)
    assert (after.text, after.headers["x-gpushare-attempts"]) == ("", "0")


def test_release_restarts_the_kernel_and_only_one_of_this_server(server):
    kernel = server.request("POST", "api/kernels", json={"name": "python3"}).json()["id"]
    answer = server.request("POST", f"gpushare/leases/b7q2mzk4x9/kernels/{kernel}/release")
    assert answer.status_code == 200
    assert kernel in [k["id"] for k in server.get("api/kernels")]
    assert server.request("POST", "gpushare/leases/b7q2mzk4x9/kernels/nope/release").status_code == 404
    server.request("DELETE", f"api/kernels/{kernel}")
