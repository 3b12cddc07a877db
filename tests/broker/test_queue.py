"""The order of jobs, quotas and ends of jobs, as the loop carries them out."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from jupyter_gpushare.backends.base import HubError
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine.local import KEEP_S, LocalEngine
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.records import Lags, UserLags
from jupyter_gpushare.broker.state.transitions import Granted, StartFailed
from jupyter_gpushare.broker.state.usage import FairnessTracker
from jupyter_gpushare.core.model import Order, State
from jupyter_gpushare.core.planning.planner import IncrementalPlanner, plan
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Phase
from tests.broker.machine import Program
from tests.broker.virtual_time import until
from tests.core.build import NOW, build, cluster, device, stops, train


@pytest.mark.site(gpus=4)
async def test_no_session_sleeps_for_a_job_beyond_the_limit_of_its_project(site):
    projects = (
        ProjectConfig(name="nlp", quota_percent=50.0, limit_milli=4000, groups=("nlp",)),
        ProjectConfig(name="vision", quota_percent=50.0, groups=("vision",)),
    )
    site.policy = replace(site.policy, projects=projects)
    broker = await site.start_broker()
    sessions = [await site.session("bo", "1/4"), await site.session("ada", "1/2")]
    await asyncio.sleep(site.policy.idle_timeout_s * 3)
    job = await site.submit("bo", "4", program=Program(work_s=5))
    await asyncio.sleep(600)
    seen = broker.seen(job)
    assert "Its project is at its limit" in seen.reason
    assert {held.phase for held in sessions} == {Phase.RUNNING}
    await site.end_session("bo")
    await until(lambda: broker.job(job).result, 200)


async def test_the_planner_knows_for_which_job_a_lease_made_way_until_it_has_a_gpu_again(site, broker):

    def made_way() -> dict[str, str]:
        cluster = snapshot.cluster(broker.registry, broker.engine, site.now)
        return {x.user: x.made_way_for for x in cluster.leases}

    ada = await site.session("ada", "1")
    await asyncio.sleep(site.policy.idle_timeout_s * 2)
    job = await site.submit("bo", "2", program=Program(work_s=30))
    lease = broker.lease(job).id
    await until(lambda: broker.job(job).started_at, 600)
    assert made_way() == {"ada": lease, "bo": ""}
    await site.gpu_cell(ada)
    assert made_way()["ada"] == ""


async def test_a_job_of_higher_priority_goes_first_inside_its_project(site, broker):
    await site.submit("bo", "2", program=Program(work_s=20))
    late = await site.submit("bo", "2", priority=-5, program=Program(work_s=5))
    urgent = await site.submit("bo", "2", priority=-1, program=Program(work_s=5))
    assert broker.seen(late).position == 2
    assert broker.seen(urgent).position == 1
    await until(lambda: broker.job(late).result, 200)
    assert broker.job(urgent).ended_at <= broker.job(late).ended_at
    assert broker.job(urgent).result == "succeeded"


async def test_priority_above_0_is_a_right_of_the_project(site):
    projects = tuple(
        ProjectConfig(name=n, quota_milli=1000, groups=(n,), priority_max=m)
        for n, m in (("vision", 0), ("nlp", 5))
    )
    site.policy = Policy(projects=projects)
    broker = await site.start_broker()
    await site.submit("bo", "1", priority=5)  # of nlp
    await site.submit("ada", "1", priority=-100)  # of vision: each user may give less
    for user, group, priority in (("bo", "nlp", 6), ("ada", "vision", 1)):
        request = wire.JobRequest(command=["true"], project=group, priority=priority)
        with pytest.raises(InvalidRequest, match=f"priority is at most {priority - 1} in project {group}"):
            await broker.requests.submit(user, (group,), request, None)
        with pytest.raises(InvalidRequest, match="priority is at most"):
            await broker.requests.outlook(user, request)


async def test_equal_jobs_of_a_project_take_turns_by_the_service_they_received(site, broker):
    """Least attained service: the long job has had its share, the short one comes first, nothing is lost."""
    long = await site.running("bo", "2", program=Program(work_s=4_000))
    await asyncio.sleep(1_000)  # 2,000 GPU-seconds: still in the first queue
    short = await site.submit("bo", "2", program=Program(work_s=100))
    await asyncio.sleep(60)
    assert (broker.state(long), broker.state(short)) == ("running", "pending")
    await asyncio.sleep(700)  # 3,250 are over
    await until(lambda: broker.job(short).result == "succeeded", 300)
    assert broker.job(long).result == ""
    await until(lambda: broker.job(long).result == "succeeded", 4_000)
    assert broker.job(long).preemptions == 1


async def test_a_job_that_waited_for_long_is_known_for_it_after_a_restart(site):
    """It came first though others have a higher priority, and its turn is stored."""
    nlp = ProjectConfig(name="nlp", quota_milli=2000, priority_max=5, groups=("nlp",))
    site.policy = Policy(projects=(nlp,), starvation_guard_s=900.0)
    broker = await site.start_broker()
    await site.submit("bo", "2", program=Program(work_s=1_000))
    late = await site.submit("bo", "2", program=Program(work_s=5_000))
    await site.submit("bo", "2", priority=5, program=Program(work_s=5_000))
    await until(lambda: broker.state(late) == "running", 3_000)
    assert [x.lease.turns for x in broker.registry.leases.values() if x.state is State.RUNNING] == [1]
    await broker.end()
    broker = await site.start_broker()
    assert sum(x.lease.turns for x in broker.registry.leases.values()) == 1


async def test_a_job_that_waited_for_long_waits_on_after_a_start_that_failed(site):
    """It stays first, and the start that failed is no turn of it."""
    nlp = ProjectConfig(name="nlp", quota_milli=2000, priority_max=5, groups=("nlp",))
    site.policy = Policy(projects=(nlp,), starvation_guard_s=900.0)
    broker = await site.start_broker()
    first = await site.submit("bo", "2", program=Program(work_s=1_000))
    late = await site.submit("bo", "2", program=Program(work_s=5_000))
    await until(lambda: broker.state(first) == "running", 60)
    high = await site.submit("bo", "2", priority=5, program=Program(work_s=5_000))
    await until(lambda: broker.state(high) == "running", 1_000)
    waits_since_at = broker.lease(late).lease.waits_since_at
    site.fault("start_server", HubError("the Hub did not start it: try later"))
    await until(lambda: broker.lease(late).tries, 3_000)
    assert broker.lease(late).lease.waits_since_at == waits_since_at
    await until(lambda: broker.state(late) == "running", 3_000)
    assert broker.lease(late).lease.turns == 1


async def test_however_many_wait_those_that_ran_and_those_that_ended_last_are_told(site, broker):
    ended = []
    for _ in range(3):
        ended.append(await site.submit("bo", "2", program=Program(work_s=5)))
        await until(lambda: broker.job(ended[-1]).result, 120)
    runs = await site.running("bo", "2", program=Program(work_s=5_000))
    waits = []
    for _ in range(20):
        waits.append(await site.submit("bo", "2"))
        await asyncio.sleep(1)
    first = broker.registry.leases[waits[0].lease_id]
    await broker.registry.advance(first, Granted(devices=(), held_milli=0))
    await broker.registry.advance(first, StartFailed(reason="the Hub is busy", tries=1))
    listed = [job.id for job in broker.views.jobs("bo", limit=10)]
    assert listed[:2] == [runs.id, waits[0].id]
    assert listed[2:8] == [job.id for job in waits[1:7]], "the next to start come first"
    assert listed[8:] == [job.id for job in ended[:0:-1]]
    await broker.requests.cancel(waits[5])
    assert broker.views.jobs("bo", limit=10)[8].id == waits[5].id


async def test_measured_progress_tells_the_end_from_the_first_job_on(site, broker):
    job = await site.running("bo", "2", program=Program(work_s=4_000))
    assert broker.seen(job).ends_in is None
    await reports(site, job)
    ends, says = broker.seen(job).ends_in, broker.seen(job).reason
    assert ends.low_s < 3_200 < ends.high_s < 4 * ends.low_s
    assert re.search(r"Ends in \d+ (min to \d+ h|to \d+ (min|h))\.", says)


async def test_a_paused_job_is_told_no_end(site, broker):
    job = await site.running("bo", "2", program=Program(work_s=4_000))
    await reports(site, job)
    await site.gpu_cell(await site.session("ada", "1"))
    await until(lambda: broker.state(job) == "suspended", 200)
    seen = broker.seen(job)
    assert seen.ends_in is None
    assert seen.left_s == pytest.approx(3_200, rel=0.1)
    assert seen.reason.startswith("Paused at")


async def test_a_job_that_does_not_borrow_waits_for_its_quota_though_a_gpu_is_free(site, broker):
    first = await site.submit("bo", "1", borrow=False, program=Program(work_s=100))
    second = await site.submit("bo", "1", borrow=False, program=Program(work_s=100))
    await until(lambda: broker.state(first) == "running", 120)
    assert broker.state(second) == "pending"
    assert not broker.seen(second).borrow
    assert "guaranteed" in broker.seen(second).reason
    await until(lambda: broker.job(second).result, 400)
    assert broker.job(first).result == broker.job(second).result == "succeeded"


async def test_what_the_quota_can_never_cover_without_borrowing_is_refused(site, broker):
    with pytest.raises(InvalidRequest, match="without borrowing; project nlp is guaranteed 1 GPU"):
        await site.submit("bo", "2", borrow=False)
    outlook = await broker.requests.outlook("bo", wire.JobRequest(command=["-"], project="nlp", borrow=False))
    assert outlook.starts == "now"
    assert not outlook.borrowed


async def test_a_lag_behind_the_fair_share_is_remembered_over_a_restart(site):
    site.policy = Policy(
        projects=tuple(ProjectConfig(name=n, quota_milli=0, groups=(n,)) for n in ("vision", "nlp")),
        grace_s=5.0,
        min_run_s=100_000.0,
    )
    broker = await site.start_broker()
    await site.running("bo", "2", program=Program(work_s=10_000))
    await site.submit("ada", "2", program=Program(work_s=10))
    await until(lambda: broker.registry.fairness.stored.gpu_s, 2_000)
    lags = dict(broker.registry.fairness.stored.gpu_s)
    assert lags["vision"] > 0
    assert lags["nlp"] == pytest.approx(-lags["vision"], abs=0.2)
    await broker.end()
    broker = await site.start_broker()
    assert (
        snapshot.cluster(broker.registry, broker.engine, site.now).lags_gpu_s["vision"]
        >= 0.9 * lags["vision"]
    )


async def test_a_user_who_is_behind_is_so_after_a_restart_too(site):
    site.groups["cy"] = site.groups["bo"]
    broker = await site.start_broker()
    await broker.registry.journal.commit(UserLags(gpu_s={"nlp": {"bo": 50_000.0}}))
    await broker.end()
    broker = await site.start_broker()
    for user in ("cy", "cy", "bo"):
        await site.submit(user, "2", program=Program(work_s=600))
    await until(lambda: broker.registry.fairness.behind, 60)
    assert set(snapshot.cluster(broker.registry, broker.engine, site.now).behind) == {("nlp", "bo")}


async def test_nobody_is_behind_under_an_order_that_does_not_preempt(site):
    site.groups["cy"] = site.groups["bo"]
    broker = await site.start_broker()
    registry = broker.registry
    for user in ("cy", "cy", "bo"):
        await site.submit(user, "2", program=Program(work_s=600))
    registry.fairness = FairnessTracker(Lags(), UserLags(gpu_s={"nlp": {"bo": 50_000.0}}))
    before = registry.policy
    bo = {("nlp", "bo")}
    for order, behind in ((before.order, bo), (Order.FIFO, set()), (before.order, bo)):
        registry.policy = replace(before, order=order)
        snapshot.update_fairness(registry, broker.engine, site.now)
        assert set(snapshot.cluster(registry, broker.engine, site.now).behind) == behind


def test_lags_of_users_are_to_be_stored_once():
    leases = [stops("x", "0 1", project="nlp", user="bo"), stops("y", project="nlp", user="cy")]
    tracker = FairnessTracker(Lags(), UserLags(gpu_s={"nlp": {"bo": 1_000.0}}))
    assert not tracker.to_store()
    devices = (device(0), device(1))
    tracker.update_users(devices, 1, lambda: leases, 0.0)
    tracker.update_users(devices, 1, list, 5_000.0)
    (stored,) = tracker.to_store()
    assert -4_100 < stored.gpu_s["nlp"]["bo"] < -3_900
    assert 4_800 < stored.gpu_s["nlp"]["cy"] <= 5_000
    assert not tracker.to_store()
    # Devices come and go; the lags stay.
    tracker.update_users(devices[:1], 1, lambda: leases, 5_000.0)
    assert not tracker.to_store()
    assert not FairnessTracker(Lags(), stored).behind


async def test_every_round_decides_as_one_that_looks_at_everything_anew(site, monkeypatch):
    rounds = []

    def both(keeper, cluster, now):
        rounds.append(planned := of_the_keeper(keeper, cluster, now))
        assert planned == plan(cluster, now)
        return planned

    of_the_keeper = IncrementalPlanner.plan
    monkeypatch.setattr(IncrementalPlanner, "plan", both)
    site.policy = replace(site.policy, notice_s=0.0)  # a planner remembers the notices that it gave
    broker = await site.start_broker()
    ada = await site.session("ada", "1/2")
    jobs = [await site.submit("bo", size, program=Program(work_s=100)) for size in ("2", "1", "1/2")]
    await until(lambda: broker.state(ada.handle) == "suspended", 400)
    await site.gpu_cell(ada)
    await until(lambda: all(broker.job(job).result for job in jobs), 2_000)
    assert {broker.job(job).result for job in jobs} == {"succeeded"}
    assert sum(bool(planned.actions) for planned in rounds) >= 4


def test_an_outlook_changes_when_time_alone_changes_it():
    engine, site = LocalEngine(), cluster(build("nb", 1000, "0", idle_s=595), train("job", 1000))
    next_at = plan(site, NOW).next_at
    assert next_at is not None
    assert NOW < next_at < NOW + KEEP_S
    before = engine.outlook(site, NOW)
    assert not engine.would_suspend(site, NOW)
    assert engine.outlook(site, NOW + 1) is before
    assert engine.would_suspend(site, next_at)


async def reports(site, job):
    """Report for 800 s a progress by which 3,200 s are left."""
    for done in range(1, 17):
        await site.report(job, state="progress", done=done, total=80)
        await asyncio.sleep(50)


async def test_a_job_is_expected_to_end_by_its_maximum_run_time(site, broker):
    job = await site.running("bo", "2", program=Program(work_s=4_000), max_run_s=1_000.0)
    await reports(site, job)
    ends = broker.seen(job).ends_in
    assert ends.low_s < 200 < ends.high_s < 700
