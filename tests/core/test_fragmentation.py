"""FGD, with examples that can be worked out by hand."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.fragmentation import Task, Workload

HALF, WHOLE, PAIR = (Task(gpu_milli=500), Task(gpu_milli=1000), Task(gpu_milli=1000, gpu_count=2))


@pytest.mark.parametrize(
    ("tasks", "gpus", "fragment"),
    [
        ([(HALF, 1)], (1000, 1000), 0),
        ([(WHOLE, 1)], (400, 1000), 400),  # what lies on a device that is too small
        ([(PAIR, 1)], (400, 1000), 1400),  # it does not fit at all
        ([(PAIR, 1)], (1000, 1000), 0),
        ([(HALF, 1), (WHOLE, 1)], (600,), 300),  # half of the workload cannot use it
        ([(HALF, 3), (WHOLE, 1)], (600,), 150),
    ],
)
def test_a_fragment_is_what_the_workload_cannot_use(tasks, gpus, fragment):
    assert Workload(tasks).fragment_milli(gpus) == fragment


def test_cpu_and_model_decide_too():
    needy = Task(gpu_milli=500, cpu_milli=8000, models=frozenset({"A10"}))
    workload = Workload([(needy, 1.0)])
    assert workload.fragment_milli((1000,), 8000, "A10") == 0
    assert workload.fragment_milli((1000,), 7999, "A10") == 1000
    assert workload.fragment_milli((1000,), 8000, "T4") == 1000
    assert Workload([(Task(gpu_milli=0, gpu_count=0), 1.0)]).fragment_milli((1000,)) == 1000


def test_scores_are_whole_numbers_so_that_small_differences_tie():
    workload = Workload([(HALF, 1)])
    assert workload.score(0, 0) == 50
    assert (workload.score(1000, 0), workload.score(0, 1000)) == (73, 26)
    assert workload.score(10, 0) == workload.score(20, 0)


def test_a_task_goes_where_it_leaves_most_for_the_workload():
    workload = Workload([(WHOLE, 1)])
    assert workload.place(HALF, (1000, 500)) == (62, (1,))
    assert workload.place(HALF, (1000, 400)) == (37, (0,))


def test_several_gpus_are_the_tightest_that_do():
    wide = Task(gpu_milli=600, gpu_count=2)
    assert Workload([(HALF, 1)]).place(wide, (1000, 700, 600))[1] == (2, 1)


def test_devices_that_look_alike_are_tried_once():
    assert Workload([(HALF, 1)]).place(HALF, (1000, 1000, 1000))[1] == (0,)


def test_what_does_not_fit_has_no_place():
    workload = Workload([(HALF, 1)])
    assert workload.place(PAIR, (1000, 900)) is None
    assert workload.place(Task(gpu_milli=1, cpu_milli=5), (1000,), cpu_milli=4) is None
    assert workload.place(Task(gpu_milli=1, models=frozenset({"T4"})), (1000,), model="A10") is None
    assert workload.place(Task(gpu_milli=1, models=frozenset({"T4"})), (1000,), model="T4") is not None
    assert workload.place(Task(gpu_milli=0, gpu_count=0, cpu_milli=5), (1000,), cpu_milli=5) == (50, ())
