"""The order `progress`: least remaining work where it is measured, las for the rest."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Lease, Order, Requeue, State, Why
from jupyter_gpushare.core.planning.planner import plan
from tests.core.build import NOW, actions, cluster, stops, train

PROGRESS = {"order": Order.PROGRESS, "las_thresholds_gpu_s": (100.0, 200.0)}
SETTINGS = cluster(**PROGRESS).settings


def measured(id: str, on: str = "", *, left: float, attained: float = 500.0, **more: Any) -> Lease:
    return stops(id, on, attained_gpu_s=attained, left_gpu_s=left, trusted_until_gpu_s=10_000.0, **more)


def test_the_job_with_less_left_takes_the_gpu_of_the_one_with_more():
    c = cluster(measured("long", "0", left=1_920), measured("short", left=960), **PROGRESS)
    assert actions(c) == [Requeue("long", Why.ORDER, "short")]


def test_equals_do_not_swap():
    c = cluster(measured("one", "0", left=960), measured("other", left=960), **PROGRESS)
    assert actions(c) == []


def test_what_is_left_counts_only_past_the_first_threshold():
    c = cluster(measured("long", "0", left=61_440, attained=99), stops("new"), **PROGRESS)
    assert actions(c) == []
    c = cluster(measured("long", "0", left=960, attained=100), stops("new"), **PROGRESS)
    assert actions(c) == [Requeue("long", Why.ORDER, "new")]


def test_a_job_without_a_measure_past_the_last_threshold_counts_as_long():
    level = {x.id: order.level(x, NOW, SETTINGS)[-1] for x in (
        measured("short", left=61_440),
        measured("longer", left=491_520),
        stops("unmeasured", attained_gpu_s=500.0),
        stops("young", attained_gpu_s=150.0),
        measured("almost done", left=0),
    )}  # fmt: skip
    assert sorted(level, key=level.__getitem__) == ["almost done", "young", "short", "unmeasured", "longer"]


def test_of_measured_jobs_the_last_to_stop_comes_first():
    c = cluster(
        measured("before", left=960, waits_since_at=10),
        measured("last", left=960, waits_since_at=20),
        **PROGRESS,
    )
    assert [a.lease for a in actions(c)] == ["last"]


def test_a_job_that_runs_for_longer_than_it_said_counts_as_longer_and_longer():
    """The plan says when: 9,500 GPU-seconds from now, and again each time that it has doubled."""
    liar = measured("liar", "0", left=0, attained_at=NOW)
    c = cluster(liar, measured("other", left=3_840), **PROGRESS)
    planned = plan(c, NOW)
    assert (planned.actions, planned.next_at) == ((), NOW + 9_500)
    assert plan(c, NOW + 9_500).actions == (Requeue("liar", Why.ORDER, "other"),)
    assert plan(cluster(liar, measured("longer", left=7_680), **PROGRESS), NOW + 9_500).actions == ()
    rules = order.ORDERS[Order.PROGRESS]
    doubles = sqrt(15_360 * 10_000) - 500  # GPU-seconds from now
    at = (9_499, 9_500, doubles - 1, doubles)
    assert [rules.group(liar, NOW + s, SETTINGS) for s in at] == [
        0,
        7_680,
        7_680,
        15_360,
    ]
    assert rules.leaves_at(liar, NOW + 9_500, SETTINGS) == pytest.approx(NOW + doubles)
    gain = rules.gain_gpu_s(replace(liar, attained_gpu_s=10_000.0), NOW, SETTINGS)
    assert gain == pytest.approx(doubles - 9_500)
    early = replace(liar, attained_gpu_s=8.0, trusted_until_gpu_s=8.0)
    assert rules.gain_gpu_s(early, NOW, SETTINGS) == 92, "it stays in the first queue for so long"


def test_a_job_without_a_measure_counts_as_longer_the_longer_it_runs():
    rules = order.ORDERS[Order.PROGRESS]
    silent = stops("silent", "0", attained_at=NOW, attained_gpu_s=500.0)
    at = [0, 599_499, 599_500, 1_199_499, 1_199_500]
    assert [rules.group(silent, NOW + s, SETTINGS) for s in at] == [3e5, 3e5, 6e5, 6e5, 1.2e6]
    assert [rules.leaves_at(silent, NOW + s, SETTINGS) - NOW for s in at[1:4]] == [
        599_500,
        1_199_500,
        1_199_500,
    ]
    assert rules.entered_at(silent, NOW + 700_000, SETTINGS) == NOW + 599_500
    none = replace(SETTINGS, las_thresholds_gpu_s=())
    assert rules.group(silent, NOW, none) == 0


def test_only_a_running_job_leaves_its_group():
    rules = order.ORDERS[Order.PROGRESS]
    waiting = measured("a", left=960, attained_at=NOW)
    assert rules.gain_gpu_s(stops("c", attained_gpu_s=40.0), NOW, SETTINGS) == 60
    assert rules.leaves_at(waiting, NOW, SETTINGS) is None
    young = train("b", 1000, "0", attained_gpu_s=40.0, attained_at=NOW, state=State.RUNNING)
    assert rules.leaves_at(young, NOW, SETTINGS) == NOW + 60


def test_a_preemption_gains_what_is_left_of_a_measured_job():
    cost = PROGRESS | {"preempt_cost_s": 300.0}
    long = stops("long", "0", attained_gpu_s=500.0)
    assert actions(cluster(long, measured("short", left=240), **cost)) == []
    assert actions(cluster(long, measured("short", left=480), **cost)) == [
        Requeue("long", Why.ORDER, "short")
    ]
