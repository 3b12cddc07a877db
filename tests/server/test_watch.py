from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import BrokerUnavailable, TooMany
from jupyter_gpushare.protocol.wire import Status
from jupyter_gpushare.server import watch as module
from jupyter_gpushare.server.watch import BROKER_EVENT, JOB_EVENT, LEASE_EVENT, Watch, changes


@pytest.fixture
def said(golden):
    def read(name: str) -> Status:
        return msgspec.convert(golden(name), Status)

    return read


def test_first_answer_is_no_change(said):
    assert changes(None, said("status_active"), "") == []


def test_numbers_alone_are_no_change(said):
    before = said("status_active")
    lease = msgspec.structs.replace(before.leases[0], memory_used_bytes=1, badge="Idle 7 min", idle_s=420.0)
    now = msgspec.structs.replace(before, seq=43, leases=[lease])
    assert changes(before, now, "") == []


def test_warning_is_a_change(said):
    ((schema, data),) = changes(said("status_active"), said("status_warned"), "")
    assert schema == LEASE_EVENT
    assert (data["state"], data["warned"], data["lend_in_s"]) == ("running", True, 300.0)


def test_warning_is_the_brokers_and_not_computed_from_its_numbers(said):
    before = said("status_active")
    lease = msgspec.structs.replace(before.leases[0], idle_s=600.0, lend_in_s=10.0, warned=False)
    assert changes(before, msgspec.structs.replace(before, seq=43, leases=[lease]), "") == []


def test_leases_of_other_servers_are_not_this_ones_news(said):
    before, now = said("status_active"), said("status_asleep")
    assert changes(before, now, "other") == []


def test_lease_that_ended_is_released(said):
    before = said("status_active")
    ((schema, data),) = changes(before, msgspec.structs.replace(before, leases=[]), "")
    assert (schema, data["state"], data["previous"]) == (LEASE_EVENT, State.RELEASED, "running")


def test_new_job_and_new_attempt_are_changes(said):
    before = said("status_active")
    again = msgspec.structs.replace(before.jobs[0], attempt=2)
    now = msgspec.structs.replace(before, jobs=[again, *before.jobs[1:]])
    ((schema, data),) = changes(before, now, "")
    assert (schema, data["job"], data["attempt"], data["previous"]) == (JOB_EVENT, again.id, 2, "running")
    ((_, data),) = changes(msgspec.structs.replace(before, jobs=before.jobs[1:]), before, "")
    assert (data["job"], data["previous"]) == (again.id, "")


class Told:
    """A broker that gives the user's server no long poll, or nothing at all."""

    def __init__(self, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: Status = said("status_active")
        self.polls, self.refuses = 0, False
        self.asked: list[bool] = []
        self.pauses: list[float] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.enough = asyncio.Event()
        monkeypatch.setattr(module, "_pause", self._pause)
        client: Any = SimpleNamespace(get=self._get)
        self.watch = Watch(client, "", lambda *event: self.events.append(event), logging.getLogger("told"))

    async def _pause(self, about_s: float) -> None:
        self.pauses.append(about_s)
        if len(self.pauses) >= 6:
            self.enough.set()
        await asyncio.sleep(0)

    async def _get(self, *_: object, params: Any = None, **__: object) -> Status:
        self.asked.append(params is not None)
        if self.refuses or (params is not None and not self.polls):
            raise TooMany("8 requests of yours already wait", retry_after_s=1.0)
        if params is not None:
            self.enough.set()
            await asyncio.Event().wait()
        self.status = msgspec.structs.replace(self.status, seq=self.status.seq + 1)
        return self.status

    async def run(self) -> None:
        running = asyncio.create_task(self.watch.run())
        async with asyncio.timeout(30):
            await self.enough.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def told(said, monkeypatch):
    monkeypatch.setattr(module, "GATHER_S", 0.0)
    return Told(said, monkeypatch)


async def test_a_server_without_a_long_poll_asks_now_and_then_and_says_nothing(told, caplog):
    caplog.set_level(logging.DEBUG, "told")
    await told.run()
    assert told.pauses == [module.NO_POLL_S] * 6
    assert told.asked == [False, True] * 6
    assert (told.watch.unreachable_since, told.events, caplog.records) == (None, [], [])
    told.polls, told.enough = 1, asyncio.Event()
    await told.run()
    assert told.asked[-2:] == [False, True]
    assert len(told.pauses) == 6


async def test_a_broker_that_refuses_even_a_plain_question_is_unreachable(told):
    told.refuses = True
    await told.run()
    assert told.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert [schema for schema, _ in told.events] == [BROKER_EVENT]


async def test_an_answer_that_arrives_while_the_server_does_not_run_is_an_answer(said, monkeypatch):
    monkeypatch.setattr(module, "PAGE_S", 0.01)

    async def get(*_: object, **__: object) -> Status:
        time.sleep(0.05)
        return said("status_active")

    told: list[object] = []
    client: Any = SimpleNamespace(get=get, url="http://broker")
    watch = Watch(client, "", lambda *event: told.append(event), logging.getLogger("slow"))
    assert (await watch.fresh()).seq == said("status_active").seq
    assert (watch.unreachable_since, told) == (None, [])


async def test_a_page_reads_that_a_silent_broker_does_not_answer_and_its_late_answer_ends_that(
    said, monkeypatch
):
    assert module.PAGE_S <= 3, "a page says so within 4 s of its poll"
    monkeypatch.setattr(module, "PAGE_S", 0.01)
    goes_on, told, asked = asyncio.Event(), asyncio.Queue(), []

    async def get(*_: object, **__: object) -> Status:
        asked.append(1)
        await goes_on.wait()
        return said("status_active")

    client: Any = SimpleNamespace(get=get, url="http://broker")
    watch = Watch(client, "", lambda *event: told.put_nowait(event), logging.getLogger("silent"))
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="does not answer") as silent:
            await watch.fresh()
    assert str(silent.value) == "the GPU broker at http://broker does not answer (nothing for 0.01 s)"
    assert told.get_nowait() == (BROKER_EVENT, {"unreachable_since": watch.unreachable_since})
    assert watch.unreachable_since
    monkeypatch.setattr(module, "PAGE_S", 120)
    goes_on.set()
    async with asyncio.timeout(120):
        assert await told.get() == (BROKER_EVENT, {"unreachable_since": None})
    assert watch.unreachable_since is None
    assert asked == [1], "the second poll waited for the first one's request"
    assert (await watch.fresh()).seq == said("status_active").seq


async def test_an_answer_asked_before_an_outage_replaces_no_newer_one(said, monkeypatch):
    status = said("status_active")
    older, answer = msgspec.structs.replace(status, seq=status.seq - 1), asyncio.Event()
    watch = Watch(SimpleNamespace(url="http://broker"), "", lambda *_: None, logging.getLogger("told"))

    async def late(*_: object, **__: object) -> Status:
        await answer.wait()
        return older

    async def refused(*_: object, **__: object) -> Status:
        raise BrokerUnavailable("it restarts")

    async def now(*_: object, **__: object) -> Status:
        return status

    watch._client.get = now
    await watch.fresh()
    watch._client.get = late
    asked = asyncio.create_task(watch._ask(status.seq))
    await asyncio.sleep(0)
    watch._client.get = refused
    with pytest.raises(BrokerUnavailable):
        await watch._fetch()
    answer.set()
    assert await asked == watch.status == status
    answers = late
    watch._client.get = answers  # of a broker with another database, asked after the outage
    assert await watch.fresh() == watch.status == older
