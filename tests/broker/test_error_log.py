"""An error that repeats is logged once, and when it is over; a look at the Hub comes at events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pytest

from jupyter_gpushare.backends.base import HubError, HubServer, ServerKey
from jupyter_gpushare.error_log import ErrorLog
from jupyter_gpushare.protocol.helper import EventKind
from tests.broker.virtual_time import until


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if word in each.getMessage()]


def test_what_fails_is_logged_when_it_begins_changes_and_is_over(caplog):
    caplog.set_level(logging.INFO)
    errors = ErrorLog(logging.getLogger("gpushare.broker"))
    for text in ("no answer", "no answer", "refused", "refused"):
        errors.failed("measuring", HubError(text))
    errors.works("measuring")
    errors.works("measuring")
    errors.failed("measuring", HubError("refused"))
    assert lines(caplog, "measuring") == [
        "measuring: no answer",
        "measuring: refused",
        "measuring: works again",
        "measuring: refused",
    ]


def test_what_never_works_again_is_forgotten_some_time():
    errors = ErrorLog(logging.getLogger("gpushare.broker"))
    for number in range(2000):
        errors.failed(f"lease={number}", HubError("x"))
    assert len(errors._failing) == 1000


async def test_an_hour_without_a_helper_or_a_hub_is_two_lines_for_each_part_of_the_loop(site, caplog):
    caplog.set_level(logging.INFO)
    broker = await site.start_broker()
    looks = []

    async def refuse() -> Mapping[ServerKey, HubServer]:
        looks.append(site.now)
        raise HubError("the Hub did not list its servers: Missing or invalid credentials.")

    ask, broker.hub.servers = broker.hub.servers, refuse
    site.helper_silent = True
    site.emit(EventKind.ENDED, "x")  # the helper's events end with its connection
    broker.loop.effects.ended_servers[ServerKey("bo", "j0123456789-1")] = None
    await asyncio.sleep(3600)
    site.helper_silent, broker.hub.servers = False, ask
    await asyncio.sleep(60)
    for part in ("measuring", "watching", "removing_servers", "reconciling_servers"):
        failed, works = lines(caplog, f"{part}: ")
        assert failed.startswith(
            f"{part}: the {'Hub' if part == 'reconciling_servers' else 'device helper'} did not"
        )
        assert works == f"{part}: works again"
    assert len(looks) <= 3600 / 15 + 2


async def test_a_fault_of_the_broker_itself_is_logged_once_with_its_traceback(site, caplog):
    caplog.set_level(logging.INFO)
    broker = await site.start_broker()
    decide, broker.loop.engine.decide = broker.loop.engine.decide, None
    await asyncio.sleep(600)
    broker.loop.engine.decide = decide
    await asyncio.sleep(60)
    failed, works = (each for each in caplog.records if each.getMessage().startswith("deciding"))
    assert failed.levelno == logging.ERROR
    assert failed.exc_info is not None
    assert works.getMessage() == "deciding: works again"


async def test_a_stop_that_the_hub_refuses_is_asked_for_less_and_less_often(site, broker):
    asked = []

    async def refuse(key: ServerKey, *, forget: bool = True) -> None:
        asked.append(site.now)
        raise HubError(f"{key.server} is pending spawn")

    broker.hub.stop_server = refuse
    broker.loop.effects.ended_servers[ServerKey("bo", "j0123456789-1")] = None
    await asyncio.sleep(3600)
    assert 4 <= len(asked) <= 3600 / 15 + 5


async def test_a_session_whose_processes_are_gone_makes_the_broker_look_at_the_hub(site, broker):
    ada = await site.session("ada")
    await until(lambda: broker.state(ada.handle) == "running")
    await asyncio.sleep(5)
    looks = []
    ask = broker.hub.servers

    async def look() -> Mapping[ServerKey, HubServer]:
        looks.append(site.now)
        return await ask()

    broker.hub.servers = look
    await until(lambda: looks)
    del looks[:]
    gone_at = site.now
    ada.alive, ada.used = False, {}
    site.servers.pop(ServerKey("ada", ""))  # and the spawner could not say so
    await until(lambda: not broker.registry.leases)
    assert looks
    assert site.now - gone_at < 10
