"""The lending mode: in force at once, stored, logged; sessions that are never put to sleep."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.records import LendingMode
from jupyter_gpushare.errors import Conflict, NotAllowed
from jupyter_gpushare.protocol.helper import MoveResult, Refusal
from tests.broker.http_site import PREFIX
from tests.broker.machine import Program
from tests.broker.virtual_time import until

IN_FORCE_S = 2.0
LONG = Program(work_s=3_000)


def policy(**more) -> Policy:
    projects = tuple(
        ProjectConfig(name=name, quota_percent=50.0, groups=(name,), never_sleep=name == "vision")
        for name in ("vision", "nlp")
    )
    return Policy(projects=projects, idle_timeout_s=60.0, grace_s=5.0, **more)


pytestmark = pytest.mark.site(policy=policy())


def sentences(broker) -> list[str]:
    return [d.sentence for d in broker.registry.decisions.latest]


async def test_off_wakes_every_session_and_puts_none_to_sleep(site, broker):
    ada, job = await site.lent(program=LONG)
    await broker.loop.lending.set(LendingMode.OFF, "root")
    moving = ("resuming", "running")
    await until(lambda: broker.state(job) != "running" or broker.state(ada.handle) in moving, IN_FORCE_S)
    await until(lambda: broker.state(ada.handle) == "running", 60)
    await asyncio.sleep(600)
    assert broker.state(ada.handle) == "running", "idle for 10 min, a job waits, and it keeps its GPU"
    assert broker.state(job) != "running"
    assert "switched off" in broker.shown(ada.handle).sentence
    with pytest.raises(Conflict, match="switched off"):
        await broker.own_sessions.lend(broker.lease(ada.handle))
    await broker.loop.lending.set(LendingMode.ON, "root")
    await until(lambda: broker.shown(ada.handle).warned, IN_FORCE_S)
    await until(lambda: broker.state(ada.handle) != "running", 60)


@pytest.mark.site(policy=policy(lending=LendingMode.WATCH))
async def test_watch_says_what_would_be_lent_to_which_job_and_for_how_long_and_moves_nothing(site, broker):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2", name="train", program=Program(work_s=100))
    await asyncio.sleep(600)
    assert broker.state(ada.handle) == "running"
    assert not [effect for effect in site.effects if effect.startswith("suspend")]
    said = sentences(broker)
    assert [s for s in said if s.startswith("ada's session (1/2 GPU) would be put to sleep")] == [
        "ada's session (1/2 GPU) would be put to sleep for a training job of project "
        "nlp: it was idle and others wait."
    ]
    await site.gpu_cell(ada)
    await until(lambda: "would have been asleep" in sentences(broker)[-1], 30)
    # It would have fallen asleep after 60 s of 600; plans that are only logged are made every 5 s.
    assert sentences(broker)[-1] == (
        "ada's session (1/2 GPU) would have been asleep for 9 min, until it was used."
    )


async def test_watch_is_in_force_at_once_for_a_session_that_is_about_to_be_lent(site, broker):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2", program=Program(work_s=100))
    await until(lambda: broker.shown(ada.handle).warned, 60)
    await broker.loop.lending.set(LendingMode.WATCH, "root")
    await until(lambda: not broker.shown(ada.handle).warned, IN_FORCE_S)
    await asyncio.sleep(600)
    assert broker.state(ada.handle) == "running"
    assert not [effect for effect in site.effects if effect.startswith("suspend")]


async def test_a_mode_that_an_administrator_set_survives_a_restart_and_is_logged(site, broker):
    await broker.loop.lending.set(LendingMode.WATCH, "root")
    assert sentences(broker)[-1] == "root set lending to watch, was on."
    await broker.end()
    broker = await site.start_broker()
    lending = broker.views.lending()
    assert (lending.mode, lending.configured, lending.set_by) == ("watch", "on", "root")
    await broker.loop.lending.set(None, "root")
    lending = broker.views.lending()
    assert (lending.mode, lending.set_by) == ("on", "")


async def test_suspensions_and_their_failures_are_counted_over_restarts(site, broker):
    refusals = [
        MoveResult(done=False, refused=Refusal.NOT_SUSPENDABLE, reason="the driver failed at it: 999"),
        MoveResult(done=False, refused=Refusal.WANTED, reason="a process entered a call"),
    ]
    for refusal in refusals:
        site.fault("suspend", refusal)
    await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=LONG)
    await until(lambda: broker.state(job) == "running", 400)
    await broker.end()
    broker = await site.start_broker()
    lending = broker.views.lending()
    # An owner that is back in time is no failure.
    assert (lending.tried, lending.failed, lending.lost) == (2, 1, 0)
    assert lending.last_reason == "the driver failed at it: 999"


async def test_memory_that_could_not_be_restored_is_counted(site, broker):
    ada, _ = await site.lent(program=LONG)
    site.fault("resume", MoveResult(done=False, refused=Refusal.LOST, reason="out of memory"))
    site.later(site.gpu_cell(ada))
    await until(lambda: broker.views.lending().lost == 1, 60)
    assert broker.views.lending().last_reason == "out of memory"


async def test_a_session_marked_never_to_sleep_wakes_and_keeps_its_gpu_until_it_is_unmarked(site, broker):
    ada, _ = await site.lent(program=LONG)
    await broker.own_sessions.allow_sleep(broker.lease(ada.handle), False)
    await until(lambda: broker.state(ada.handle) == "running", 60)
    await broker.end()
    broker = await site.start_broker()
    await asyncio.sleep(600)
    assert broker.state(ada.handle) == "running"
    assert "marked never to be put to sleep" in broker.shown(ada.handle).sentence
    await broker.own_sessions.allow_sleep(broker.lease(ada.handle), True)
    await until(lambda: broker.state(ada.handle) == "suspended", 60)


async def test_only_a_project_with_the_right_keeps_sessions_from_sleep(site, broker):
    bo = await site.session("bo", "1/2")
    job = await site.submit("bo", "1")
    with pytest.raises(NotAllowed, match="project nlp may not"):
        await broker.own_sessions.allow_sleep(broker.lease(bo.handle), False)
    with pytest.raises(Conflict, match="only sessions"):
        await broker.own_sessions.allow_sleep(broker.lease(job), False)
    # A right that the site takes away ends the marks that were made with it.
    ada = await site.session("ada", "1/2")
    await broker.own_sessions.allow_sleep(broker.lease(ada.handle), False)
    await broker.end()
    projects = tuple(replace(project, never_sleep=False) for project in site.policy.projects)
    site.policy = replace(site.policy, projects=projects)
    broker = await site.start_broker()
    await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "suspended", 200)


async def test_the_page_says_how_often_sleep_was_tried_and_failed_and_the_last_reason(http):
    registry = http.broker.registry
    counts = registry.suspensions
    for failure in ("", "", "the driver failed at it: 999"):
        counts = counts.after_try(failure, registry.iso_now())
    registry.suspensions = counts.after_loss("out of memory", registry.iso_now())
    page = " ".join((await http.ask("GET", f"{http.url}{PREFIX}", "root")).text.split())
    assert (
        "Sessions and jobs were put to sleep 2 times on this machine; 1 more attempt failed, "
        "and 1 could not be woken." in page
    )
    assert ": out of memory</span>" in page


async def test_the_page_changes_the_mode_for_administrators_only(http):
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    assert 'name="lending" value="off"' in page
    saved = await http.ask("POST", f"{http.url}{PREFIX}", "root", data={"lending": "off"})
    assert saved.status_code == 303
    assert "Nothing is lent" in (await http.ask("GET", f"{http.url}{PREFIX}", "ada")).text
    assert (await http.ask("GET", "lending", "ada")).json()["set_by"] == "root"
    refused = await http.ask("POST", f"{http.url}{PREFIX}", "ada", data={"lending": "on"})
    assert refused.status_code == 403
    wrong = await http.ask("POST", f"{http.url}{PREFIX}", "root", data={"lending": "<b>"})
    assert (wrong.status_code, http.broker.views.lending().mode) == (400, "off")
