"""Waiting for news over HTTP."""

from __future__ import annotations

import asyncio

from tests.waiting import becomes


def last(http) -> str:
    """Return the path of a long poll that has everything so far."""
    return f"status?after={http.broker.registry.notifications.seq}&wait=25"


async def test_a_long_poll_ends_when_something_changes(http):
    seq = (await http.ask("GET", "status")).json()["seq"]
    poll = asyncio.create_task(http.ask("GET", f"status?after={seq}&wait=25"))
    await becomes(lambda: http.service.limits.waiting)
    assert not poll.done()
    job = await http.submit("bo")
    answer = (await asyncio.wait_for(poll, 20)).json()
    assert answer["seq"] > seq
    assert [j["id"] for j in answer["jobs"]] == [job.id]
    assert http.service.limits.waiting == {}


async def test_a_long_poll_that_is_behind_is_answered_at_once(http):
    await http.submit("bo")
    answer = await asyncio.wait_for(http.ask("GET", "status?after=0&wait=25"), 20)
    assert answer.json()["seq"] > 0


async def test_long_polls_are_bounded_per_user(http):
    most = http.site.policy.max_waiters_per_user
    polls = [asyncio.create_task(http.ask("GET", last(http))) for _ in range(most)]
    await becomes(lambda: http.service.limits.waiting.get("bo", 0) >= most)
    answer = await http.refused("GET", last(http))
    assert (answer.status, answer.reason) == (429, "too_many")
    assert (await http.ask("GET", "status")).status_code == 200
    other = asyncio.create_task(http.ask("GET", last(http), "ada"))
    await becomes(lambda: "ada" in http.service.limits.waiting)
    await http.broker.registry.notify()
    await asyncio.wait_for(asyncio.gather(*polls, other), 5)
    assert http.service.limits.waiting == {}


async def test_a_page_that_is_closed_waits_no_longer(http):
    poll = asyncio.create_task(http.ask("GET", last(http)))
    await becomes(lambda: http.service.limits.waiting)
    poll.cancel()
    await becomes(lambda: not http.service.limits.waiting)


async def test_a_number_that_this_broker_never_gave_is_answered_at_once(http):
    seq = http.broker.registry.notifications.seq
    answer = await asyncio.wait_for(http.ask("GET", f"status?after={seq + 1000}&wait=25"), 20)
    assert answer.json()["seq"] == seq


async def test_a_restarted_broker_counts_above_its_predecessor(site, broker):
    for _ in range(50):
        await broker.registry.notify()
    before = broker.registry.notifications.seq
    await broker.end()
    broker = await site.start_broker()
    assert broker.registry.notifications.seq > before
