"""What describes the interface, its page, and our own client."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare.broker.http.routes import ROUTES
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire
from tests.broker.http_site import PREFIX


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


async def test_health_is_degraded_without_the_helper(http):
    assert (await http.ask("GET", "health", None)).json()["status"] == "ok"
    registry = http.broker.registry
    now = registry.devices.sampled_at + 60
    registry.clock = lambda: now
    response = await http.ask("GET", "health", None)
    assert response.status_code == 503
    reasons = ["The last measurement of the GPUs is 60 s old: no GPU is given until a new one."]
    assert response.json()["reasons"] == reasons
    assert response.json()["sample_age_s"] == 60
    client = BrokerClient(http.api, "bo")
    health = await client.get("health", wire.Health)
    assert (health.status, health.reasons) == ("degraded", reasons)
    await client.close()


async def test_a_machine_with_every_gpu_left_out_says_why(http):
    devices = http.broker.registry.devices
    left_out = "NVIDIA GB10 (GPU-1) is left out: the driver does not say how much memory it has"
    devices.inventory = replace(devices.inventory, devices=(), left_out=(left_out,))
    response = await http.ask("GET", "health", None)
    assert response.json()["reasons"][:2] == ["The device helper found no GPU.", f"{left_out}."]
    answer = await http.ask("GET", "devices", "ada")
    assert (answer.json()["devices"], answer.json()["left_out"]) == ([], [left_out])


async def test_devices_say_whether_what_sleeps_there_can_move(http):
    devices = http.broker.registry.devices
    first, *rest = devices.inventory.devices
    shown = (
        replace(first, movable=True),
        *(replace(each, movable=False, move_reason="why not") for each in rest),
    )
    devices.inventory = replace(devices.inventory, devices=shown)
    answer = (await http.ask("GET", "devices", "ada")).json()["devices"]
    found = [(each["movable"], each["move_reason"]) for each in answer]
    assert found == [(True, ""), *((False, "why not") for _ in rest)]


async def test_the_page_shows_what_is_mine_and_escapes_it(http):
    await http.submit("bo", name="<script>alert(1)</script>&'\"")
    response = await http.ask("GET", f"{http.url}{PREFIX}")
    assert response.status_code == 200
    assert "<script>alert" not in response.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in response.text
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    other = await http.ask("GET", f"{http.url}{PREFIX}", "ada")
    assert "alert(1)" not in other.text
    assert "alert(1)" in (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text


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
