"""FGD, with examples that can be worked out by hand."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.fragmentation import Task, Workload, best_fit_on_node

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


def test_scores_are_whole_numbers_so_that_small_differences_tie():
    workload = Workload([(HALF, 1)])
    assert workload.score(0, 0) == 50
    assert (workload.score(1000, 0), workload.score(0, 1000)) == (73, 26)
    assert workload.score(10, 0) == workload.score(20, 0)


def test_a_lease_goes_where_it_leaves_most_for_the_workload():
    workload = Workload([(WHOLE, 1)])
    assert best_fit_on_node(workload, (1000, 500), (500, 500)) == ((-62, 0, 1500), [1])
    assert best_fit_on_node(workload, (1000, 400), (500, 500)) == ((-37, 500, 1400), [0])


def test_devices_with_the_same_capacity_tie():
    assert best_fit_on_node(Workload([(HALF, 1)]), (1000, 1000), (500, 500))[1] == [0, 1]


def test_a_lease_does_not_fit_where_no_device_has_enough_or_suits():
    workload = Workload([(HALF, 1)])
    assert best_fit_on_node(workload, (400, 1000), (500, None)) is None


def test_tasks_of_one_kind_count_together():
    assert Workload([(HALF, 1), (HALF, 1), (WHOLE, 2)]).fragment_milli((600,)) == 300
