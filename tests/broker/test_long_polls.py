"""Waiting for news over HTTP."""

from __future__ import annotations

import asyncio


async def test_a_long_poll_ends_when_something_changes(http):
    seq = (await http.ask("GET", "status")).json()["seq"]
    poll = asyncio.create_task(http.ask("GET", f"status?after={seq}&wait=25"))
    while not http.service.waiting:
        await asyncio.sleep(0.01)
    assert not poll.done()
    job = await http.submit("bo")
    answer = (await asyncio.wait_for(poll, 5)).json()
    assert answer["seq"] > seq
    assert [j["id"] for j in answer["jobs"]] == [job.id]
    assert http.service.waiting == {}


async def test_a_long_poll_that_is_behind_is_answered_at_once(http):
    await http.submit("bo")
    answer = await asyncio.wait_for(http.ask("GET", "status?after=0&wait=25"), 5)
    assert answer.json()["seq"] > 0


async def test_long_polls_are_bounded_per_user(http):
    most = http.site.policy.max_waiters_per_user
    polls = [asyncio.create_task(http.ask("GET", "status?after=99999&wait=25")) for _ in range(most)]
    while http.service.waiting.get("bo", 0) < most:
        await asyncio.sleep(0.01)
    answer = await http.refused("GET", "status?after=99999&wait=25")
    assert (answer.status, answer.reason) == (429, "too_many")
    assert (await http.ask("GET", "status")).status_code == 200
    other = asyncio.create_task(http.ask("GET", "status?after=99999&wait=25", "ada"))
    while "ada" not in http.service.waiting:
        await asyncio.sleep(0.01)
    http.broker.book.seq = 100_000
    await http.broker.book.bump()
    await asyncio.wait_for(asyncio.gather(*polls, other), 5)
    assert http.service.waiting == {}


async def test_a_page_that_is_closed_waits_no_longer(http):
    poll = asyncio.create_task(http.ask("GET", "status?after=99999&wait=25"))
    while not http.service.waiting:
        await asyncio.sleep(0.01)
    poll.cancel()
    async with asyncio.timeout(5):
        while http.service.waiting:
            await asyncio.sleep(0.01)
