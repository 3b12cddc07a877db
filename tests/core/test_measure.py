"""Remaining work by progress reports: when it counts, and when a job is doubted."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.measure import Doubt, Measure, Report, after, on, rounded
from tests.core.build import train


def reports(
    *told: tuple[float, float], total: float = 100.0, gpus: float = 1.0, attempt: int = 1
) -> list[Report]:
    """Reports of an attempt: each of (attained GPU-seconds, done)."""
    return [
        Report(attempt=attempt, attained_gpu_s=at, gpus=gpus, done=done, total=total) for at, done in told
    ]


def measure(*told: Report) -> Measure | None:
    found = None
    for report in told:
        found = after(found, report)
    return found


def test_what_is_left_follows_from_the_rate_of_the_attempt():
    found = measure(*reports((0, 0), (1_000, 10)))
    assert (found.left_gpu_s, found.ends_gpu_s, found.doubt) == (9_000, 10_000, None)
    assert found.left_at(1_500) == 8_500
    assert found.left_at(10_500) == 0


@pytest.mark.parametrize(("at", "done", "counts"), [(599, 50, False), (600, 50, True), (9_000, 4.9, False)])
def test_progress_counts_after_ten_minutes_and_five_percent(at, done, counts):
    found = measure(*reports((0, 0), (at, done)))
    assert (found.left_gpu_s is not None) is counts


def test_ten_minutes_are_counted_on_each_gpu():
    assert measure(*reports((0, 0), (1_000, 50), gpus=2)).left_gpu_s is None


def test_a_report_without_sense_changes_nothing():
    before = measure(*reports((0, 0)))
    assert after(before, reports((10, 101))[0]) is before
    assert after(None, reports((10, 0), total=0)[0]) is None


def test_a_job_that_begins_to_report_late_is_doubted():
    found = measure(*reports((5_000, 50), (6_000, 60)))
    assert (found.left_gpu_s, found.doubt) == (None, Doubt.LATE)


def test_a_first_report_counts_from_where_it_is_early_or_of_the_first_unit():
    """A notebook of 5 cells, a first epoch of an hour, an attempt that begins at its own checkpoint."""
    for first in (reports((5, 2), total=5), reports((5_000, 1), total=5), reports((0, 50))):
        assert measure(*first).doubt is None
    found = measure(*reports((3_000, 1), (6_000, 2), total=5))
    assert (found.left_gpu_s, found.doubt) == (9_000, None)
    found = measure(*reports((0, 50), (1_000, 60)))
    assert found.left_gpu_s == 4_000


@pytest.mark.parametrize("again", [(3_000, 1.0, 100.0), (3_000, 20.0, 200.0)])
def test_a_measured_total_that_begins_again_or_changes_is_doubted_for_good(again):
    at, done, total = again
    told = [*reports((0, 0), (1_000, 10)), *reports((at, done), total=total), *reports((9_000, 90))]
    assert measure(*told).doubt is Doubt.RESTARTED


def test_a_bar_that_begins_again_early_is_measured_from_there():
    found = measure(*reports((0, 0), (100, 99), (200, 0), (1_200, 10)))
    assert found.left_gpu_s == 9_000


def test_inner_bars_measure_nothing_and_are_no_lie():
    told = reports(
        (0, 0),
        *((at, done) for epoch in range(20) for at, done in [(epoch * 500, 1), (epoch * 500 + 499, 99)]),
    )
    found = measure(*told)
    assert (found.inner, found.left_gpu_s, found.doubt) == (True, None, None)


@pytest.mark.parametrize("done", [11.0, 90.0])
def test_remaining_work_that_grows_or_falls_at_once_is_doubted(done):
    """10,000 GPU-seconds first; then 36,000, and then 4,400."""
    found = measure(*reports((0, 0), (1_000, 10), (4_000, done)))
    assert (found.left_gpu_s, found.doubt) == (None, Doubt.CHANGED)


def test_a_job_that_runs_twice_as_long_as_it_said_is_doubted_with_and_without_a_report():
    found = measure(*reports((0, 0), (1_000, 10)))
    assert (found.left_at(19_999), found.doubt_at(19_999)) == (0, None)
    assert (found.left_at(20_000), found.doubt_at(20_000)) == (None, Doubt.OVERDUE)
    assert after(found, reports((20_000, 99))[0]).doubt is Doubt.OVERDUE


def test_a_new_attempt_begins_where_it_says_and_its_rate_is_measured_anew():
    first = measure(*reports((0, 0), (1_000, 10), (5_000, 50)))
    again = after(first, reports((5_000, 40), attempt=2)[0])
    assert again.left_gpu_s == 6_000, "at the rate of the first attempt"
    faster = after(again, reports((6_000, 60), attempt=2)[0])
    assert faster.left_gpu_s == 2_000


def test_a_new_attempt_with_another_total_is_not_measured_at_first():
    first = measure(*reports((0, 0), (1_000, 10)))
    again = after(first, reports((1_000, 0), total=90, attempt=2)[0])
    assert (again.left_gpu_s, again.doubt) == (None, None)
    assert after(again, reports((2_000, 10), total=90, attempt=2)[0]).left_gpu_s == 8_000


def test_attempts_do_not_prolong_the_first_estimate_beyond_the_work_that_they_lost():
    found = measure(*reports((0, 0), (1_000, 99)))
    for attempt in range(2, 6):
        found = after(found, reports((attempt * 400, 99), attempt=attempt)[0])
    assert (found.left_gpu_s, found.doubt_at(2_021)) == (pytest.approx(1_000 / 99), Doubt.OVERDUE)
    back = after(measure(*reports((0, 0), (1_000, 10))), reports((1_000, 0), attempt=2)[0])
    assert (back.left_gpu_s, back.ends_gpu_s) == (10_000, 11_000)


def test_an_attempt_after_all_work_was_done_is_measured_anew():
    found = measure(*reports((0, 0), (1_000, 100)))
    assert after(found, reports((1_000, 0), attempt=2)[0]).left_gpu_s is None


def test_attempts_of_a_job_that_was_not_measured_begin_anew():
    assert after(measure(*reports((0, 0))), reports((500, 0), attempt=2)[0]).began_gpu_s == 500


def test_the_planner_counts_remaining_work_within_a_factor_of_two():
    assert [rounded(x) for x in (0, 59.9, 60, 119.9, 120, 1_000)] == [0, 0, 60, 60, 120, 960]
    lease = train("j", 1000)
    found = on(lease, measure(*reports((0, 0), (1_000, 10))))
    assert (found.left_gpu_s, found.trusted_until_gpu_s) == (7_680, 20_000)
    assert on(found, None) == lease
    doubted = on(lease, measure(*reports((5_000, 50))))
    assert (doubted.left_gpu_s, doubted.trusted_until_gpu_s) == (0, 0)
    assert on(lease, None) is lease
