"""Looking back: the life of a job with its reasons, and what a user used and lent in a week."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.usage import lent_milli
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.core.size import Size
from tests.broker.brokers import sent
from tests.broker.machine import Program
from tests.broker.virtual_time import until


async def test_the_story_can_be_told_afterwards_also_by_another_broker(site, broker):
    ada, job = await site.lent(program=Program(work_s=100))
    asleep_at = site.now
    await site.gpu_cell(ada)
    lent_s = site.now - asleep_at
    await until(lambda: broker.job(job).result, 400)

    told = sent(await history.timeline(broker.registry, broker.job(job), "bo"))
    whats = [moment.what for moment in told.moments]
    assert whats == ["submitted", "grant", "started", "suspend", "resume", "ended"]
    assert told.moments[1].sentence == ("Your job train.py (2 GPUs) starts: others were put to sleep for it.")
    assert told.moments[3].sentence == (
        "Your job train.py (2 GPUs) is paused for a session of project vision: "
        "the session that lent the GPU needs it."
    )
    others = sent(await history.timeline(broker.registry, broker.job(job), "root"))
    assert others.moments[3].sentence.startswith("bo's job train.py (2 GPUs) is paused for ")
    assert [m.at for m in told.moments] == sorted(m.at for m in told.moments)
    assert all(messages.english(m.sentence_texts) == m.sentence for m in told.moments)
    assert [m.sentence_texts[0].key for m in told.moments] == [
        *("job.submitted", "decision", "job.started", "decision.for", "decision", "job.done")
    ]

    bo = await history.week(broker.registry, "bo")
    assert bo.used_gpu_s == pytest.approx(2 * broker.job(job).ran_s, abs=0.2)
    assert (bo.lent_gpu_s, bo.helped_jobs) == (0, 0)
    mine = await history.week(broker.registry, "ada")
    assert mine.helped_jobs == 1
    assert 0.5 * lent_s <= mine.lent_gpu_s <= 0.5 * (site.now - asleep_at) + 5
    assert mine.used_gpu_s > 0.5 * 60

    await broker.end()
    again = await site.start_broker()
    after = await history.week(again.registry, "bo")
    assert (after.used_gpu_s, after.days) == (bo.used_gpu_s, bo.days)
    assert sent(await history.timeline(again.registry, again.registry.jobs[job.id], "bo")) == told


def bound(id: str, milli: int, state: State, kind: Kind = Kind.BUILD) -> Lease:
    return Lease(
        id=id, project="p", kind=kind, size=Size(milli), state=state, devices=("gpu",), held_milli=milli
    )


@pytest.mark.parametrize(
    ("held", "lent"),
    [
        (0, {}),  # no lease is there
        (250, {}),  # ... or uses what no suspended session claims
        (750, {"a": 333, "b": 167}),
        (1000, {"a": 500, "b": 250}),
    ],
)
def test_lent_is_what_others_hold_of_the_capacity_of_suspended_sessions(held, lent):
    asleep = [bound("a", 500, State.SUSPENDED), bound("b", 250, State.SUSPENDED)]
    others = [
        bound("job", held, State.RUNNING, Kind.TRAIN),
        bound("paused", 1000, State.SUSPENDED, Kind.TRAIN),  # holds no capacity, and lends none
    ]
    assert {k: round(v) for k, v in lent_milli([*asleep, *others]).items()} == lent


async def test_a_suspended_session_lends_nothing_while_its_capacity_is_unused(site, broker):
    _, job = await site.lent(program=Program(work_s=1000))
    await asyncio.sleep(400)
    # What is not counted yet is told too; what is stored survives the broker.
    so_far = (await history.week(broker.registry, "ada")).lent_gpu_s
    assert so_far == pytest.approx(0.5 * 400, rel=0.1)
    await broker.end()
    broker = await site.start_broker()
    await until(lambda: broker.job(job).result, 1_500)
    lent = (await history.week(broker.registry, "ada")).lent_gpu_s
    ran_s = broker.job(job).ran_s
    assert 0.5 * (ran_s - 310) <= lent <= 0.5 * (ran_s + 15)
    await asyncio.sleep(2_000)
    assert (await history.week(broker.registry, "ada")).lent_gpu_s == lent


async def test_use_older_than_a_week_is_not_counted(site, broker):
    job = await site.submit("bo", "1", program=Program(work_s=10))
    await until(lambda: broker.job(job).result, 100)
    assert (await history.week(broker.registry, "bo")).used_gpu_s > 9
    key, use = next(iter(broker.registry.usage.sums.items()))
    broker.registry.usage.sums = {
        ("2020-01-01", *key[1:]): use.__class__(
            day="2020-01-01", user="bo", project="nlp", used_gpu_s=use.used_gpu_s
        )
    }
    assert (await history.week(broker.registry, "bo")).used_gpu_s == 0


async def test_host_memory_of_sleepers_is_charged_to_their_project(site, broker):
    ada = await site.session("ada", "1/2")
    saved_bytes = sum(ada.used.values())
    await site.submit("bo", "2", program=Program(work_s=1000))
    await until(lambda: broker.state(ada.handle) == "suspended", 120)
    asleep_at = site.now
    by_name = {p.name: p for p in broker.views.projects((), everyone=True)}
    assert {name: p.saved_bytes for name, p in by_name.items()} == {"vision": saved_bytes, "nlp": 0}
    await asyncio.sleep(100)
    week = await history.week(broker.registry, "ada")
    expected = saved_bytes / 2**30 * (site.now - asleep_at)
    assert week.saved_gib_s == pytest.approx(expected, rel=0.1)
    await site.gpu_cell(ada)
    after = await history.week(broker.registry, "ada")
    assert after.saved_gib_s >= week.saved_gib_s
    (today,) = after.days
    assert (today.project, today.saved_gib_s) == ("vision", after.saved_gib_s)
    # Awake it takes none.
    await asyncio.sleep(20)
    assert (await history.week(broker.registry, "ada")).saved_gib_s == after.saved_gib_s
