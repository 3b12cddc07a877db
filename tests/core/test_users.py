"""Lags of users behind an equal share, and the jobs that come first because of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core import order
from jupyter_gpushare.core.fairshare import BEHIND_S, HALF_LIFE_S, REVIEW_S, UserLedger
from jupyter_gpushare.core.model import Behind, Order, Project, State
from jupyter_gpushare.core.planning.planner import Planner
from jupyter_gpushare.core.queues import MAX_PREFERRED
from jupyter_gpushare.core.size import Size
from tests.core.build import NOW, build, cluster, device, started, stops

HOUR_S = 3600.0
A, B, C = ("p", "a"), ("p", "b"), ("p", "c")
GPUS = [device(n) for n in range(4)]


def ledger_of(*leases, lags=None):
    ledger = UserLedger(GPUS, lags or {}, now=0)
    ledger.recount(leases)
    ledger.review()
    return ledger


def behind(ledger):
    ledger.review()
    return ledger.behind()


def test_users_have_equal_shares_of_what_the_jobs_of_their_project_hold():
    ledger = ledger_of(
        stops("x", "0 1 2", user="a"),
        stops("y", user="b"),
        stops("z", user="c", device_count=4),
        build("s", 1000, "3", user="b"),  # sessions are paid with quota
    )
    ledger.advance(HOUR_S)
    assert ledger.lags_gpu_s == {
        A: pytest.approx(-2 * HOUR_S, rel=0.05),
        B: pytest.approx(HOUR_S, rel=0.05),
        C: pytest.approx(HOUR_S, rel=0.05),
    }


def test_a_share_is_no_more_than_the_user_asks_for():
    ledger = ledger_of(stops("x", "0 1 2 3", user="a"), stops("y", user="b"))
    ledger.advance(HOUR_S)
    assert ledger.lags_gpu_s[B] == pytest.approx(HOUR_S, rel=0.05)


@pytest.mark.parametrize(
    "waiting",
    [
        {"user": "a"},  # the only user of the project
        {"user": "b", "project": "q"},
        {"user": "b", "borrow": False},
        {"user": "b", "device_count": 8},  # fits on no device
        {"user": "b", "retry_at": HOUR_S},
        {"user": "b", "state": State.RELEASED},
    ],
    ids=str,
)
def test_nobody_lags_behind_where_no_other_job_waits_that_could_run(waiting):
    ledger = ledger_of(stops("x", "0 1 2 3", user="a"), stops("y", **waiting))
    ledger.advance(HOUR_S)
    assert not any(ledger.lags_gpu_s.values())
    assert not ledger.behind()


def test_half_of_a_lag_is_forgotten_in_a_day_and_the_rest_at_last():
    ledger = ledger_of(stops("x", user="b"), lags={A: 10.0, B: 10.0})
    ledger.advance(HALF_LIFE_S)
    assert ledger.forget_faded() == {A: pytest.approx(5.0), B: pytest.approx(5.0)}
    ledger.advance(9 * HALF_LIFE_S)
    assert set(ledger.forget_faded()) == {B}


def test_recounting_keeps_the_lags():
    ledger = ledger_of(stops("x", "0 1", user="a"), stops("y", "2", user="b"), stops("z", user="b"))
    ledger.advance(HOUR_S)
    before = dict(ledger.lags_gpu_s)
    ledger.recount([stops("x", "0 1", user="a")])
    assert ledger.lags_gpu_s == before


def test_a_user_is_behind_from_a_lag_of_hours_of_the_share_until_most_of_it_is_made_up():
    two = 2 * BEHIND_S  # of a share of 2 GPUs
    leases = [stops("x", "0 1 2 3", user="a"), stops("y", user="b", device_count=2)]
    assert not ledger_of(*leases, lags={B: two - 1}).behind()
    ledger = ledger_of(*leases, lags={B: two + 1})
    assert ledger.behind() == {B: Behind(2000, 2000)}
    caught_up = [stops("x", "0 1", user="a"), stops("y", "2 3", user="b"), stops("z", user="b")]
    ledger.recount(caught_up)
    ledger.lags_gpu_s[B] = two / 4 + 1
    assert behind(ledger) == {B: Behind(0)}
    # Where nothing waits, or on other devices, it is so still.
    ledger.recount(caught_up[:2])
    assert behind(ledger) == {B: Behind(0)}
    ledger.recount(caught_up, [device(n) for n in range(5)])
    assert behind(ledger) == {B: Behind(0)}
    ledger.lags_gpu_s[B] = two / 4 - 1
    assert not behind(ledger)
    ledger.lags_gpu_s[B] = two / 4 + 1  # it has to lag by hours again
    assert not behind(ledger)


def test_a_share_of_less_than_a_gpu_is_behind_by_hours_of_a_gpu():
    leases = [stops("x", "0", user="a"), stops("y", user="b")]
    assert not ledger_of(*leases, lags={B: BEHIND_S - 1}).behind()
    assert ledger_of(*leases, lags={B: BEHIND_S + 1}).behind() == {B: Behind(500, 1000)}


def test_whether_a_user_is_behind_is_reviewed_while_jobs_of_several_users_wait():
    waits = ledger_of(stops("x", "0", user="a"), stops("y", user="b"))
    waits.advance(5.0)
    assert waits.next_at == 5.0 + REVIEW_S
    assert ledger_of(stops("x", "0", user="a"), stops("y", "1", user="b")).next_at == float("inf")


def contest(*leases, behind=None, **settings):
    settings = {"order": Order.PROGRESS, "min_run_s": 60.0, "gpus": GPUS[:2]} | settings
    return replace(cluster(*leases, **settings), behind=behind or {})


def test_jobs_of_a_user_who_is_behind_come_first_as_far_as_the_share_holds_them():
    mine = [stops(f"m{n}", user="a", attained_gpu_s=9_000.0) for n in range(3)]
    new = [stops(f"n{n}", user="b") for n in range(3)]
    assert started(contest(*mine, *new)) == ["n0", "n1"]
    assert started(contest(*mine, *new, behind={A: Behind(2000)})) == ["m0", "m1"]
    assert started(contest(*mine, *new, behind={A: Behind(1999)})) == ["m0", "n0"]
    assert started(contest(*mine, *new, behind={A: Behind(0)})) == ["n0", "n1"]


def test_jobs_that_could_not_run_take_no_part_of_the_share():
    """They fit nowhere, lack a device or lack quota; the one behind them is preferred."""
    mine = stops("mine", user="a", attained_gpu_s=9_000.0)
    first = {"user": "a", "attained_gpu_s": 9_000.0, "waits_since_at": NOW - 1}
    new = [stops(f"n{n}", user="b") for n in range(2)]
    for job in (
        stops("large", device_count=9, **first),
        stops("bound", "9", state=State.SUSPENDED, **first),
        stops("modest", borrow=False, **first),
    ):
        c = contest(job, mine, *new, behind={A: Behind(1000)}, projects=[Project(name="p", quota_milli=0)])
        assert started(c) == ["mine", "n0"]


def test_a_request_for_memory_counts_as_one_gpu_of_the_share():
    size = Size(0, 1, 1 << 30)
    mine = [replace(stops(f"m{n}", user="a", attained_gpu_s=9_000.0), size=size) for n in range(2)]
    new = stops("new", user="b", device_count=2)
    assert started(contest(*mine, new, behind={A: Behind(999)})) == ["new"]
    assert started(contest(*mine, new, behind={A: Behind(1000)}))[0] == "m0"


def test_the_first_job_of_a_user_who_holds_nothing_may_be_larger_than_the_share():
    mine = [stops(name, user="a", device_count=2, attained_gpu_s=9_000.0) for name in ("m", "n")]
    new = stops("new", user="b")
    assert started(contest(*mine, new, behind={A: Behind(1000, 1999)})) == ["new"]
    assert started(contest(*mine, new, behind={A: Behind(1000, 2000)})) == ["m"]
    gpus = {"gpus": GPUS}
    assert started(contest(*mine, new, behind={A: Behind(1000, 2000)}, **gpus)) == ["m", "new"]


@pytest.mark.parametrize("kind", [Order.FIFO, Order.BACKFILL])
def test_an_order_that_does_not_preempt_prefers_nobody(kind):
    first = stops("first", user="b", queued_at=NOW - 20)
    second = stops("second", user="a", queued_at=NOW - 10)
    c = contest(first, second, behind={A: Behind(2000)}, order=kind, gpus=GPUS[:1])
    assert started(c) == ["first"]
    assert order.level(first, NOW, c.settings, preferred=True) == order.level(second, NOW, c.settings)


def test_they_preempt_jobs_of_others_and_are_preempted_by_none_of_them():
    c = contest(
        stops("mine", user="a", attained_gpu_s=9_000.0),
        stops("new", "0", user="b", granted_at=NOW - 600),
        gpus=GPUS[:1],
    )
    planner = Planner.of(c)
    assert not planner.plan(NOW).actions
    planner.behind = {A: Behind(1000)}
    assert [a.lease for a in planner.plan(NOW).actions] == ["new"]
    long = stops("long", "0", user="a", granted_at=NOW - 600, attained_gpu_s=9_000.0)
    other = contest(long, stops("short", user="b"), gpus=GPUS[:1])
    assert [a.lease for a in Planner.of(other).plan(NOW).actions] == ["long"]
    assert not Planner.of(replace(other, behind={A: Behind(0)})).plan(NOW).actions


def test_planners_that_live_on_prefer_as_a_new_one_does():
    """Users get behind, their jobs start, change and end."""
    jobs = [stops(f"{user}{n}", user=user, queued_at=NOW - n) for n in range(4) for user in "ab"]
    c = contest(*jobs, behind={A: Behind(1000)}, projects=[Project(name="p", quota_milli=0)])
    planner = Planner.of(c)
    for behind, gone in (
        ({A: Behind(1000)}, ""),
        ({A: Behind(2000), B: Behind(0)}, "a3"),
        ({}, "a2"),
        ({B: Behind(1000)}, "b0"),
    ):
        if gone:
            planner.drop(gone)
            jobs = [x for x in jobs if x.id != gone]
        planner.behind = behind
        changed = replace(jobs[0], queued_at=jobs[0].queued_at - 1)
        jobs[0] = changed
        planner.put(changed)
        anew = Planner.of(replace(c, leases=tuple(jobs), behind=behind))
        assert planner.plan(NOW).actions == anew.plan(NOW).actions


def test_of_very_many_jobs_only_so_many_come_first():
    count = MAX_PREFERRED + 9
    mine = [stops(f"m{n:03}", user="a", attained_gpu_s=9_000.0) for n in range(count)]
    gpus = [device(n) for n in range(count)]
    c = contest(*mine, stops("new", user="b"), behind={A: Behind(1000 * count)}, gpus=gpus)
    assert started(c).index("new") == MAX_PREFERRED
