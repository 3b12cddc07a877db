"""What is sent over HTTP: bad bodies, paths and numbers are refused, good ones answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.broker.http_site import PREFIX, SPAWNER, person


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
        (b'{"command": ["a"], "gpus": "0.00033"}', "GPU fraction"),
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
    assert not http.broker.registry.jobs


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
    http.tokens["runner"] = person("bo", f"access:servers!server=bo/j{job.id}-1")
    response = await http.ask("POST", f"jobs/{job.id}/attempts/1/report", "runner", json=body)
    assert response.status_code == (400 if refused else 200), response.text


@pytest.mark.parametrize(
    ("mode", "status"), [("navigate", 200), (None, 200), ("cors", 401), ("same-origin", 401)]
)
async def test_a_script_in_a_page_of_another_reads_nothing_with_the_cookie_of_its_reader(http, mode, status):
    """All servers and this service are one origin to a browser, unless the Hub has subdomains."""
    headers = {"Sec-Fetch-Mode": mode} if mode else {}
    headers["Cookie"] = f"service-gpushare={http.login('root')}"
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


async def test_a_refusal_before_the_body_was_read_says_that_the_connection_ends(http):
    for path, identity in (("nosuch", "bo"), ("jobs", "no-such-token"), ("jobs", None)):
        refused = await http.ask("POST", path, identity, json={"command": ["true"]})
        assert refused.headers["Connection"] == "close"
    assert (await http.ask("GET", "nosuch")).headers["Connection"] == "close"
    refused = await http.ask("POST", "jobs", json={})
    assert (refused.status_code, refused.headers.get("Connection")) == (400, None)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "-5"])
async def test_odd_numbers_in_a_query_are_brought_into_bounds(http, number):
    assert (await http.ask("GET", f"status?after={number}")).status_code == 200
    assert (await http.ask("GET", f"jobs?limit={number}")).status_code == 200


async def test_the_same_idempotency_key_with_another_body_is_refused(http):
    async def submit(**body):
        return await http.ask("POST", "jobs", json=body, headers={"Idempotency-Key": "k"})

    first, other = await asyncio.gather(submit(command=["a"]), submit(command=["b"]))
    job = first.json()["id"]
    assert (first.status_code, other.status_code) == (201, 422)
    assert (await submit(command=["a"], retries=1)).json() == other.json()
    assert other.json()["reason"] == "key_reused"
    assert job in other.json()["message"]
    assert other.json()["message_texts"][0]["args"] == [job]
    same = await submit(retries=0, command=["a"])  # the same request in other words
    assert (same.status_code, same.json()["id"]) == (201, job)
    assert len(http.broker.registry.jobs) == 1


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
    assert (
        "Number 1. Needs 2 GPUs together; 1.5 are free. With 1 GPU it would start now." in waits["sentence"]
    )
    for query, says in [("gpus=3", "the largest machine has 2"), ("gpus=x", "x"), ("memory=1", "")]:
        refused = await http.refused("GET", f"offers?{query}")
        assert refused.status == 400
        assert says in refused.message
    assert len(http.broker.registry.jobs) == 0


def _start(user: str) -> dict[str, Any]:
    options = {"fraction": "0.5"}
    return {"user": user, "server": "", "groups": ["vision"], "uid": 1, "options": options}


@pytest.mark.parametrize("uid", [-1, (1 << 32) - 1, 1 << 64])
async def test_a_number_that_no_uid_has_starts_nothing(http, uid):
    answer = await http.refused("POST", "spawner/start", SPAWNER, json=_start("ada") | {"uid": uid})
    assert (answer.status, "uid" in answer.message) == (400, True)


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


async def test_a_job_too_long_for_its_process_is_refused_when_it_is_submitted(http):
    body = {"command": ["x" * 60_000], "env": {"A": "x" * 90_000}}
    refused = await http.refused("POST", "jobs", json=body)
    assert refused.status == 400
    assert "at most 120 KiB" in refused.message
    assert (await http.ask("GET", "jobs")).json()["jobs"] == []
