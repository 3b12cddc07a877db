"""Bad input gets a clear error and loses nothing; rights and bounds hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare import wire
from jupyter_gpushare.broker import book as book_module
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.core.model import State, Survival
from jupyter_gpushare.errors import (
    Conflict,
    GpuShareError,
    HelperError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    RequestError,
    TooMany,
)
from tests.broker.fake_backend import Program, Site, in_virtual_time, spawn, until

BAD_FRACTIONS = [
    "0",
    "-1",
    "1.5",
    "nan",
    "1/0",
    "lots",
    "0.33333",
    "",
    "inf",
    "1e-1",
    "1/2/3",
    "0.0001",
    "1/10000",
    "9" * 5000,
    "\0",
]


def nothing_left(broker) -> bool:
    return not broker.book.leases and not broker.book.jobs and not broker.site.held


@pytest.mark.parametrize("text", BAD_FRACTIONS)
@in_virtual_time
async def test_a_session_with_a_bad_fraction_is_refused_with_a_sentence(tmp_path, text):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(InvalidRequest, match="GPU fraction"):
            await broker.desk.start(spawn("ada", text))
        assert nothing_left(broker)


@pytest.mark.parametrize("text", [t for t in BAD_FRACTIONS if t != "9" * 5000])
@in_virtual_time
async def test_a_job_with_a_bad_size_is_refused_with_a_sentence(tmp_path, text):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(InvalidRequest, match="GPU fraction"):
            await site.submit("bo", text)
        assert nothing_left(broker)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": 10}, "2"),
        ({"gpus": -1}, "from 0 to 1024"),
        ({"gpus": 10**30}, "from 0 to 1024"),
        ({"fraction": "0.5", "gpus": 1}, "not several"),
        ({"memory": "lots"}, "size of memory"),
        ({"memory": "-1GiB"}, "size of memory"),
        ({"memory": "1"}, "too little"),
        ({"memory": "999TiB"}, "GPU"),
        ({"memory": "999999999999999TiB"}, "GPU"),
        ({"memory": "9" * 5000}, "size of memory"),
        ({"memory": ""}, "size of memory"),
    ],
)
@in_virtual_time
async def test_a_session_with_an_impossible_size_is_refused(tmp_path, options, says):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        request = wire.SpawnRequest(
            user="ada", server="", groups=["vision"], uid=1000, options=wire.GpuRequest(**options)
        )
        with pytest.raises(RequestError, match=says):
            await broker.desk.start(request)
        assert nothing_left(broker)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"gpus": "10"}, "GPU"),
        ({"gpus": "1025"}, "at most 1024"),
        ({"gpus": "9" * 5000}, "at most 1024"),
        ({"memory": "999TiB"}, "GPU"),
        ({"command": []}, "needs a command"),
        ({"command": ["  "]}, "needs a command"),
        ({"command": ["a\0b"]}, "NUL"),
        ({"command": ["a"] * 1001}, "too long"),
        ({"command": ["a" * 100_001]}, "too long"),
        ({"cwd": "relative"}, "absolute"),
        ({"cwd": "/a\0b"}, "absolute"),
        ({"cwd": "/" + "a" * 5000}, "absolute"),
        ({"env": {"A": "1\0"}}, "environment variable"),
        ({"env": {"A=B": "1"}}, "environment variable"),
        ({"env": {"": "1"}}, "environment variable"),
        ({"env": {"LD_PRELOAD": "/evil.so"}}, "set by the system"),
        ({"env": {"GPUSHARE_LEASE": "x"}}, "set by the system"),
        ({"env": {"JUPYTERHUB_API_TOKEN": "x"}}, "set by the system"),
        ({"env": {f"A{n}": "" for n in range(201)}}, "at most 200"),
        ({"env": {"A": "x" * 100_001}}, "100,000"),
        ({"name": ""}, "1 to 100"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"name": "a\0b"}, "NUL"),
        ({"priority": 101}, "-100 to 100"),
        ({"retries": 11}, "0 to 10"),
        ({"retries": -1}, "0 to 10"),
        ({"grace_s": -0.5}, "0 to 3600"),
        ({"grace_s": 3601.0}, "0 to 3600"),
        ({"grace_s": float("inf")}, "0 to 3600"),
        ({"grace_s": float("nan")}, "0 to 3600"),
        ({"project": "nosuch"}, "no project"),
        ({"project": "vision"}, "no project"),
    ],
)
@in_virtual_time
async def test_a_job_that_cannot_be_run_is_refused_with_a_sentence(tmp_path, more, says):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        request = wire.JobRequest(**{"command": ["true"], **more})
        with pytest.raises(RequestError, match=says):
            await broker.desk.submit("bo", ("nlp",), request, None)
        assert nothing_left(broker)


@in_virtual_time
async def test_a_project_of_others_looks_like_one_that_is_not_there(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        for name in ("nosuch", "vision"):
            with pytest.raises(NotFound, match="yours: nlp") as refused:
                await broker.desk.start(spawn("bo", "1/2", project=name))
            assert refused.value.reason == "unknown_project"
            assert str(refused.value).replace(name, "X") == "there is no project 'X' for you; yours: nlp"


@in_virtual_time
async def test_who_belongs_to_no_project_gets_no_gpu_but_a_server(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(NotAllowed, match="no project"):
            await broker.desk.start(spawn("eve", "1/2"))
        grant = await broker.desk.start(spawn("eve", None))
        assert grant.lease is None
        assert grant.env == {}


@in_virtual_time
async def test_a_session_gets_its_part_and_says_which(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        grant = await broker.desk.start(spawn("ada", "1/2"))
        record = broker.lease(grant.lease)
        assert grant.memory_limit_bytes == 39_000_000_000
        assert grant.devices == list(record.lease.devices)
        assert record.state is State.GRANTED
        assert record.uid == 1000
        assert grant.message.startswith("Your 1/2 GPU (")
        assert grant.message.endswith(" of H100-80GB) is ready.")
        site.held[grant.lease].alive = True
        await until(lambda: broker.state(grant.lease) == "running", 5)


@in_virtual_time
async def test_a_session_that_does_not_fit_is_refused_with_what_to_do(tmp_path):
    async with Site(tmp_path, gpus=1) as site:
        broker = await site.start_broker()
        await site.session("ada", "1")
        with pytest.raises(Conflict, match="Choose a smaller size, or start without a GPU") as refused:
            await broker.desk.start(spawn("bo", "1"))
        assert refused.value.reason == "no_room"
        assert len(broker.book.leases) == 1


@in_virtual_time
async def test_a_restarted_server_gets_a_new_lease_when_the_old_one_has_let_go(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        old = await site.session("ada", "1/2")
        old.alive, old.used = False, {}
        new = await site.session("ada", "1/4")
        assert new.handle != old.handle
        assert [r.handle for r in broker.book.leases.values()] == [new.handle]


@in_virtual_time
async def test_a_server_that_still_lives_keeps_its_room_and_the_next_one_is_told(tmp_path):
    async with Site(tmp_path, policy=None) as site:
        site.policy = replace(site.policy, grace_s=100.0)
        broker = await site.start_broker()
        await site.session("ada", "1/2")
        with pytest.raises(Conflict, match="try again in a few seconds"):
            await broker.desk.start(spawn("ada", "1/4"))


@in_virtual_time
async def test_without_the_helper_a_gpu_is_refused_and_a_server_without_one_starts(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.helper_silent = True
        await until(lambda: site.now - broker.book.sampled_at > 6)
        for refuse in (broker.desk.start(spawn("ada", "1/2")), site.submit("bo", "1")):
            with pytest.raises(Conflict) as refused:
                await refuse
            assert refused.value.reason == "devices_unknown"
        assert (await broker.desk.start(spawn("ada", None))).lease is None
        assert not broker.book.leases


@in_virtual_time
async def test_a_lease_that_the_helper_does_not_take_is_given_back(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.fault("prepare", HelperError("conflict", "no"))
        with pytest.raises(Conflict):
            await broker.desk.start(spawn("ada", "1/2"))
        assert not broker.book.leases
        assert (await broker.desk.start(spawn("ada", "1/2"))).lease is not None


@in_virtual_time
async def test_the_same_idempotency_key_is_the_same_job_of_the_same_user(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        first = await site.submit("bo", "1", key="k")
        again = await site.submit("bo", "1", key="k")
        other = await site.submit("cy", "1", key="k")
        assert first.id == again.id != other.id
        assert len(broker.book.jobs) == 2
        for key in ("", "x" * 256):
            with pytest.raises(InvalidRequest, match="1 to 255"):
                await broker.desk.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), key)


@in_virtual_time
async def test_an_idempotency_key_is_known_long_after_its_job_left_the_memory(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        first = await site.submit("bo", "1", key="k", program=Program(work_s=1))
        await until(lambda: broker.job(first).result)
        del broker.book.jobs[first.id]
        again = await site.submit("bo", "1", key="k")
        assert again.id == first.id
        assert again.result == "succeeded"
        assert not broker.book.failed.done()


@in_virtual_time
async def test_the_queue_has_a_bound_for_all_and_for_each(tmp_path):
    async with Site(tmp_path) as site:
        site.policy = replace(site.policy, max_jobs=3, max_jobs_per_user=2)
        broker = await site.start_broker()
        mine = [await site.submit("bo", "1", program=Program(work_s=1000)) for _ in range(2)]
        with pytest.raises(TooMany, match="you have 2 jobs"):
            await site.submit("bo", "1")
        await site.submit("cy", "1")
        with pytest.raises(TooMany, match="queue is full"):
            await site.submit("cy", "1")
        await broker.desk.cancel(mine[1])
        await until(lambda: broker.job(mine[1]).result)
        await site.submit("bo", "1")


@pytest.mark.parametrize("server", ["jabcdefghij-1", "jabcdefghij-99"])
@in_virtual_time
async def test_a_job_server_that_nobody_expects_is_refused(tmp_path, server):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(Conflict, match="gpushare submit") as refused:
            await broker.desk.start(spawn("bo", None, server=server))
        assert refused.value.reason == "not_expected"


@in_virtual_time
async def test_a_job_starts_only_for_its_user_its_attempt_and_its_moment(tmp_path):
    async with Site(tmp_path) as site:
        site.spawn_s = 30.0
        broker = await site.start_broker()
        job = await site.submit("bo", "1")
        await until(lambda: broker.state(job) == "granted")
        right = f"j{job.id}-1"
        forged = [("ada", right), ("bo", f"j{job.id}-0"), ("bo", f"j{job.id}-2"), ("bo", f"j{job.id}-01")]
        for user, server in forged:
            with pytest.raises(Conflict) as refused:
                await broker.desk.start(spawn(user, "1/2", server=server))
            assert refused.value.reason == "not_expected"
        assert not site.held
        grant = await broker.desk.start(spawn("bo", "1/4", server=right))
        assert grant.job is not None
        assert grant.job.command == ["python", "train.py"]
        assert grant.memory_limit_bytes == 78_000_000_000  # as submitted, not as the start says


@in_virtual_time
async def test_a_cancel_while_the_job_makes_room_is_not_lost(tmp_path):
    """It is on its way back into the queue when its owner cancels it."""
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        slow = Program(work_s=500, heeds_sigterm=False)
        job = await site.submit("bo", "2", checkpoint=Survival.NONE, program=slow, grace_s=20)
        await until(lambda: broker.state(job) == "running")
        other = await site.submit("ada", "1", checkpoint=Survival.NONE, program=Program(work_s=5))
        await until(lambda: broker.state(job) == "stopping")
        await asyncio.sleep(1)
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result)
        assert broker.job(job).result == "cancelled"
        await until(lambda: broker.job(other).result == "succeeded")


@in_virtual_time
async def test_nobody_asks_for_a_grace_that_keeps_an_owner_waiting(tmp_path):
    async with Site(tmp_path) as site:
        await site.start_broker()
        with pytest.raises(InvalidRequest, match="at most 120"):
            await site.submit("bo", "1", grace_s=3600)
        await site.submit("bo", "1", grace_s=120)


@in_virtual_time
async def test_parts_so_small_that_they_only_take_places_are_refused(tmp_path):
    async with Site(tmp_path) as site:
        site.policy = replace(site.policy, min_fraction_milli=50)
        broker = await site.start_broker()
        with pytest.raises(InvalidRequest, match=r"at least 0\.05 GPU"):
            await site.submit("bo", "0.049")
        with pytest.raises(InvalidRequest, match=r"at least 3\.\d GB"):
            await site.submit("bo", memory="1GiB")
        with pytest.raises(InvalidRequest, match=r"at least 0\.05 GPU"):
            await broker.desk.start(spawn("ada", "0.001"))
        await site.submit("bo", "0.05")


@in_virtual_time
async def test_a_late_stop_of_attempt_1_does_not_hit_attempt_2(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", retries=1, program=Program(work_s=100, vanishes_after_s=1))
        await until(lambda: site.started[job.id] == 1)
        site.programs[job.id] = Program(work_s=50)
        await until(lambda: broker.lease(job).handle.endswith("-2") and broker.state(job) == "running")
        await broker.desk.stop(wire.SpawnStop(user="bo", server=f"j{job.id}-1"))
        await broker.desk.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=3))
        assert broker.state(job) == "running"
        assert broker.job(job).exit_code is None
        await until(lambda: broker.job(job).result)
        assert broker.job(job).result == "succeeded"
        assert broker.job(job).attempts == 2


@in_virtual_time
async def test_a_report_that_comes_when_its_attempt_is_over_changes_nothing(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        blocker = await site.submit("bo", "2", program=Program(work_s=1000))
        job = await site.submit("bo", "1")
        await until(lambda: broker.state(blocker) == "running")
        attempt = broker.lease(job).attempt
        await broker.desk.report("bo", job.id, attempt, wire.JobReport(state="ended", exit_code=0))
        assert broker.job(job).exit_code is None
        assert broker.state(job) == "pending"


@in_virtual_time
async def test_a_job_of_another_is_not_there(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1")
        report = wire.JobReport(state="ended", exit_code=0)
        for attempt in (
            lambda: broker.desk.report("ada", job.id, 1, report),
            lambda: broker.desk.job("ada", job.id),
            lambda: broker.desk.job("bo", "nosuchjob1"),
        ):
            with pytest.raises(NotFound):
                await attempt()
        assert (await broker.desk.job("root", job.id, admin=True)).id == job.id


@pytest.mark.parametrize("code", [10**30, -(10**30), 256, -65, 2**31])
@in_virtual_time
async def test_a_forged_exit_code_cannot_break_the_database(tmp_path, code):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running")
        with pytest.raises(InvalidRequest, match="exit_code"):
            await broker.desk.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=code))
        assert broker.job(job).exit_code is None


@in_virtual_time
async def test_an_ended_job_is_found_however_many_live_or_ended_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(book_module, "_MAX_ENDED_JOBS", 2)
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(6)]
        await until(lambda: broker.book.jobs.get(jobs[0].id, jobs[0]).result)
        assert jobs[0].id in broker.book.jobs, "living jobs do not push ended ones out"
        for job in jobs:
            await until(lambda job=job: job.lease_id not in broker.book.leases)
        assert len(broker.book.jobs) <= 2
        gone = [job for job in jobs if job.id not in broker.book.jobs]
        for job in gone:
            found = await broker.desk.job("bo", job.id)
            assert found.result == "succeeded"
            assert broker.views.job(found).state == "succeeded"
            assert await broker.desk.cancel(found) == found
            with pytest.raises(NotFound):
                await broker.desk.job("ada", job.id)


@in_virtual_time
async def test_a_status_tells_of_queued_jobs_as_jobs_only(tmp_path):
    """There may be thousands, and every page of their owner asks for it."""
    async with Site(tmp_path, gpus=1) as site:
        broker = await site.start_broker()
        runs = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(runs) == "running")
        waits = await site.submit("bo", "1")
        status = broker.views.status("bo", ("nlp",), admin=False)
        assert [lease.job for lease in status.leases] == [runs.id]
        assert {job.id for job in status.jobs} == {runs.id, waits.id}


@in_virtual_time
async def test_the_same_key_twice_before_the_devices_are_known_is_one_job(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker(running=False)
        request = wire.JobRequest(command=["x"])
        twice = [
            site.later(broker.desk.submit("bo", site.groups["bo"], request, "the-key")) for _ in range(2)
        ]
        await asyncio.sleep(0.1)  # both wait for the first measurement
        await broker.loop.measure()
        await broker.book.bump()
        first, second = await asyncio.gather(*twice)
        assert first.id == second.id
        assert len(broker.book.jobs) == 1
        assert not broker.book.failed.done()
        site.helper_silent = True
        await asyncio.sleep(60)
        again = await broker.desk.submit("bo", site.groups["bo"], request, "the-key")
        assert again.id == first.id, "an accepted job is told whether or not the devices are known"


@in_virtual_time
async def test_only_an_ended_job_can_be_tried_again_and_it_is_a_new_one(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "0.5", name="n", program=Program(work_s=5, exit_code=3))
        with pytest.raises(Conflict, match="has not ended"):
            await broker.desk.retry(job, ("nlp",))
        await until(lambda: broker.job(job).result)
        assert broker.job(job).exit_code == 3
        assert broker.job(job).result == "failed"
        again = await broker.desk.retry(broker.job(job), ("nlp",))
        assert again.id != job.id
        assert again.name == "n"
        assert again.command == job.command
        with pytest.raises(NotAllowed):
            await broker.desk.retry(broker.job(job), ())


@in_virtual_time
async def test_keeping_a_gpu_has_bounds_and_a_budget_per_day(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        for minutes in (0.5, 0, -1, 241, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest, match="from 1 to 240"):
                await broker.desk.keep(broker.lease(ada.handle), minutes)
        await broker.desk.keep(broker.lease(ada.handle), 100)
        assert broker.lease(ada.handle).lease.keep_until_at == pytest.approx(site.now + 6000)
        with pytest.raises(TooMany, match="20 more minutes"):
            await broker.desk.keep(broker.lease(ada.handle), 30)


@in_virtual_time
async def test_a_kept_gpu_is_not_lent_and_a_lent_one_goes_at_once(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1")
        await broker.desk.keep(broker.lease(ada.handle), 60)
        job = await site.submit("bo", "2", program=Program(work_s=5))
        await until(lambda: site.now - ada.active_at > 600, 700)
        assert broker.state(ada.handle) == "running"
        assert broker.state(job) == "pending"
        await broker.desk.lend(broker.lease(ada.handle))
        await until(lambda: broker.state(ada.handle) == "suspended", 10)
        await until(lambda: broker.job(job).result, 60)


@in_virtual_time
async def test_a_sleeping_session_is_woken_by_its_owner_and_only_then(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1")
        with pytest.raises(Conflict, match="not asleep"):
            await broker.desk.wake(broker.lease(ada.handle))
        job = await site.submit("bo", "2", program=Program(work_s=500))
        await until(lambda: broker.state(job) == "running", 120)
        with pytest.raises(Conflict, match="only a session that is awake"):
            await broker.desk.lend(broker.lease(ada.handle))
        for verb in (broker.desk.wake, broker.desk.lend):
            with pytest.raises(Conflict):
                await verb(broker.lease(job))
        await broker.desk.wake(broker.lease(ada.handle))
        await until(lambda: broker.state(ada.handle) == "running", 30)


@in_virtual_time
async def test_a_projects_numbers_can_be_changed_and_outlive_the_broker(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        await broker.desk.change_project("nlp", wire.ProjectChange(quota=0.5, weight=3))
        await broker.desk.change_project("nlp", wire.ProjectChange(limit=1.5))
        await broker.end()
        broker = await site.start_broker()
        nlp = next(p for p in snapshot.projects(broker.book) if p.name == "nlp")
        assert (nlp.quota_milli, nlp.weight, nlp.limit_milli) == (500, 3, 1500)


@pytest.mark.parametrize(
    "change",
    [
        {"quota": -1.0},
        {"quota": 0.0001},
        {"quota": float("inf")},
        {"limit": -0.5},
        {"limit": float("nan")},
        {"weight": -1},
        {"weight": 1001},
    ],
)
@in_virtual_time
async def test_impossible_numbers_of_a_project_are_refused(tmp_path, change):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(InvalidRequest):
            await broker.desk.change_project("nlp", wire.ProjectChange(**change))
        with pytest.raises(NotFound):
            await broker.desk.change_project("nosuch", wire.ProjectChange(weight=1))
        assert broker.book.overrides == {}


@in_virtual_time
async def test_hints_of_a_server_count_for_its_own_lease_only(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada, cy = await site.session("ada", "1/2"), await site.session("cy", "1/4")
        busy = wire.ActivityReport(
            kernels=[wire.KernelActivity(id="k", busy=True, idle_s=0.0, name="a.ipynb")]
        )
        await broker.desk.activity("ada", "", busy)
        await broker.desk.activity("ada", "other", busy)
        await broker.desk.activity("eve", "", busy)
        live = broker.book.live
        assert live[broker.lease(ada.handle).id].kernel_busy
        assert not live[broker.lease(cy.handle).id].kernel_busy


@in_virtual_time
async def test_a_hint_from_the_future_or_the_far_past_harms_nothing(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        for idle_s in (-1e300, 1e300, float("inf")):
            kernels = [wire.KernelActivity(id="k" * 1000, busy=False, idle_s=idle_s, name="n" * 1000)] * 100
            await broker.desk.activity("ada", "", wire.ActivityReport(kernels=kernels))
        live = broker.book.live[broker.lease(ada.handle).id]
        assert live.kernel_active_at <= site.now
        assert len(live.kernels) <= 64
        assert all(len(k) <= 64 for k in live.kernels)


def test_all_of_our_errors_are_ours():
    assert issubclass(RequestError, GpuShareError)
