"""A planner that compares snapshots answers as one that looks at each anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.planning.planner import IncrementalPlanner, Planner, plan
from jupyter_gpushare.core.planning.scheduler import SchedulingRound
from tests.core.build import NOW, build, cluster, grant, project, train


def test_it_sees_other_quotas_settings_and_lags():
    planner = IncrementalPlanner()
    waiting = [train("a", 1000), train("b", 1000, project="q")]
    c = cluster(*waiting, projects=[project("p", 0), project("q", 0)], fairness_horizon_s=3600.0)
    for changed in (
        c,
        replace(c, projects=(project("p", 0), project("q", 1))),
        replace(c, projects=c.projects, lags_gpu_s={"p": -100.0, "q": 100.0}),
        replace(c, lags_gpu_s={"p": 100.0, "q": -100.0}),
        replace(c, devices=()),
    ):
        assert planner.plan(changed, NOW) == plan(changed, NOW)


def test_nothing_is_made_anew_while_only_leases_change(monkeypatch):
    planner = IncrementalPlanner()
    c = cluster(train("a", 1000, "0"))
    planner.plan(c, NOW)
    monkeypatch.setattr(Planner, "of", None)
    planner.plan(replace(c, leases=(*c.leases, train("b", 500))), NOW + 1)


def test_after_an_error_in_a_round_it_begins_anew(monkeypatch):
    planner = IncrementalPlanner()
    c = cluster(train("a", 1000))
    planner.plan(c, NOW)
    with monkeypatch.context() as broken:
        broken.setattr(Planner, "plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planner.plan(c, NOW)
    made = []
    of = Planner.of
    monkeypatch.setattr(Planner, "of", lambda c: made.append(c) or of(c))
    assert planner.plan(c, NOW) == plan(c, NOW)
    assert made[0] is c


def test_it_sees_which_lease_takes_over_a_claim_that_was_given_back():
    planner = IncrementalPlanner()
    guest = build("b", 1000, "1", borrowed=True)
    owed = train("c", 1000, project="q")
    first = cluster(build("a", 1000, "0"), guest, gpus=2, projects=[project("p", 1), project("q", 1)])
    planner.plan(first, NOW)
    left = replace(first, leases=(guest, owed))
    assert planner.plan(left, NOW) == plan(left, NOW)
    assert planner.plan(left, NOW).actions == (grant("c", 0),)


def test_a_round_tries_as_little_for_many_projects_as_for_few(monkeypatch):
    tried = []
    start = SchedulingRound._try_to_start
    monkeypatch.setattr(SchedulingRound, "_try_to_start", lambda *args: tried.append(1) or start(*args))
    held = [train(f"r{n}", 1000, str(n), project=f"p{n % 3}", granted_at=NOW - 10) for n in range(16)]

    def tries(projects: int) -> int:
        waiting = [
            train(f"w{n}", (250, 500, 1000)[n % 7 % 3], project=f"p{n % projects}") for n in range(1200)
        ]
        names = [project(f"p{n}", 0) for n in range(projects)]
        more = {"min_run_s": 600.0, "fairness_horizon_s": 1800.0}
        c = cluster(*held, *waiting, gpus=16, projects=names, **more)
        lags = {f"p{n}": 1000.0 * (-1) ** n for n in range(projects)}
        tried.clear()
        assert not plan(replace(c, lags_gpu_s=lags), NOW).actions
        return len(tried)

    assert tries(500) <= 2 * tries(3)
