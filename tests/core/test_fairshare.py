"""A project that had less than its fair share gets more until it has caught up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.fairshare import HALF_LIFE_S, REVIEW_S, ProjectLedger
from jupyter_gpushare.core.model import Cluster, Grant, Requeue, State, Why
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.replay import Costs, Replay, ReplayWatcher
from jupyter_gpushare.core.size import Size
from tests.core.build import NOW, CheckpointMode, build, cluster, device, project, train

HOUR_S = 3600.0


def ledger(*leases, gpus=4, quota=0.0, weights=(1, 1), **lags):
    projects = [project(name, quota, weight=w) for name, w in zip("pq", weights, strict=True)]
    made = ProjectLedger(projects, [device(n) for n in range(gpus)], lags, now=0.0)
    made.recount(leases)
    return made


ONE_OF_FOUR = (train("a", 1000, "0"), train("b", 1000, "1 2 3", project="q"), train("w", 1000))
HALVES = (train("a", 500, "0"), train("b", 500, "1", project="q"))
LAGS = {
    "a project below its share falls behind by what others are ahead": (ledger(*ONE_OF_FOUR), 60.0),
    "weights count": (
        ledger(
            train("a", 1000, "0 1"), train("b", 1000, "2 3", project="q"), train("w", 1000), weights=(3, 1)
        ),
        60.0,
    ),
    "what is guaranteed is owed at once, not later": (ledger(*ONE_OF_FOUR, quota=2.0), 0.0),
    "a project without requests does not fall behind": (
        ledger(train("b", 1000, "0 1 2 3", project="q"), train("w", 1000, project="q")),
        0.0,
    ),
    # Of 4 GPUs one is empty: the others hold what there is in the right proportion.
    "unusable capacity puts no project behind": (
        ledger(*HALVES, train("w", 1000), train("x", 1000, project="q")),
        0.0,
    ),
}


@pytest.mark.parametrize(("book", "lag_gpu_s"), LAGS.values(), ids=LAGS)
def test_by_how_much_a_project_falls_behind_in_a_minute(book, lag_gpu_s):
    book.advance(60.0)
    assert book.lags_gpu_s == pytest.approx({"p": lag_gpu_s, "q": -lag_gpu_s})


def test_half_of_a_lag_is_forgotten_in_a_day():
    book = ledger(p=800.0, q=-800.0)
    book.advance(HALF_LIFE_S)
    assert book.lags_gpu_s == pytest.approx({"p": 400.0, "q": -400.0})


def test_time_does_not_go_back_and_strangers_do_not_count():
    book = ledger(train("x", 1000, "0", project="gone"), train("w", 1000))
    book.advance(60.0)
    book.advance(30.0)
    book.count(build("nb", 500), 1)
    assert book.lags_gpu_s == pytest.approx({"p": 0.0, "q": 0.0})


@given(st.lists(st.tuples(st.sampled_from("pq"), st.booleans(), st.integers(1, 8)), max_size=12))
def test_the_lags_add_up_to_nothing(jobs):
    leases = [
        train(f"{n}", 1000, "0" if runs else "", project=name, device_count=count)
        for n, (name, runs, count) in enumerate(jobs)
    ]
    book = ledger(*leases, gpus=8, weights=(1, 3))
    book.advance(1000.0)
    assert sum(book.lags_gpu_s.values()) == pytest.approx(0.0, abs=1e-6)


OTHERS = (train("a", 1000, "0"), train("b", 1000, "1 2 3", project="q"), train("w", 1000, project="q"))


@pytest.mark.parametrize(
    "waiting",
    [
        train("x", 1000, borrow=False),
        train("x", 1000, retry_at=1000.0),
        train("x", 1000, cancelled=True),
        train("x", 1000, device_count=5),
        train("x", 1000, profile="1g.10gb"),
        train("x", 1000, "9", state=State.SUSPENDED),
        build("x", 1000),
    ],
    ids=["does-not-borrow", "backs-off", "cancelled", "too-large", "no-such-profile", "broken", "session"],
)
def test_a_job_that_could_not_run_puts_no_project_behind(waiting):
    book = ledger(*OTHERS, waiting)
    book.advance(60.0)
    assert book.lags_gpu_s == {"p": 0.0, "q": 0.0}
    could = ledger(*OTHERS, train("x", 1000))
    could.advance(60.0)
    assert could.lags_gpu_s["p"] == pytest.approx(60.0)


def test_a_job_on_a_device_that_is_not_usable_puts_no_project_behind():
    asleep = train("x", 1000, "3", state=State.SUSPENDED)
    leases = train("a", 1000, "0"), train("b", 1000, "1 2", project="q"), asleep
    broken = ProjectLedger(
        [project("p", 0), project("q", 0)], [device(n, usable=n < 3) for n in range(4)], {}, now=0.0
    )
    broken.recount(leases)
    broken.advance(60.0)
    assert broken.lags_gpu_s == {"p": 0.0, "q": 0.0}
    whole = ledger(*leases)
    whole.advance(60.0)
    assert whole.lags_gpu_s["p"] > 0


def test_a_job_counts_from_the_end_of_its_back_off():
    x = train("x", 1000, retry_at=60.0)
    book = ledger(*OTHERS, x)
    book.advance(100.0)
    assert book.lags_gpu_s["p"] == pytest.approx(40.0, rel=1e-3)
    book.count(x, -1)
    book.advance(200.0)
    assert book.lags_gpu_s["p"] == pytest.approx(40.0, rel=2e-3)
    book.count(x, 1)
    book.count(later := replace(x, id="y", retry_at=900.0), 1)
    book.count(later, -1)
    book.advance(300.0)
    assert book.lags_gpu_s["p"] == pytest.approx(140.0, rel=3e-3)


def contest(**more):
    """Two projects without quota on 4 GPUs, 2 each; p has a gang of 4 waiting."""
    q = [train(f"q{n}", 1000, f"{n}", project="q", survival=CheckpointMode.SIGTERM) for n in range(4)]
    c = cluster(
        *q,
        train("gang", 1000, device_count=4),
        gpus=[device(n) for n in range(4)],
        projects=[project("p", 0), project("q", 0)],
        fairness_horizon_s=HOUR_S,
    )
    return replace(c, **more)


def test_a_gang_larger_than_its_share_starts_once_its_project_lags_enough():
    assert plan(contest(), NOW).actions == ()
    assert plan(contest(lags_gpu_s={"p": HOUR_S, "q": -HOUR_S}), NOW).actions == ()
    enough = contest(lags_gpu_s={"p": 2 * HOUR_S, "q": -2 * HOUR_S})
    assert {type(a) for a in plan(enough, NOW).actions} == {Requeue}
    assert {a.why for a in plan(enough, NOW).actions} == {Why.OVER_QUOTA}


def test_a_lag_takes_gpus_only_once_it_makes_up_for_the_swap():
    """4 GPUs at 50 s of price and 30 s of grace, 25 times."""
    settings = replace(contest().settings, fairness_horizon_s=1.0, preempt_cost_s=50.0, grace_s=30.0)
    for lag_gpu_s, swaps in ((7_999.0, False), (8_000.0, True)):
        c = contest(lags_gpu_s={"p": lag_gpu_s, "q": -lag_gpu_s}, settings=settings)
        assert bool(plan(c, NOW).actions) is swaps
    # What its share gives it without the lag it gets at once.
    gang = replace(contest().leases[-1], size=Size(1000, 2))
    c = contest(settings=settings)
    assert plan(replace(c, leases=(*c.leases[:-1], gang)), NOW).actions


def test_a_lag_changes_nothing_where_shares_are_of_the_moment():
    lags = {"p": 2 * HOUR_S, "q": -2 * HOUR_S}
    c = contest(lags_gpu_s=lags)
    assert plan(replace(c, settings=replace(c.settings, fairness_horizon_s=None)), NOW).actions == ()


def test_a_lag_takes_gpus_from_no_job_before_it_ran_for_the_time_of_catching_up():
    c = contest(lags_gpu_s={"p": 2 * HOUR_S, "q": -2 * HOUR_S})
    young = tuple(replace(x, granted_at=NOW - 3_500) if x.devices else x for x in c.leases)
    patient = replace(c, leases=young, settings=replace(c.settings, min_run_s=600.0))
    assert plan(patient, NOW).actions == ()
    assert plan(patient, NOW).next_at == NOW + 100


def test_a_lag_takes_nothing_within_quota():
    c = contest(lags_gpu_s={"p": 9 * HOUR_S, "q": -9 * HOUR_S})
    assert plan(replace(c, projects=(project("p", 0), project("q", 4))), NOW).actions == ()


def test_a_lagging_project_comes_first_where_capacity_is_free():
    waiting = [train("a", 1000), train("b", 1000, project="q")]
    c = cluster(*waiting, projects=[project("p", 0), project("q", 0)], fairness_horizon_s=HOUR_S)
    grants = plan(replace(c, lags_gpu_s={"p": -100.0, "q": 100.0}), NOW).actions
    assert grants == (Grant("b", ("gpu0",), 1000, Why.FREE_CAPACITY, borrowed=True),)


def test_while_several_projects_have_jobs_and_one_waits_the_shares_are_computed_again():
    assert plan(contest(lags_gpu_s={"p": 1.0, "q": -1.0}), NOW).next_at == NOW + REVIEW_S
    assert plan(contest(), NOW).next_at == NOW + REVIEW_S
    only_q = tuple(x for x in contest().leases if x.project == "q")
    assert plan(contest(leases=only_q), NOW).next_at is None


class Held(ReplayWatcher):
    """GPU-seconds held per project until a moment."""

    def __init__(self, until_at):
        self.until_at, self.since, self.had = until_at, {}, {"p": 0.0, "q": 0.0}

    def changed(self, now, before, after):
        held = after.state in (State.RUNNING, State.GRANTED, State.STOPPING)
        if held and after.id not in self.since:
            self.since[after.id] = now
        elif not held and after.id in self.since:
            self.count(after, min(now, self.until_at))

    def count(self, lease, until_at):
        self.had[lease.project] += (until_at - self.since.pop(lease.id)) * lease.size.device_count


def test_over_a_day_gangs_and_single_gpus_get_equal_shares():
    """Gangs of 3 never fit a share of 2: without a ledger they get nothing, or all there is."""
    day = 24 * HOUR_S
    watcher = Held(day)
    projects = [project("p", 0), project("q", 0)]
    settings = replace(cluster().settings, fairness_horizon_s=HOUR_S, min_run_s=600.0)
    devices = tuple(device(n) for n in range(4))
    c = Cluster(devices=devices, projects=tuple(projects), leases=(), settings=settings)
    replay = Replay(c, Costs(restart_s=30.0), watcher=watcher)
    leases = {}
    for n in range(40):
        for lease in (
            train(f"g{n}", 1000, device_count=3, survival=CheckpointMode.SIGTERM),
            train(f"s{n}", 1000, project="q", survival=CheckpointMode.SIGTERM),
        ):
            leases[lease.id] = lease
            replay.add_job(lease, 6 * HOUR_S)
    replay.run(day)
    for id in list(watcher.since):
        watcher.count(leases[id], day)
    assert watcher.had["p"] == pytest.approx(watcher.had["q"], rel=0.15)
