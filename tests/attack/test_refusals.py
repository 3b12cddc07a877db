"""A request answered 409 or 429 leaves database, leases, jobs and devices as they were, and says why."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare.broker.http.listener import Rate
from tests.broker.http_site import SPAWNER, Http


def stored(http: Http) -> list[str]:
    """All rows of the database, and what the devices were asked to do."""
    with sqlite3.connect(http.site.url.removeprefix("sqlite:///")) as database:
        return [*database.iterdump(), *http.site.effects]


def set_policy(http: Http, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    registry = http.broker.registry
    monkeypatch.setattr(registry, "policy", replace(registry.policy, **changes))


@pytest.mark.parametrize(
    ("method", "path", "identity", "body", "status", "hint"),
    [
        ("POST", "jobs/{job}/retry", "bo", None, 409, "cancel it first"),
        ("POST", "leases/{lease}/resume", "bo", None, 409, "asleep"),
        ("POST", "leases/{lease}/lend", "bo", None, 409, "awake"),
        ("POST", "leases/{lease}/never-sleep", "bo", None, 409, "`checkpoint`"),
        ("POST", "leases/{lease}/kernels/k-1/release", "bo", None, 409, ""),
        ("POST", "leases/{lease}/keep", "bo", {"minutes": 60}, 429, "0 more minutes today"),
        ("PUT", "projects/nlp", "root", {"quota": 99, "weight": 7}, 409, "send force"),
        ("POST", "spawner/start", SPAWNER, {"options": {"gpus": 2}}, 409, "Choose a smaller size"),
        ("POST", "spawner/start", SPAWNER, {"server": "jabcdefghij-1"}, 409, "gpushare submit"),
        ("POST", "jobs", "bo", {"command": ["true"]}, 429, "cancel some"),
        ("DELETE", "jobs/{job}", "ada", None, 404, "no job"),
    ],
)
async def test_a_refusal_changes_nothing_and_says_what_to_do(
    http: Http, monkeypatch: pytest.MonkeyPatch, method, path, identity, body, status, hint
):
    job = await http.submit("bo")
    holds = {"user": "ada", "server": "", "groups": ["vision"], "uid": 1000, "options": {"gpus": 1}}
    assert (await http.ask("POST", "spawner/start", SPAWNER, json=holds)).status_code == 200
    set_policy(http, monkeypatch, max_jobs_per_user=1, keep_minutes_per_day=0.0)
    if path == "spawner/start":
        body = {"user": "bo", "server": "x", "groups": ["nlp"], "uid": 1000, "options": None} | body
    for user in ("ada", "bo", "root"):
        await http.ask("GET", "status", user)  # the broker knows these users from now on
    before = stored(http)
    answer = await http.ask(
        method, path.format(job=job.id, lease=f"j{job.id}"), identity, **({"json": body} if body else {})
    )
    assert (answer.status_code, hint in answer.json()["message"]) == (status, True), answer.text
    assert ("Retry-After" in answer.headers) == (status == 429)
    assert stored(http) == before
    assert set(http.broker.registry.jobs) == {job.id}
    assert len(http.broker.registry.leases) == 2


async def test_a_key_that_was_accepted_is_answered_the_same_where_a_new_job_is_refused(
    http: Http, monkeypatch: pytest.MonkeyPatch
):
    async def submit(key: str) -> tuple[int, str]:
        headers = {"Idempotency-Key": key}
        answer = await http.ask("POST", "jobs", "bo", json={"command": ["true"]}, headers=headers)
        return answer.status_code, answer.json().get("id", "")

    accepted = await submit("a")
    set_policy(http, monkeypatch, max_jobs_per_user=1)
    before = stored(http)
    assert (await submit("b"))[0] == 429
    assert await submit("a") == accepted
    http.service.limits.changes = Rate(per_s=0.001, burst=1, clock=lambda: 0.0)
    assert await submit("a") == accepted
    assert (await submit("c"))[0] == 429
    assert stored(http) == before
    set_policy(http, monkeypatch, max_jobs_per_user=9)
    http.service.limits.changes = Rate(per_s=10.0, burst=100)
    status, job = await submit("b")  # a refused key is not used up
    assert (status, job != accepted[1]) == (201, True)
