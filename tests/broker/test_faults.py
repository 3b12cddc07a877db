"""Answers follow their commits, a broker with a successor does nothing more, bounds say when to come back."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import replace

import pytest

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker import respawn
from jupyter_gpushare.broker.control.administration import drain, undrain
from jupyter_gpushare.broker.control.queue_edits import change as changed
from jupyter_gpushare.broker.control.queue_edits import place
from jupyter_gpushare.errors import Conflict, HelperError, NotAllowed, StoreError, Superseded
from jupyter_gpushare.protocol import wire
from tests.broker.disks import SlowDisk
from tests.broker.machine import Program
from tests.broker.site import spawn
from tests.broker.virtual_time import until
from tests.waiting import until as in_real_time


async def test_every_change_is_answered_after_its_commit_and_so_is_its_repetition(site, monkeypatch):
    nlp, *others = site.policy.projects[::-1]
    site.policy = replace(site.policy, projects=(*others, replace(nlp, never_sleep=True)))
    broker = await site.start_broker()
    requests, project = broker.requests, nlp.name
    bo = await site.session("bo", "1/4", project=project)
    running = await site.submit("bo", "1", program=Program(work_s=1000))
    waiting = await site.submit("bo", "2")
    behind = await site.submit("bo", "2")
    ended = await site.submit("bo", "1/4", program=Program(work_s=1))
    await until(lambda: broker.state(bo.handle) == broker.state(running) == "running", 60)
    await until(lambda: broker.job(ended).result, 60)
    site.spawn_s = 300.0
    starting = await site.submit("bo", "1/4", program=Program(work_s=1000))
    await until(lambda: broker.state(starting) == "granted", 60)
    session = broker.lease(bo.handle)
    begin = wire.JobReport(state="started")
    end = wire.JobReport(state="ended", exit_code=0)
    # The last ones end what the others are about.
    changes = {
        "start of a session": lambda: broker.start(spawn("ada", "1/8")),
        "submit": lambda: requests.submit("bo", (project,), wire.JobRequest(command=["a"]), "key"),
        "retry": lambda: requests.retry(broker.job(ended), (project,)),
        "keep": lambda: broker.own_sessions.keep(session, 5),
        "lend": lambda: broker.own_sessions.lend(session),
        "mark": lambda: broker.own_sessions.allow_sleep(session, False),
        "project": lambda: broker.project_numbers.change(project, wire.ProjectChange(weight=2), "root"),
        "lending": lambda: broker.loop.lending.set("watch", "root"),
        "reset of a project": lambda: broker.project_numbers.reset(project, "root"),
        "drain": lambda: drain(broker.registry, broker.engine, "GPU-1", None, "root"),
        "end of a drain": lambda: undrain(broker.registry, "GPU-1", "root"),
        "place": lambda: place(broker.registry, broker.job(behind), wire.JobPlace(before=waiting.id)),
        "change": lambda: changed(
            broker.request_policy, broker.job(waiting), (project,), wire.JobChange(priority=-1)
        ),
        "cancel of a waiting job": lambda: requests.cancel(broker.job(waiting)),
        "begin of a job": lambda: broker.job_reports.report("bo", starting.id, 1, begin),
        "end of a job": lambda: broker.job_reports.report("bo", running.id, 1, end),
        "cancel": lambda: requests.cancel(broker.job(running)),
        "end of a session": lambda: broker.stop(wire.SpawnStop(user="bo", server="")),
    }
    for name, change in changes.items():
        with monkeypatch.context() as patch:
            disk = SlowDisk(broker, patch)
            first = site.later(change())
            await asyncio.sleep(0.5)
            again = site.later(change())
            await asyncio.sleep(0.5)
            assert not [each for each in (first, again) if each.done()], name
            disk.release()
            for each in (first, again):
                with contextlib.suppress(Conflict, NotAllowed):
                    await each
            assert not first.exception(), name


async def test_a_broker_that_the_helper_refuses_ends_with_the_reason_and_stores_nothing_more(site, broker):
    await site.session("ada", "1/2")
    site.epoch = 9  # a newer broker has acted on this machine
    await until(lambda: broker.registry.journal.failed.done(), 5)
    with pytest.raises(StoreError, match="newer broker"):
        await site.broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), None)
    site.wrong.clear()  # what it tried was refused


async def test_a_broker_with_a_successor_changes_nothing_at_the_hub(site):
    broker = await site.start_broker(running=False)
    key = ServerKey("bo", "jabcdefghij-1")
    site.servers[key] = "ready"
    site.epoch = 9
    for change in (broker.loop.hub.stop_server(key), broker.loop.hub.start_server(key, "train", "")):
        with pytest.raises(HelperError, match="newer broker"):
            await change
    assert site.servers == {key: "ready"}
    assert not [effect for effect in site.effects if "server" in effect]
    assert not site.wrong, "the Hub was not asked"


async def test_a_broker_that_ends_answers_503_with_the_reason(http):
    http.broker.registry.journal.fail(Superseded("this broker ends: a newer broker is at work (epoch 9)"))
    refused = await http.refused("POST", "jobs", json={"command": ["true"]})
    assert (refused.status, refused.reason) == (503, "unavailable")
    assert "newer broker" in refused.message
    assert http.broker.registry.journal.failed.exception()


def test_a_superseded_broker_is_not_started_again(tmp_path):
    marks = tmp_path / "starts"
    script = f"import pathlib, sys; p = pathlib.Path({str(marks)!r}); p.open('a').write('x'); sys.exit(3)"
    child = respawn._Child([sys.executable, "-c", script, "broker"], own_session=False)

    def superseded() -> bool:
        child.keep_running()
        return child.is_superseded

    in_real_time(superseded, "it ends")
    time.sleep(respawn._PAUSE_S + 0.1)
    child.keep_running()
    assert marks.read_text() == "x"
