"""How long the runner tries to tell the broker, on a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.client import RETRY_S
from jupyter_gpushare.errors import BrokerUnavailable
from jupyter_gpushare.job import reports as module
from jupyter_gpushare.job.reports import STOPPED_PATIENCE_S, Reports, activity_every_s
from jupyter_gpushare.protocol.wire import JobReport, JobSpec

# ---- how often a job tells the Hub that it is active -------------------------


@pytest.mark.parametrize(
    ("set_by_the_site", "every_s"),
    [
        ("", 120.0),
        ("30", 30.0),
        ("0", 1.0),
        ("300", 120.0),
        ("often", 120.0),
    ],
)
def test_a_job_reports_as_often_as_servers_are_told_to_and_at_least_every_two_minutes(
    set_by_the_site, every_s
):
    assert activity_every_s({"JUPYTERHUB_ACTIVITY_INTERVAL": set_by_the_site}) == every_s


# ---- test reports ------------------------------------------------------------

ENDED = JobReport(state="ended", exit_code=0)


class Story:
    """A broker that answers when it is told to, and pauses that take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked_at: list[float] = []
        self.is_up: Callable[[], bool] = lambda: False
        self.on_pause: Callable[[], None] = lambda: None
        self.stop = asyncio.Event()
        spec = JobSpec(id="j1", attempt=1, name="n", command=["x"], cwd=None, env={}, grace_s=1.0)
        client: Any = SimpleNamespace(post=self._post)
        self.reports = Reports(client, spec, self.stop)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(self.reports, "_pause", self._pause)

    async def _post(self, *_: object, **__: object) -> None:
        self.asked_at.append(self.now)
        if not self.is_up():
            raise BrokerUnavailable("away")

    async def _pause(self, pause_s: float, _: bool) -> None:
        self.now += pause_s
        self.on_pause()


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    return Story(monkeypatch)


async def test_a_result_is_delivered_to_a_broker_that_was_away_for_hours(story: Story) -> None:
    began_at = story.now
    story.is_up = lambda: story.now >= began_at + 12 * 3600
    assert await story.reports.ended(ENDED)
    # The client itself tries for `RETRY_S` before it gives a request up.
    assert story.now - began_at + RETRY_S < 12 * 3600 + 10, "delivered within 10 s"
    assert len(story.asked_at) < 12 * 3600 / 3


async def test_a_broker_that_never_comes_back_is_given_up_after_a_day(story: Story) -> None:
    began_at = story.now
    assert not await story.reports.ended(ENDED)
    assert 86000 < story.now - began_at <= 86400


async def test_a_stop_cuts_the_wait_and_the_broker_is_asked_once_more(story: Story) -> None:
    def after_an_hour() -> None:
        if story.now > 4600 and not story.stop.is_set():
            story.stop.set()
            stopped_at.append(story.now)

    stopped_at: list[float] = []
    story.on_pause = after_an_hour
    assert not await story.reports.ended(ENDED)
    assert story.now - stopped_at[0] <= STOPPED_PATIENCE_S
    assert story.asked_at[-1] >= stopped_at[0]


async def test_a_pause_ends_when_the_runner_is_told_to_stop(story: Story) -> None:
    pause = asyncio.create_task(Reports._pause(story.reports, 3600.0, False))
    await asyncio.sleep(0)
    story.stop.set()
    async with asyncio.timeout(30):
        await pause
