"""What the broker says of a lease, with what it has to find out for that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.broker.engine.outlook import Outlook
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import MoveResult, Overuse, Refusal, UnleasedProcess
from jupyter_gpushare.wall_clock import seconds_between
from tests.broker.brokers import Broker
from tests.broker.machine import Held, Program
from tests.broker.virtual_time import until

GIB = 1 << 30
LONG = Program(work_s=10_000)


def said(broker: Broker, held: Held) -> str:
    return broker.shown(held.handle).sentence


async def test_an_idle_session_stays_until_a_moment_and_then_as_long_as_no_job_waits(site, broker):
    ada = await site.session("ada", "1/2")
    await asyncio.sleep(20)
    assert "stays with you until" in said(broker, ada)
    (stays,) = broker.shown(ada.handle).sentence_texts
    assert stays.args[1].key == "time"
    (told,) = stays.args[1].args
    left_s = seconds_between(broker.registry.iso_now(), told)
    assert abs(left_s - (site.policy.idle_timeout_s - 20)) <= 60
    await asyncio.sleep(site.policy.idle_timeout_s)
    assert "Nobody is waiting, so your GPU stays with you." in said(broker, ada)


@pytest.mark.site(gpus=3)
async def test_a_session_that_no_job_could_use_is_not_told_that_it_is_lent(site, broker):
    ada = await site.session("ada", "1/2")
    ada.suspendable = True
    await site.running("bo", "2", program=LONG)
    await site.submit("bo", "2")  # two together are not to be had, with ada's half or without
    await until(lambda: "lent as soon as that helps" in said(broker, ada), 200)
    assert broker.state(ada.handle) == "running"
    assert broker.shown(ada.handle).lend_in_s is None


@pytest.mark.site(gpus=1)
async def test_a_kept_session_is_warned_a_third_of_the_idle_timeout_before_it_may_be_lent(site, broker):
    ada = await site.session("ada", "1/2")
    await broker.own_sessions.keep(broker.lease(ada.handle), 30)
    await site.submit("bo", "1")

    def status() -> wire.LeaseStatus:
        return broker.shown(ada.handle)

    await asyncio.sleep(1_500)
    await until(lambda: (status().lend_in_s or 0) <= 240 and status().idle_s is not None, 300)
    assert status().lend_in_s == pytest.approx(240, abs=2)
    assert not status().warned
    await asyncio.sleep(200)
    await until(lambda: (status().lend_in_s or 0) <= 19, 100)
    assert status().warned


async def test_how_long_waking_usually_takes_is_told_once_it_is_known(site, broker):
    ada, _ = await site.lent(program=LONG)
    assert "usually" not in said(broker, ada)
    for _ in range(10):
        await site.gpu_cell(ada)
        await until(lambda: broker.state(ada.handle) == "suspended", 400)
    assert "usually 3 s." in said(broker, ada)


async def test_waking_up_names_the_borrower_and_the_seconds_of_the_copy(site, broker):
    ada, _ = await site.lent(program=LONG)
    site.later(site.gpu_cell(ada))
    seen, badges = set(), set()
    while broker.state(ada.handle) != "running":
        seen.add(said(broker, ada))
        badges.add(broker.shown(ada.handle).badge)
        back = broker.shown(ada.handle).back_in
        assert back is None or (back.low_s, back.high_s) == (5, 12)
        await asyncio.sleep(0.1)
    text = " ".join(sorted(seen))
    assert "back from a training job of project nlp, then copying 18 GiB." in text
    assert "Your cell runs after that. The GPU is back in 5 to 12 s." in text
    assert "Copying 18 GiB back to the GPU." in text
    assert "Waking up" in badges


async def test_an_owner_reads_for_how_long_a_job_that_saves_its_checkpoint_may_still_take(site, broker):
    ada = await site.session("ada", "1/2")
    stubborn = Program(work_s=10_000, heeds_sigterm=False)
    await site.running("bo", "2", program=stubborn, checkpoint="sigterm", grace_s=30)
    site.later(site.gpu_cell(ada))
    await until(lambda: "busy for up to 25 s more" in said(broker, ada), 60)
    assert broker.shown(ada.handle).badge == "Waiting to wake"


async def test_a_session_that_is_offered_another_gpu_reads_when_it_asks_again(site, broker, monkeypatch):
    ada, _ = await site.lent(program=LONG)
    record = broker.lease(ada.handle)
    offered = {record.id: broker.registry.clock() + 200}
    monkeypatch.setattr(Outlook, "misplaced", property(lambda outlook: offered))
    assert said(broker, ada).startswith("Asleep")  # not wanted
    broker.registry.observations[record.id].want(record.state, broker.registry.clock())
    assert said(broker, ada).startswith("The cluster chose another GPU; memory returns to its own.")
    assert broker.shown(ada.handle).badge == "Waiting to wake"


async def test_a_paused_job_names_the_project_and_its_place(site, broker):
    work = await site.running("bo", "2", program=LONG)
    shown = broker.seen(work)
    assert "It may be paused when project vision needs its own." in shown.reason
    await site.submit("ada", "1", program=Program(work_s=500))
    await until(lambda: broker.state(work) == "suspended", 120)
    shown = broker.seen(work)
    assert "because vision took back its guaranteed GPU. Nothing was lost. Number 1." in shown.reason
    assert shown.reason_texts[0].args[1] == messages.text("because.over_quota_of", "vision")
    (found,) = [d for d in broker.told("bo", 10) if d.action == "suspend"]
    assert messages.english(found.sentence_texts) == found.sentence
    assert found.sentence_texts[0].key == "decision.for"


async def test_a_job_that_had_to_stop_says_why_and_how_it_goes_on(site, broker):
    work = await site.running("bo", "2", program=LONG, checkpoint="sigterm")
    await site.submit("ada", "1", program=Program(work_s=500))
    await until(lambda: broker.state(work) == "pending", 120)
    reason = broker.seen(work).reason
    assert "because vision took back its guaranteed GPU. It goes on from its own checkpoint." in reason
    assert "Number 1. Needs 2 GPUs together; 1 is free." in reason


@pytest.mark.parametrize(
    ("checkpoint", "how"),
    [
        ("suspend", "It starts again from the beginning."),
        ("suspend,sigterm", "It goes on from its own checkpoint."),
    ],
)
async def test_a_job_that_cannot_be_suspended_reads_what_its_mode_leaves(site, broker, checkpoint, how):
    work = await site.running("bo", "2", program=LONG, checkpoint=checkpoint)
    site.held[broker.lease(work).handle].suspendable = False
    observed = broker.registry.observations[work.lease_id]
    await until(lambda: observed.sample is not None and not observed.sample.suspendable)
    await site.submit("ada", "1", program=Program(work_s=500))
    await until(lambda: broker.state(work) == "pending", 120)
    assert f"because vision took back its guaranteed GPU. {how}" in broker.seen(work).reason


async def test_a_job_that_waits_reads_with_what_it_would_start_now(site, broker):
    await site.session("ada", "1/2")
    work = await site.submit("bo", "2")
    await asyncio.sleep(2)
    assert broker.seen(work).reason == (
        "Number 1. Needs 2 GPUs together; 1.5 are free. With 1 GPU it would start now."
    )


async def test_a_lost_state_gives_its_reason_and_a_reference_that_is_in_the_log_of_decisions(site, broker):
    ada, _ = await site.lent(program=LONG)
    site.fault("resume", MoveResult(done=False, refused=Refusal.LOST, reason="the driver lost a process"))
    site.later(site.gpu_cell(ada))
    await until(lambda: broker.state(ada.handle) == "running", 60)
    text = said(broker, ada)
    assert "(the driver lost a process)" in text
    assert "restart" in text.lower()
    assert text.endswith(f"Files are safe. Reference {ada.handle}.")
    assert broker.shown(ada.handle).badge == "GPU state lost"
    assert any(ada.handle in d.sentence for d in broker.registry.decisions.latest)


async def test_a_checkpoint_that_failed_is_told_until_the_damaged_process_has_ended(site, broker):
    ada = await site.session("ada", "1/2")
    warning = "its kernel may be damaged: check your results, or restart the kernel"
    assert warning not in said(broker, ada)
    ada.damaged = True
    await until(lambda: warning in said(broker, ada), 60)
    assert said(broker, ada).endswith(f"Reference {ada.handle}.")
    ada.damaged = False
    await until(lambda: warning not in said(broker, ada), 60)


@pytest.mark.site(gpus=1)
async def test_only_the_part_of_a_sleeping_session_that_others_use_counts_as_lent(site, broker):
    ada = await site.session("ada", "1/2")
    await site.running("bo", "0.75", program=LONG)
    assert broker.state(ada.handle) == "suspended"
    uses = {use.name: use.lent_milli for use in broker.views.projects((), everyone=True)}
    assert uses == {"vision": 250, "nlp": 0}


async def test_what_a_process_that_ended_in_its_sleep_had_saved_is_not_there_any_more(site, broker):
    ada, _ = await site.lent(program=LONG)
    await asyncio.sleep(2)
    assert broker.shown(ada.handle).memory_saved_bytes > 0
    ada.saved = {}
    await asyncio.sleep(2)
    assert broker.shown(ada.handle).memory_saved_bytes == 0


def overuse(device: str, limit: int = 0) -> Overuse:
    return Overuse(
        device=device,
        used_bytes=4 * GIB,
        limit_bytes=limit,
        pid=4711,
        name="py\x1bthon",
        process_bytes=3 * GIB,
    )


REMEDY = "End it, or start it from this server with the server's variables, LD_PRELOAD among them."


async def test_what_a_session_holds_beyond_its_grant_is_told_whether_it_works_or_sleeps(site, broker):
    ada, _ = await site.lent(program=LONG)
    (own,) = ada.limits
    other = next(uuid for uuid in site.uuids if uuid != own)
    ada.over = (overuse(own), overuse(other))
    await broker.loop.observer.measure()
    asleep = said(broker, ada)
    assert asleep.startswith("Asleep")
    assert "Its process 4711 (py?thon) uses 3.0 GiB of the GPU that is lent while it sleeps" in asleep
    assert "Its process 4711 (py?thon) uses 3.0 GiB of a GPU that is not its own" in asleep
    assert asleep.count(REMEDY) == 2
    ada.over = ()
    await site.gpu_cell(ada)
    await until(lambda: broker.state(ada.handle) == "running", 60)
    assert REMEDY not in said(broker, ada)
    ada.over = (overuse(own, 2 * GIB),)
    await broker.loop.observer.measure()
    assert "Its process 4711 (py?thon) uses 3.0 GiB of GPU memory past the limit" in said(broker, ada)


async def test_a_user_reads_of_a_process_without_a_lease(site, broker):
    """Of one that holds memory, that is not left alone, and that is surely the user's."""
    ada = await site.session("ada", "1/2")
    mine = UnleasedProcess(process="1-1", pid=4711, uid=ada.uid, name="python", used_bytes=GIB, kept="")
    others = ({"uid": ada.uid + 1}, {"kept": "it is an MPS server"}, {"used_bytes": 0}, {"contained": True})
    site.unleased["GPU-1"] = [mine, *(replace(mine, **other) for other in others)]
    await broker.loop.observer.measure()
    assert said(broker, ada).count("Your process 4711 (python) uses 1.0 GiB of a GPU without a lease.") == 1
    assert said(broker, ada).count(REMEDY) == 1
