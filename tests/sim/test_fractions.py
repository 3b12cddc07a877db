"""Filling a cluster with parts of GPUs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import Cluster, State
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.sim.fractions import (
    Fragments,
    arrivals,
    best_fit,
    fgd,
    fill,
    options,
    planner,
    score,
)
from jupyter_gpushare.sim.traces import Stock, TracePod, read_nodes, read_pods
from tests import traces
from tests.core.build import NOW, cluster, device, train

ANY = frozenset[str]()


def pod(gpus, milli=1000, cpu=0, memory=0, models=ANY):
    return TracePod(gpus, milli if gpus else 0, cpu, memory, models)


def stock(*gpus, cpu=1000, memory=1000, model="T4"):
    return Stock(model, cpu, memory, gpus)


def test_a_fraction_may_go_to_each_gpu_with_capacity_once_per_level():
    assert options(stock(200, 500, 500, 1000), pod(1, 300)) == [
        stock(200, 200, 500, 1000),
        stock(200, 500, 500, 700),
    ]


def test_several_gpus_are_taken_whole():
    assert options(stock(900, 1000, 1000), pod(2)) == [stock(0, 0, 900)]
    assert options(stock(900, 900, 1000), pod(2)) == []


@pytest.mark.parametrize(
    "wanted",
    [pod(0, 0, cpu=1001), pod(0, 0, memory=1001), pod(1, 500, models=frozenset({"A10"})), pod(3)],
)
def test_cpu_memory_model_and_number_bind(wanted):
    assert options(stock(1000, 1000), wanted) == []


def test_cpu_alone_leaves_the_gpus_as_they_are():
    assert options(stock(1000), pod(0, 0, cpu=400, memory=1)) == [stock(1000, cpu=600, memory=999)]


def test_best_fit_takes_the_tightest_gpu_and_prefers_the_fuller_node():
    full, empty = best_fit(stock(400, 1000), pod(1, 300)), best_fit(stock(1000, 1000), pod(1, 300))
    assert full is not None
    assert empty is not None
    assert full[1] == stock(100, 1000)
    assert full[0] < empty[0]


def test_several_gpus_are_taken_where_fewest_are_empty():
    fuller, empty = planner(stock(0, 1000, 1000), pod(2)), planner(stock(1000, 1000, 1000), pod(2))
    assert fuller[0] < empty[0]
    assert fuller[1] == stock(0, 0, 0)
    assert planner(stock(0, 500), pod(2)) is None
    assert planner(stock(1000), pod(0, 0, cpu=1)) == best_fit(stock(1000), pod(0, 0, cpu=1))


# ---- FGD, with examples that can be worked out by hand

HALF, WHOLE, PAIR = pod(1, 500), pod(1), pod(2)


@pytest.mark.parametrize(
    ("load", "gpus", "fragment"),
    [
        ([HALF], (1000, 1000), 0),
        ([WHOLE], (400, 1000), 400),  # what lies on a GPU that is too small
        ([PAIR], (400, 1000), 1400),  # it does not fit at all
        ([PAIR], (1000, 1000), 0),
        ([HALF, WHOLE], (600,), 300),  # half of the load cannot use it
        ([HALF, HALF, HALF, WHOLE], (600,), 150),
    ],
)
def test_a_fragment_is_what_the_load_cannot_use(load, gpus, fragment):
    assert Fragments(load).milli(gpus) == fragment


def test_scores_are_whole_numbers_so_that_small_differences_tie():
    assert score(0, 0) == 50
    assert (score(1000, 0), score(0, 1000)) == (73, 26)
    assert score(10, 0) == score(20, 0)


def test_fgd_keeps_pieces_that_others_need():
    # Halves and wholes come equally often.  Of 500 and 1000 free, whole ones cannot use 500: a
    # fragment of 250 on average.  It goes with the half that fits: int(100 / (1 + e^-0.25)) = 56.
    place = fgd([HALF, WHOLE])
    assert place(stock(500, 1000), HALF) == ((-56, 0, 1500), stock(0, 1000))
    assert place(stock(400, 400), HALF) is None
    assert place(stock(0, 1000, 1000), PAIR) == planner(stock(0, 1000, 1000), PAIR)
    # Where only wholes come, a half leaves least on a GPU that is broken already.
    assert fgd([WHOLE])(stock(500, 1000), HALF) == ((-62, 0, 1500), stock(0, 1000))


def devices(*free: tuple[int, ...]) -> Cluster:
    """One node per tuple, with so much free of each GPU."""
    gpus, held = [], []
    for n, node in enumerate(free):
        for m, value in enumerate(node):
            gpus.append(device(len(gpus), uuid=f"n{n}g{m}", node=f"n{n}"))
            if value < 1000:
                lease = train(f"h{n}{m}", 1000 - value)
                held.append(replace(lease, devices=(f"n{n}g{m}",), state=State.RUNNING))
    return cluster(*held, gpus=gpus)


@pytest.mark.parametrize("milli", [250, 500, 600, 1000])
def test_the_simulator_places_as_the_planner_does(milli):
    """Same node, same device."""
    free = ((250, 1000), (500, 750), (500, 500, 1000), (1000, 1000))
    c = devices(*free)
    found = {n: planner(stock(*node), pod(1, milli)) for n, node in enumerate(free)}
    best = min((choice[0], f"n{n}") for n, choice in found.items() if choice)[1]
    (grant,) = plan(replace(c, leases=(*c.leases, train("job", milli))), NOW).actions
    assert grant.devices[0][:2] == best
    number = int(best[1:])
    left = list(free[number])
    left[int(grant.devices[0][-1])] -= milli
    assert found[number][1].gpu_milli == tuple(sorted(left))


def test_pods_are_drawn_until_the_load_is_reached():
    coming = arrivals([pod(1, 500)], 2000, random.Random(1))
    assert len(coming) == 6  # 1.3 times 2 GPUs are 2.6: the sixth half crosses it
    assert arrivals([pod(0)], 2000, random.Random(1)) == [pod(0)]


def test_what_does_not_fit_is_dropped_and_the_curve_says_so():
    filled = fill([stock(1000, 1000)], [pod(1), pod(1), pod(1)], best_fit, seed=1)
    assert (filled.pods, filled.dropped, filled.gpus) == (3, 1, 2)
    assert filled.requested_percent == (50.0, 100.0, 150.0)
    assert filled.allocated_percent == (50.0, 100.0, 100.0)
    assert (filled.allocated_at(100), filled.allocated_at(999)) == (100.0, 100.0)


@pytest.fixture(scope="module")
def openb(trace):
    return read_nodes(trace("fractions_openb_gpu_nodes")), read_pods(trace("fractions_openb_pods_default"))


def test_openb_fills_as_the_benchmark_says(openb):
    """Mean of 10 seeds: the planner 93.3, best fit 92.9 (published: 92.86), FGD on GPUs alone 93.3."""
    nodes, pods = openb
    ours, theirs, gradient = (
        fill(nodes, pods, placement, 42).allocated_at(100) for placement in (planner, best_fit, fgd(pods))
    )
    if not traces.FOLDER:  # made-up pods leave little to choose
        assert min(ours, gradient) >= theirs - 1 > 94
        return
    assert ours == pytest.approx(93.3, abs=0.4)
    assert theirs == pytest.approx(92.86, abs=0.4)
    assert gradient == pytest.approx(93.3, abs=0.4)


def test_a_seed_gives_the_same_run_again(openb):
    nodes, pods = openb[0][:40], openb[1][:400]
    assert fill(nodes, pods, None, 5) == fill(nodes, pods, None, 5)
    assert fill(nodes, pods, None, 5) != fill(nodes, pods, None, 6)
