"""A name is not a person: what becomes of jobs, use and rights when users go, are made anew or renamed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import HubError, HubUser, ServerKey
from jupyter_gpushare.broker.control import administration
from jupyter_gpushare.broker.control.effects import MAX_TRIES
from jupyter_gpushare.broker.control.ownership import CHECK_S, RECHECK_S
from jupyter_gpushare.broker.state.records import (
    MACHINE,
    JobRecord,
    Owner,
    OwnerForgotten,
    OwnerMoved,
    UsageRecord,
    UserLags,
    former,
)
from jupyter_gpushare.broker.state.registry import keep_left
from jupyter_gpushare.broker.state.transitions import Started
from jupyter_gpushare.broker.views.views import owners
from jupyter_gpushare.errors import Conflict, DiskFull, NotAllowed, NotFound
from jupyter_gpushare.protocol import wire
from tests.broker import stored
from tests.broker.brokers import Broker
from tests.broker.http_site import ACCESS, Http, person
from tests.broker.site import Site, spawn
from tests.broker.virtual_time import STEP_S, until
from tests.waiting import becomes

NEW = "2026-11-22T03:05:09.123456Z"


async def started(site: Site) -> Broker:
    """A broker that knows the Hub's users."""
    broker = await site.start_broker()
    await until(lambda: broker.registry.owners.of, 10)
    return broker


async def emptied(site: Site) -> Broker:
    """A broker that knows the Hub's users and starts nothing."""
    broker = await started(site)
    await administration.drain(broker.registry, broker.engine, MACHINE, None, "root")
    return broker


@pytest.fixture
async def broker(site: Site) -> Broker:
    return await emptied(site)


async def open_again(broker: Broker) -> None:
    await administration.undrain(broker.registry, MACHINE, "root")


def made_anew(site: Site, *names: str) -> None:
    for number, name in enumerate(names):
        site.made[name] = NEW.replace("456Z", f"{456 + number}Z")


async def one_of(users: Callable[[], Awaitable[list[HubUser]]], name: str) -> HubUser | None:
    return next((user for user in await users() if user.name == name), None)


def users_of(broker: Broker, *jobs: JobRecord) -> list[str]:
    return [broker.job(job).user for job in jobs]


# ---- users that go -----------------------------------------------------------


async def test_waiting_jobs_of_a_deleted_user_fail_when_the_hub_misses_the_user_twice(site, broker):
    job, other = await site.submit("ada"), await site.submit("bo")
    began = site.now
    site.deleted.add("ada")
    await until(lambda: broker.registry.owners.absent == {"ada"}, CHECK_S + 10, max_step_s=STEP_S)
    first = site.now
    assert broker.seen(job).state == "queued"
    assert broker.seen(job).reason == "Does not start: the Hub does not have its owner now."
    await until(lambda: broker.job(job).result, RECHECK_S + 10, max_step_s=STEP_S)
    assert RECHECK_S <= site.now - first <= RECHECK_S + 2
    assert site.now - began <= CHECK_S + RECHECK_S + 10
    seen = broker.seen(job)
    assert (seen.state, seen.attempt) == ("failed", 0)
    assert seen.reason == "It did not start: the Hub does not have its owner ada any more."
    assert seen.user == former("ada", site.made_at("ada"))
    assert not broker.views.health().held_jobs
    await open_again(broker)
    assert await broker.ended(other, 120) == "succeeded"


async def test_a_user_that_the_hub_misses_once_loses_nothing(site, broker):
    job = await site.submit("ada")
    site.deleted.add("ada")
    await until(lambda: "ada" in broker.registry.owners.absent, CHECK_S + 10)
    site.deleted.clear()
    await asyncio.sleep(RECHECK_S + 5)
    assert not broker.registry.owners.absent
    await open_again(broker)
    assert await broker.ended(job, 120) == "succeeded"


@pytest.mark.parametrize("listed", ["all but ada", "two", "none"])
async def test_a_list_that_misses_users_is_not_believed_without_asking_for_their_names(
    site, broker, monkeypatch, listed
):
    """The broker's scope may list some users only, and the Hub may not answer."""
    job, users = await site.submit("ada"), broker.hub.users

    async def some() -> list[HubUser]:
        if listed == "none":
            raise HubError("the Hub does not answer")
        return (await users())[-2:] if listed == "two" else [x for x in await users() if x.name != "ada"]

    monkeypatch.setattr(broker.hub, "user", functools.partial(one_of, users))
    monkeypatch.setattr(broker.hub, "users", some)
    await asyncio.sleep(3 * CHECK_S)
    assert not broker.registry.owners.absent
    await open_again(broker)
    assert await broker.ended(job, 120) == "succeeded"


async def test_a_start_for_a_user_that_the_hub_does_not_have_is_the_first_look(site):
    broker = await started(site)
    site.deleted.add("ada")
    job = await site.submit("ada")
    began = site.now
    await until(lambda: "ada" in broker.registry.owners.absent, 10)
    await until(lambda: broker.job(job).result, RECHECK_S + 10, max_step_s=STEP_S)
    assert site.now - began >= RECHECK_S
    assert broker.seen(job).state == "failed"
    assert not site.started


# ---- users that are made anew --------------------------------------------------


async def test_the_next_user_of_a_name_has_nothing_of_the_last_one(site, broker):
    registry = broker.registry
    job, old = await site.submit("ada", key="mine"), former("ada", site.made_at("ada"))
    kept = UsageRecord(day=registry.iso_now()[:10], user="ada", project="vision", kept_s=600.0)
    await registry.journal.commit(registry.usage.count(replace(kept, used_gpu_s=60.0)))
    left = keep_left(registry, "ada")
    made_anew(site, "ada")
    await broker.loop.ownership.meet("ada", NEW)
    assert broker.views.jobs("ada", limit=9) == []
    assert broker.views.leases("ada") == []
    assert keep_left(registry, "ada") == left + 10
    with pytest.raises(NotFound):
        await broker.requests.job("ada", job.id)
    new = await site.submit("ada", key="mine")
    assert new.id != job.id
    assert users_of(broker, job, new) == [old, "ada"]
    await open_again(broker)
    await until(lambda: broker.job(new).result, 120)
    assert site.started == {new.id: 1}
    assert await broker.ended(job, CHECK_S + RECHECK_S + 10) == "failed"
    sums = {use.user: use.used_gpu_s for use in registry.usage.sums.values() if use.kept_s}
    assert sums == {old: 60.0}
    assert set(registry.owners.of) == {"ada", "bo", "cy", "eve", "root"}


async def test_a_user_made_anew_while_a_job_starts_does_not_run_it(site):
    site.spawn_s = 3.0
    broker = await started(site)
    job = await site.submit("ada")
    await until(lambda: ServerKey("ada", f"j{job.id}-1") in site.servers, 10)
    made_anew(site, "ada")
    await until(lambda: broker.state(job) == "pending", 60)
    assert broker.job(job).user != "ada"
    assert broker.lease(job).tries == 0
    assert await broker.ended(job, RECHECK_S + 20) == "failed"
    assert not site.started


async def test_a_user_that_is_there_again_has_everything_again(site, broker):
    """As after the Hub ran with another database for a while."""
    job = await site.submit("ada", key="mine")
    first = site.made_at("ada")
    await broker.loop.ownership.meet("ada", NEW)
    second = await site.submit("ada", key="mine")
    await broker.loop.ownership.meet("ada", first)
    assert users_of(broker, job, second) == ["ada", former("ada", NEW)]
    await open_again(broker)
    assert await broker.ended(job, 120) == "succeeded"
    assert site.started == {job.id: 1}


async def test_an_answer_of_the_hub_that_came_late_is_put_right_at_the_next_look(site, broker):
    first = site.made_at("ada")
    made_anew(site, "ada")
    await broker.loop.ownership.meet("ada", NEW)
    job = await site.submit("ada")
    await broker.loop.ownership.meet("ada", first)  # what was asked before she was made anew
    assert users_of(broker, job) == [former("ada", NEW)]
    assert broker.loop.ownership.find("ada", NEW) == former("ada", NEW)
    await open_again(broker)
    await until(lambda: broker.job(job).result, CHECK_S + 60)
    assert (broker.seen(job).user, broker.seen(job).state) == ("ada", "succeeded")
    await asyncio.sleep(CHECK_S + RECHECK_S)
    assert not broker.registry.owners.absent


async def test_a_session_of_an_earlier_user_is_not_the_next_ones(site):
    broker = await started(site)
    first, held = former("ada", site.made_at("ada")), await site.session("ada", "1/2")
    await until(lambda: broker.state(held.handle) == "running", 30)
    site.servers.clear()  # the Hub has another database; the process lives on
    made_anew(site, "ada")
    await site.session("ada", "1/2")
    assert {record.lease.user for record in broker.registry.leases.values()} == {first, "ada"}
    (mine,) = broker.views.leases("ada")
    assert mine.id != held.handle.partition("-")[0]
    (owner,) = owners(broker.registry).owners
    assert (owner.user, owner.jobs, owner.others) == (first, 0, 1)


async def test_another_system_user_of_the_name_starts_nothing_until_an_administrator_says_so(site, broker):
    await broker.loop.ownership.meet("ada", site.made_at("ada"), 1000)
    job = await site.submit("ada")
    await broker.loop.ownership.meet("ada", site.made_at("ada"), 1001)
    await open_again(broker)
    await asyncio.sleep(2 * CHECK_S)
    assert broker.seen(job).state == "queued"
    assert broker.views.health().held_jobs == 1
    await broker.loop.ownership.adopt("ada", None, "root")
    await until(lambda: broker.job(job).result, 120)
    assert (broker.seen(job).state, broker.seen(job).user) == ("succeeded", "ada")
    assert broker.views.health().held_jobs == 0


# ---- another database of the Hub -----------------------------------------------


async def another_database(site: Site) -> tuple[Broker, JobRecord, JobRecord]:
    """All users of the Hub were made anew while jobs of two of them waited."""
    broker = await emptied(site)
    jobs = await site.submit("ada"), await site.submit("bo")
    made_anew(site, "ada", "bo", "cy", "eve", "root")
    await until(lambda: broker.views.health().held_jobs == 2, CHECK_S + 10)
    return broker, *jobs


async def test_where_many_owners_go_at_once_nothing_fails(site):
    broker, *jobs = await another_database(site)
    await open_again(broker)
    await broker.loop.ownership.meet("ada", site.made_at("ada"))
    await asyncio.sleep(3 * CHECK_S)
    assert [broker.seen(job).state for job in jobs] == ["queued", "queued"]
    assert not site.started
    health = broker.views.health()
    assert health.status == "degraded"
    (said,) = health.reasons
    assert said.startswith("2 owners of waiting jobs are gone from the Hub, or were created again")
    assert "ada" not in said, "it needs no token"
    shown = {(x.name, x.jobs, x.held, x.others == 0) for x in owners(broker.registry).owners}
    assert shown == {("ada", 1, True, True), ("bo", 1, True, True)}
    await broker.end()
    broker = await site.start_broker()
    await asyncio.sleep(2 * CHECK_S)
    assert [broker.seen(job).state for job in jobs] == ["queued", "queued"]


async def test_owners_that_are_back_are_not_held(site):
    broker, *jobs = await another_database(site)
    await open_again(broker)
    site.made.clear()
    await until(lambda: all(broker.job(job).result for job in jobs), CHECK_S + 60)
    assert [broker.seen(job).state for job in jobs] == ["succeeded", "succeeded"]
    assert broker.views.health().reasons == []


async def test_an_administrator_adopts_or_ends_what_is_held(site):
    broker, adas, bos = await another_database(site)
    ownership = broker.loop.ownership
    with pytest.raises(NotFound):
        await ownership.adopt("zoe", None, "root")
    with pytest.raises(Conflict, match="no user 'zoe'"):
        await ownership.adopt("bo", "zoe", "root")
    with pytest.raises(NotFound):
        await ownership.end("zoe", "root")
    await ownership.adopt("ada", "cy", "root")
    await ownership.end("bo", "root")
    assert (broker.seen(adas).user, broker.seen(bos).state) == ("cy", "failed")
    notes = [entry.sentence for entry in broker.registry.decisions.latest if entry.action == "owner"]
    assert notes == [
        "root gave what belongs to ada, an absent owner, to cy.",
        "root ended the waiting jobs of bo, an absent owner.",
    ]
    await open_again(broker)
    assert await broker.ended(adas, 120) == "succeeded"
    assert owners(broker.registry) == wire.Owners(owners=[])


async def test_one_of_a_few_owners_may_go_and_so_may_a_tenth(site):
    site.groups |= {f"u{n}": ("nlp",) for n in range(25)}
    broker = await emptied(site)
    jobs = [await site.submit(f"u{n}") for n in range(3)]
    site.deleted |= {"u0", "u1", "u2"}  # of 30
    await until(lambda: all(broker.job(job).result for job in jobs), CHECK_S + RECHECK_S + 10)
    assert {broker.seen(job).state for job in jobs} == {"failed"}
    more = [await site.submit(f"u{n}") for n in range(3, 6)]
    site.deleted |= {"u3", "u4", "u5"}  # of 27
    await asyncio.sleep(2 * CHECK_S)
    assert {broker.seen(job).state for job in more} == {"queued"}
    assert broker.views.health().held_jobs == 3


# ---- users that are renamed ----------------------------------------------------


def rename(site: Site, old: str, new: str) -> None:
    site.groups[new], site.made[new] = site.groups[old], site.made_at(old)
    site.deleted.add(old)


async def test_everything_moves_with_a_user_that_is_renamed(site, broker):
    job = await site.submit("ada")
    rename(site, "ada", "lovelace")
    await until(lambda: broker.job(job).user == "lovelace", CHECK_S + 10)
    site.deleted.clear()  # another ada
    made_anew(site, "ada")
    await broker.loop.ownership.meet("ada", NEW)
    assert broker.views.jobs("ada", limit=9) == []
    await open_again(broker)
    assert await broker.ended(job, 120) == "succeeded"


async def test_a_user_that_comes_with_another_name_is_known_at_once(site, broker):
    job = await site.submit("ada")
    rename(site, "ada", "lovelace")
    await broker.loop.ownership.meet("lovelace", site.made_at("lovelace"))
    assert users_of(broker, job) == ["lovelace"]
    assert "ada" not in broker.registry.owners.of


async def test_a_renamed_user_keeps_everything_though_another_has_the_old_name(site, broker):
    job, moment = await site.submit("ada"), site.made_at("ada")
    made_anew(site, "ada")
    await broker.loop.ownership.meet("ada", NEW)
    site.groups["lovelace"], site.made["lovelace"] = ("vision",), moment
    await until(lambda: broker.job(job).user == "lovelace", CHECK_S + 10)


@pytest.mark.parametrize("moment", ["2026-11-22T03:05:09.000000Z", ""])
async def test_a_moment_that_several_users_may_have_is_no_proof_of_a_rename(site, moment):
    site.made["ada"] = moment
    broker = await emptied(site)
    job = await site.submit("ada")
    site.groups["lovelace"], site.made["lovelace"] = ("vision",), moment
    site.deleted.add("ada")
    await broker.loop.ownership.meet("lovelace", moment)
    assert await broker.ended(job, CHECK_S + RECHECK_S + 10) == "failed"
    assert broker.seen(job).user.startswith("ada/")


# ---- projects, and databases of earlier versions ---------------------------------


async def test_a_job_does_not_start_in_a_project_that_its_owner_has_left(site, broker):
    job = await site.submit("cy", project="nlp")
    site.groups["cy"] = ("vision",)
    await open_again(broker)
    await until(lambda: broker.job(job).result, 120)
    assert not site.started
    assert broker.seen(job).reason == "It could not be started: cy is no member of project nlp"
    (reason,) = broker.seen(job).reason_texts
    assert reason.args == [messages.text("reason.not_a_member", "cy", "nlp")]


async def test_where_a_project_is_renamed_what_runs_goes_on_and_what_waits_fails(site):
    broker = await started(site)
    held = await site.session("bo", "1/2")
    await administration.drain(broker.registry, broker.engine, MACHINE, None, "root")
    job = await site.submit("bo", project="nlp")
    await open_again(broker)
    renamed = [replace(each, name=each.name.replace("nlp", "text")) for each in site.policy.projects]
    broker.registry.policy = replace(site.policy, projects=tuple(renamed))
    assert await broker.ended(job, 120) == "failed"
    assert not site.started
    assert broker.seen(job).reason == "It could not be started: bo is no member of project nlp"
    assert broker.state(held.handle) == "running"


async def test_what_moves_to_another_owner_is_added_to_what_is_there(store):
    moved = replace(stored.USAGE, user="old"), replace(stored.USAGE, user="old", day="2025-01-03")
    job = replace(stored.JOB, user="old")
    theirs = replace(stored.JOB, id="bcdefghijk", user="bö")
    lease = replace(stored.LEASE, lease=replace(stored.LEASE.lease, user="old"))
    await store.commit([stored.USAGE, *moved, job, theirs, lease, replace(stored.DECISION, user="old")])
    await store.commit([Owner(user="old", name="old"), Owner(user="bö", name="bö", held=True)])
    await store.commit([Owner(user="bö", name="bö", created=NEW, uid=4_000_000_000)])
    await store.commit([OwnerMoved("old", "bö")])
    found = store.load()
    assert found.owners == (Owner(user="bö", name="bö", created=NEW, uid=4_000_000_000),)
    assert found.leases == (stored.LEASE,)
    assert found.decisions == (stored.DECISION,)
    assert {each.id: each.idempotency_key for each in found.jobs} == {job.id: None, theirs.id: "k"}
    assert {each.user for each in found.jobs} == {"bö"}
    assert {use.day: use for use in found.usage} == {
        "2025-01-02": stored.USAGE.plus(stored.USAGE),
        "2025-01-03": replace(stored.USAGE, day="2025-01-03"),
    }


async def test_memory_and_database_agree_about_what_moved(site, broker):
    registry = broker.registry
    for user in ("ada", "bo"):
        await site.submit(user, key="mine")
        kept = UsageRecord(day=registry.iso_now()[:10], user=user, project="vision", kept_s=60.0)
        await registry.journal.commit(registry.usage.count(kept))
    registry.fairness.drop_users()
    registry.fairness.stored_users = UserLags(gpu_s={"vision": {"ada": 7.0, "bo": 5.0}})
    await broker.loop.ownership.change(OwnerMoved("ada", "bo"))
    found = registry.store.load()
    assert {job.id: job for job in found.jobs} == dict(registry.jobs)
    assert {record.id: record for record in found.leases} == dict(registry.leases)
    assert set(found.usage) == set(registry.usage.sums.values())
    assert found.meta.users == registry.fairness.stored_users == UserLags(gpu_s={"vision": {"bo": 12.0}})
    assert keep_left(registry, "bo") == registry.policy.keep_minutes_per_day - 2
    assert {owner.user: owner for owner in found.owners} == registry.owners.of


# ---- users that are renamed to names that others had ---------------------------

GONE = ("ada", "bo", "cy")


@pytest.mark.parametrize("is_met", [False, True], ids=["at a look", "at a start"])
@pytest.mark.parametrize(
    "now",
    [
        {"bo": "ada"},  # bo was deleted
        {"bo": "ada", "zed": "bo"},
        {"ada": "bo", "bo": "ada"},
        {"ada": "cy", "bo": "ada", "cy": "bo"},
    ],
    ids=["deleted", "chain", "swap", "circle"],
)
async def test_a_rename_to_a_known_name_merges_no_two_users(site, broker, now, is_met):
    jobs = {name: await site.submit(name, project="nlp" if name == "bo" else "vision") for name in GONE}
    moments = {name: site.made_at(name) for name in GONE}
    site.deleted |= set(GONE) - {"cy"}
    for name, before in now.items():
        site.deleted.discard(name)
        site.groups[name], site.made[name] = ("vision", "nlp"), moments[before]
    if is_met:
        await broker.loop.ownership.meet("bo", moments["ada"])
        assert users_of(broker, jobs["ada"]) == ["bo"]
    await asyncio.sleep(CHECK_S + RECHECK_S + 10)
    names = {before: name for name, before in now.items()} | ({} if "cy" in now else {"cy": "cy"})
    expected = [names.get(name, former(name, moments[name])) for name in GONE]
    assert users_of(broker, *jobs.values()) == expected
    states = ["queued" if name in names else "failed" for name in GONE]
    assert [broker.seen(job).state for job in jobs.values()] == states
    assert set(broker.registry.owners.of) == site.groups.keys() - site.deleted


async def test_the_last_of_many_users_with_one_moment_inherits_from_none(site):
    """JupyterHub gave all users of a database without moments the same (its migration 99a28a4418e1)."""
    site.made |= dict.fromkeys(("ada", "bo"), NEW)
    broker = await emptied(site)
    job = await site.submit("ada")
    site.deleted.add("ada")
    assert broker.loop.ownership.find("zed", NEW) is None
    await until(lambda: broker.job(job).result, CHECK_S + RECHECK_S + 10)
    assert broker.seen(job).user == former("ada", NEW)


# ---- how databases keep moments, and Hubs that keep none -------------------------


@pytest.mark.parametrize("kept", ["2026-11-22T03:05:09.000000Z", "2026-11-22T03:05:10.000000Z"])
async def test_a_database_of_whole_seconds_makes_no_one_another_user(site, kept):
    """A Hub says microseconds until it starts anew; then MariaDB has cut them off, and MySQL has rounded."""
    site.made["ada"] = "2026-11-22T03:05:09.500001Z"
    broker = await emptied(site)
    job = await site.submit("ada")
    made_at, site.made["ada"] = site.made["ada"], kept
    await asyncio.sleep(CHECK_S + RECHECK_S)
    assert users_of(broker, job) == ["ada"]
    assert broker.registry.owners.of["ada"].created == kept
    assert broker.loop.ownership.find("ada", made_at) == "ada"
    site.made["ada"] = "2026-11-22T03:05:12.000000Z"
    await broker.loop.ownership.meet("ada", site.made["ada"])
    assert users_of(broker, job) == [former("ada", kept)]


async def test_a_token_keeps_its_groups_when_the_hub_says_whole_seconds(http):
    http.site.made["bo"] = NEW
    await http.submit("bo")
    http.site.made["bo"] = NEW.replace("123456", "000000")
    await http.submit("bo")


async def test_health_says_when_the_hub_does_not_date_its_users(site, broker):
    assert broker.views.health().status == "ok"
    site.made["ada"] = ""
    await asyncio.sleep(CHECK_S + 10)
    (said,) = broker.views.health().reasons
    assert said.endswith("the scope read:users.")
    site.made.clear()
    await asyncio.sleep(CHECK_S + 10)
    assert broker.views.health().status == "ok"


# ---- what has a bound -----------------------------------------------------------


async def test_a_404_at_starts_of_a_user_that_the_hub_has_ends_the_job_after_its_tries(site, monkeypatch):
    broker = await started(site)
    asked: list[str] = []
    users = broker.hub.users

    async def refused(*_: object) -> None:
        asked.append("start")
        raise HubError("404: Not Found", unknown_user=True)

    async def listed() -> list[HubUser]:
        asked.append("list")
        return await users()

    monkeypatch.setattr(broker.hub, "start_server", refused)
    monkeypatch.setattr(broker.hub, "user", functools.partial(one_of, users))
    monkeypatch.setattr(broker.hub, "users", listed)
    job = await site.submit("ada")
    assert await broker.ended(job, 200) == "failed"
    assert asked == ["start"] * MAX_TRIES


async def test_held_owners_stay_only_as_long_as_they_have_leases(site):
    """As where guests come and go, many at once."""
    site.groups |= {f"u{n}": ("nlp",) for n in range(20)}
    broker = await emptied(site)
    registry = broker.registry
    job = await site.submit("u0", key="mine")
    kept = UsageRecord(day=registry.iso_now()[:10], user="u1", project="nlp", used_gpu_s=60.0)
    await registry.journal.commit(registry.usage.count(kept))
    site.deleted |= {f"u{n}" for n in range(20)}
    await until(lambda: broker.views.health().held_jobs == 1, CHECK_S + 10)
    assert set(registry.owners.of) == {"ada", "bo", "cy", "eve", "root", "u0"}
    assert {owner.user for owner in registry.store.load().owners} == set(registry.owners.of)
    assert [use.user for use in registry.usage.sums.values()] == [former("u1", site.made_at("u1"))]
    await broker.requests.cancel(await broker.requests.job("u0", job.id))
    await asyncio.sleep(CHECK_S + 10)
    assert "u0" not in registry.owners.of
    site.deleted.clear()
    await asyncio.sleep(CHECK_S + 10)
    assert [use.user for use in registry.usage.sums.values()] == ["u1"]
    assert users_of(broker, job) == ["u0"]


async def test_a_session_of_an_owner_that_went_before_does_not_count_as_one_that_goes(site, broker):
    await open_again(broker)
    await site.session("bo", "1/2")
    site.deleted.add("bo")
    await asyncio.sleep(CHECK_S + 2 * RECHECK_S)
    assert former("bo", site.made_at("bo")) in broker.registry.owners.of
    await administration.drain(broker.registry, broker.engine, MACHINE, None, "root")
    job = await site.submit("ada")
    site.deleted.add("ada")
    await until(lambda: broker.job(job).result, CHECK_S + RECHECK_S + 10)
    assert broker.views.health().held_jobs == 0


async def test_a_user_that_was_failed_has_the_history_when_the_hub_has_it_again(site, broker):
    job = await site.submit("ada")
    site.deleted.add("ada")
    await until(lambda: broker.job(job).result, CHECK_S + RECHECK_S + 10)
    assert users_of(broker, job) == [former("ada", site.made_at("ada"))]
    site.deleted.clear()
    await asyncio.sleep(CHECK_S + 10)
    assert users_of(broker, job) == ["ada"]


async def test_what_moves_loses_its_keys_also_beside_jobs_that_memory_forgot(site, broker):
    registry = broker.registry
    job, other = await site.submit("ada", key="mine"), await site.submit("bo", key="mine")
    registry._jobs.pop(other.id)
    registry.index.drop(other.lease_id)
    await broker.loop.ownership.change(OwnerMoved("ada", "bo"))
    await registry.put_job(broker.job(job))
    assert users_of(broker, job) == ["bo"]
    found = {each.id: each.idempotency_key for each in registry.store.load().jobs}
    assert found == {job.id: None, other.id: "mine"}


# ---- what administrators adopt -----------------------------------------------------


async def test_jobs_are_adopted_only_into_projects_of_the_new_owner(site):
    """After a new database users may exist before their groups do."""
    broker, adas, _ = await another_database(site)
    await open_again(broker)
    site.groups["ada"] = ()
    with pytest.raises(Conflict, match="ada is no member of project vision, in which jobs wait"):
        await broker.loop.ownership.adopt("ada", None, "root")
    await asyncio.sleep(60)
    assert broker.seen(adas).state == "queued"
    site.groups["ada"] = ("vision",)
    await broker.loop.ownership.adopt("ada", None, "root")
    assert await broker.ended(adas, 120) == "succeeded"


async def test_no_two_sessions_of_one_server_are_adopted(site):
    broker = await started(site)
    first, held = former("ada", site.made_at("ada")), await site.session("ada", "1/2")
    await until(lambda: broker.state(held.handle) == "running", 30)
    site.servers.clear()
    made_anew(site, "ada")
    again = await site.session("ada", "1/2")
    with pytest.raises(Conflict, match="ada would have two sessions of the server without a name: stop"):
        await broker.loop.ownership.adopt("ada", None, "root")
    users = [broker.lease(each.handle).lease.user for each in (held, again)]
    assert users == [first, "ada"]


async def test_nothing_is_adopted_while_the_disk_is_full(site):
    broker, *_ = await another_database(site)
    site.groups["zoe"] = ("vision",)
    broker.registry.journal.is_disk_full = True
    with pytest.raises(DiskFull):
        await broker.loop.ownership.adopt("ada", "zoe", "root")
    broker.registry.journal.is_disk_full = False


# ---- names that look like what is kept under --------------------------------------


@pytest.mark.parametrize("name", ["service/gpu", f"bo/{NEW}", "a/b"])
async def test_a_name_with_a_slash_is_no_user_here(http, name):
    """JupyterHub 5.5 lets administrators give a user any name."""
    http.site.groups[name] = ("nlp",)
    http.tokens["slash"] = person(name, "custom:gpushare:jobs")
    answer = await http.refused("GET", "status", "slash")
    assert (answer.status, answer.message) == (
        403,
        f"the name {name!r} has a slash: the GPU service knows no such user",
    )
    with pytest.raises(NotAllowed, match="has a slash"):
        await http.broker.start(spawn(name, "1/2"))
    await http.broker.loop.ownership.check_users()
    assert name not in http.broker.registry.owners.of


async def test_owners_of_an_earlier_version_that_the_hub_lacks_leave_nothing_to_a_namesake(site, broker):
    jobs = [await site.submit(name) for name in ("ada", "bo", "cy")]
    await broker.requests.cancel(jobs[2])
    await broker.loop.ownership.change(*map(OwnerForgotten, list(broker.registry.owners.of)))
    await broker.end()
    site.deleted |= {"bo", "cy"}
    broker = await started(site)
    assert broker.registry.owners.of["ada"].created == site.made_at("ada")
    site.deleted.clear()
    made_anew(site, "bo", "cy")
    await broker.loop.ownership.meet("bo", site.made_at("bo"))
    await broker.loop.ownership.meet("cy", site.made_at("cy"))
    assert users_of(broker, *jobs) == ["ada", former("bo", ""), former("cy", "")]
    await until(lambda: broker.job(jobs[1]).result, CHECK_S + RECHECK_S + 10)
    assert [broker.seen(job).state for job in jobs] == ["queued", "failed", "cancelled"]


# ---- over HTTP -------------------------------------------------------------------


async def ids(http: Http, identity: str) -> list[str]:
    return [job["id"] for job in (await http.ask("GET", "jobs", identity)).json()["jobs"]]


async def test_tokens_are_of_their_user_though_another_has_the_name(http):
    job = await http.submit("bo")
    http.site.made["bo"] = NEW
    http.tokens["next"] = person("bo", "custom:gpushare:jobs")
    assert await ids(http, "next") == []
    assert await ids(http, "bo") == [job.id]
    assert (await http.refused("GET", f"jobs/{job.id}", "next")).status == 404
    answer = await http.refused("POST", "jobs", "bo", json={"command": ["true"]})
    assert (answer.status, len(http.broker.registry.jobs)) == (403, 1)
    mine = await http.submit("next")
    assert await ids(http, "next") == [mine.id]


async def test_a_poll_that_waits_tells_nothing_of_the_next_user(http):
    await http.submit("bo")
    last = http.broker.registry.notifications.seq
    poll = asyncio.create_task(http.ask("GET", f"status?after={last}&wait=25", "bo"))
    await becomes(lambda: http.service.limits.waiting)
    await http.broker.loop.ownership.meet("bo", NEW)
    new = await http.broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["true"]), None)
    seen = (await poll).json()
    assert new.id not in {job["id"] for job in seen["jobs"]}
    assert seen["user"] == former("bo", http.site.made_at("bo"))


async def test_a_login_counts_whatever_token_stands_in_the_address(http):
    """A link may put one into the addresses that two users open."""
    http.tokens["adas"] = person("ada")

    async def seen_by(token: str) -> str:
        headers = {"Cookie": f"service-gpushare={http.login(token)}", "Sec-Fetch-Mode": "navigate"}
        answer = await http.ask("GET", "status?token=anything", None, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["user"])

    assert [await seen_by("bo"), await seen_by("adas"), await seen_by("bo")] == ["bo", "ada", "bo"]


async def test_a_token_of_a_user_that_the_hub_does_not_have_is_refused(http):
    http.site.deleted.add("bo")
    answer = await http.refused("GET", "status", "bo")
    assert (answer.status, answer.reason) == (401, "login")


async def test_a_service_with_the_name_of_a_user_sees_nothing_of_the_user(http):
    job = await http.submit("bo")
    scopes = [ACCESS, "custom:gpushare:jobs"]
    http.tokens["service"] = {"kind": "service", "name": "bo", "scopes": scopes}
    assert await ids(http, "service") == []
    assert (await http.refused("DELETE", f"jobs/{job.id}", "service")).status == 404
    assert (await http.refused("POST", "jobs", "service", json={"command": ["true"]})).status == 403


async def test_an_administrator_stops_a_session_of_an_absent_owner(http):
    request = wire.replace(spawn("bo", "1/2"), created=http.site.moment("bo"))
    grant = await http.broker.start(request)
    await http.broker.registry.advance(http.broker.registry.by_handle(grant.lease), Started())
    http.site.made["bo"] = NEW
    http.tokens["next"] = person("bo", "custom:gpushare:jobs")
    path = f"leases/{grant.lease.partition('-')[0]}/stop"
    assert (await http.refused("POST", path, "next")).status == 404
    answer = await http.ask("POST", path, "root")
    assert answer.json()["state"] == "stopping"
    assert not any(effect.startswith("stop_server") for effect in http.site.effects)


async def test_owners_are_for_administrators(http):
    job = await http.submit("bo")
    http.site.made["bo"] = NEW
    await http.broker.loop.ownership.meet("bo", NEW)
    for method, path in [("GET", "owners"), ("PUT", "owners/bo"), ("DELETE", "owners/bo")]:
        assert (await http.refused(method, path, "ada", json={})).status == 403
    (owner,) = (await http.ask("GET", "owners", "root")).json()["owners"]
    assert (owner["name"], owner["jobs"], owner["held"]) == ("bo", 1, False)
    assert owner["user"] == former("bo", owner["created"])
    refused: Any = await http.refused("PUT", "owners/bo", "root", json={"to": "zoe"})
    assert (refused.status, refused.message) == (
        409,
        "the Hub has no user 'zoe': name another, or add it there",
    )
    assert (await http.refused("DELETE", "owners/cy", "root")).status == 404
    answer = await http.ask("PUT", "owners/bo", "root")
    assert answer.json() == {"owners": []}
    assert http.broker.registry.jobs[job.id].user == "bo"
