"""What a revoked token, a lost group and an unknown caller can still do."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.broker.http import access
from jupyter_gpushare.protocol import wire
from tests.broker.http_site import JOBS_SCOPE, Http, person


async def test_a_revoked_token_changes_nothing_more(http: Http):
    http.service.access.hub_auth.cache_max_age = 300
    await http.submit("bo")
    assert (await http.ask("GET", "status", "bo")).status_code == 200
    del http.tokens["bo"]
    assert (await http.ask("GET", "status", "bo")).status_code == 200  # a read may lag behind
    body = {"command": ["true"]}
    assert (await http.refused("POST", "jobs", "bo", json=body)).status == 401
    lease = next(iter(http.broker.registry.leases))
    assert (await http.refused("POST", f"leases/{lease}/keep", "bo")).status == 401
    job = next(iter(http.broker.registry.jobs))
    assert (await http.refused("DELETE", f"jobs/{job}", "bo")).status == 401
    assert len(http.broker.registry.jobs) == 1


async def test_a_lost_scope_and_a_lost_group_count_at_once_for_changes(http: Http, monkeypatch):
    await http.submit("bo")
    http.tokens["bo"] = person("bo")
    refused = await http.refused("POST", "jobs", "bo", json={"command": ["true"]})
    assert (refused.status, JOBS_SCOPE in refused.message) == (403, True)
    http.tokens["bo"] = person("bo", JOBS_SCOPE)
    monkeypatch.setattr(access, "_GROUPS_S", 300.0)
    assert (await http.ask("GET", "offers", "bo")).status_code == 200

    http.site.groups["bo"] = ()
    answer = await http.refused("POST", "jobs", "bo", json={"command": ["true"], "project": "nlp"})
    assert answer.status == 404


async def test_reports_that_hint_do_not_ask_the_hub_each_time(http: Http):
    http.service.access.hub_auth.cache_max_age = 300
    report = {"kernels": [{"id": "k", "busy": True, "idle_s": 0.0}]}
    assert (await http.ask("POST", "servers/activity", "ada-server", json=report)).status_code == 204
    http.tokens["ada-server"] = {"kind": "user", "name": "ada", "scopes": []}
    assert (await http.ask("POST", "servers/activity", "ada-server", json=report)).status_code == 204


async def _raw(http: Http, text: str) -> str:
    """Return the status line of the answer to the bytes of ``text``; the connection stays open."""
    port = http.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    async with asyncio.timeout(5):
        line = await reader.readline()
    writer.close()
    return line.decode()


@pytest.mark.parametrize(("token", "status"), [("", "401"), ("Authorization: token unknown\r\n", "401")])
async def test_the_body_of_an_unknown_caller_is_not_waited_for(http: Http, token, status):
    path = "/services/gpushare/api/v1/jobs"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{token}Content-Length: 1000\r\n\r\n"
    assert f" {status} " in await _raw(http, head)


async def test_a_body_beyond_a_mebibyte_is_413_by_its_announced_length(http: Http):
    path = "/services/gpushare/api/v1/jobs"
    length = wire.MAX_BODY_BYTES + 1
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: token bo\r\nContent-Length: {length}\r\n\r\n"
    assert " 413 " in await _raw(http, head)
    answer = await http.refused("POST", "jobs", "bo", content=b"x" * length)
    assert (answer.status, answer.reason) == (413, "too_large")
