"""Requests that make no sense are refused with a sentence, and lose nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.errors import (
    InvalidRequest,
    NotFound,
    RequestError,
)
from jupyter_gpushare.protocol import wire
from tests.broker.machine import Program
from tests.broker.site import spawn

# No addresses of webhooks.
NOT_WEB = [
    "ftp://example.org/",
    "https://",
    "https:///path",
    "http://a b/",
    "http://a/\n",
    "http://ä.example/",
    "http://[::1",
    "http://a:99999/",
    "x" * 9,
    "http://a/" + "x" * 2_000,
]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": 10}, "2"),
        ({"gpus": -1}, "from 0 to 1024"),
        ({"gpus": 10**30}, "from 0 to 1024"),
        ({"fraction": "0.5", "gpus": 1}, "not for 2 of them"),
        ({"fraction": "0.00033"}, "GPU fraction"),
        ({"memory": "lots"}, "size of memory"),
        ({"memory": "999TiB"}, "GPU"),
        ({"memory": "999999999999999TiB"}, "GPU"),
    ],
)
async def test_a_session_with_an_impossible_size_is_refused(broker, options, says):
    request = wire.SpawnRequest(
        user="ada", server="", groups=["vision"], uid=1000, options=wire.GpuRequest(**options)
    )
    with pytest.raises(RequestError, match=says):
        await broker.start(request)
    assert broker.holds_nothing


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"gpus": "10"}, "GPU"),
        ({"gpus": "1025"}, "at most 1024"),
        ({"gpus": "0.00033"}, "GPU fraction"),
        ({"memory": "999TiB"}, "GPU"),
        ({"command": []}, "needs a command"),
        ({"command": ["  "]}, "needs a command"),
        ({"command": ["a\0b"]}, "NUL"),
        ({"command": ["a"] * 1001}, "too long"),
        ({"command": ["a" * 100_001]}, "too long"),
        ({"cwd": "relative"}, "absolute"),
        ({"cwd": "/a\0b"}, "absolute"),
        ({"cwd": "/" + "a" * 5000}, "absolute"),
        ({"env": {"A": "1\0"}}, "environment variable"),
        ({"env": {"A=B": "1"}}, "environment variable"),
        ({"env": {"": "1"}}, "environment variable"),
        ({"env": {"LD_PRELOAD": "/evil.so"}}, "set by the system"),
        ({"env": {"GPUSHARE_LEASE": "x"}}, "set by the system"),
        ({"env": {"JUPYTERHUB_API_TOKEN": "x"}}, "set by the system"),
        ({"env": {f"A{n}": "" for n in range(201)}}, "at most 200"),
        ({"env": {"A": "x" * 100_001}}, "100,000"),
        ({"name": ""}, "1 to 100"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"name": "a\0b"}, "NUL"),
        ({"priority": 101}, "-100 to 100"),
        ({"priority": 1}, "priority is at most 0 in project nlp"),
        ({"retries": 11}, "0 to 10"),
        ({"retries": -1}, "0 to 10"),
        ({"grace_s": -0.5}, "0 to 3600"),
        ({"grace_s": 3601.0}, "0 to 3600"),
        ({"grace_s": float("inf")}, "0 to 3600"),
        ({"grace_s": float("nan")}, "0 to 3600"),
        ({"project": "nosuch"}, "no project"),
        ({"project": "vision"}, "no project"),
        *(({"notify_url": url}, "a notification goes to a URL") for url in NOT_WEB),
    ],
)
async def test_a_job_that_cannot_be_run_is_refused_with_a_sentence(broker, more, says):
    request = wire.JobRequest(**{"command": ["true"], **more})
    with pytest.raises(RequestError, match=says):
        await broker.requests.submit("bo", ("nlp",), request, None)
    assert broker.holds_nothing


async def test_a_grace_that_keeps_an_owner_waiting_is_refused(site):
    await site.start_broker()
    with pytest.raises(InvalidRequest, match="at most 120"):
        await site.submit("bo", "1", grace_s=3600)
    await site.submit("bo", "1", grace_s=120)


async def test_parts_so_small_that_they_only_take_places_are_refused(site):
    site.policy = replace(site.policy, min_fraction_milli=50)
    broker = await site.start_broker()
    with pytest.raises(InvalidRequest, match=r"at least 0\.05 GPU"):
        await site.submit("bo", "0.049")
    with pytest.raises(InvalidRequest, match=r"at least 3\.\d GiB"):
        await site.submit("bo", memory="1GiB")
    with pytest.raises(InvalidRequest, match=r"at least 0\.05 GPU"):
        await broker.start(spawn("ada", "0.001"))
    await site.submit("bo", "0.05")


@pytest.mark.parametrize("code", [10**30, -(10**30), 256, -65, 2**31])
async def test_a_forged_exit_code_cannot_break_the_database(site, broker, code):
    job = await site.running("bo", "1", program=Program(work_s=100))
    with pytest.raises(InvalidRequest, match="exit_code"):
        await broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=code))
    assert broker.job(job).exit_code is None


@pytest.mark.parametrize(
    "change",
    [
        {"quota": -1.0},
        {"quota": 0.0001},
        {"quota": float("inf")},
        {"limit": -0.5},
        {"limit": float("nan")},
        {"weight": -1},
        {"weight": 1001},
    ],
)
async def test_impossible_numbers_of_a_project_are_refused(broker, change):
    with pytest.raises(InvalidRequest):
        await broker.project_numbers.change("nlp", wire.ProjectChange(**change), "root")
    with pytest.raises(NotFound):
        await broker.project_numbers.change("nosuch", wire.ProjectChange(weight=1), "root")
    assert broker.registry.overrides == {}


async def test_a_hint_from_the_future_or_the_far_past_harms_nothing(site, broker):
    ada = await site.session("ada", "1/2")
    for idle_s in (-1e300, 1e300, float("inf")):
        kernels = [wire.KernelActivity(id="k" * 1000, busy=False, idle_s=idle_s, name="n" * 1000)] * 100
        await broker.own_sessions.activity("ada", "", wire.ActivityReport(kernels=kernels))
    live = broker.registry.observations[broker.lease(ada.handle).id]
    assert live.kernel_active_at <= site.now
    assert len(live.kernels) <= 64
    assert all(len(k) <= 64 for k in live.kernels)
