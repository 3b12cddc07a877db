"""Remaining work by progress reports: when it counts, and for how long."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.measure import Measure, Report, after, on, rounded, withdrawn
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
    assert (found.left_gpu_s, found.ends_gpu_s) == (9_000, 10_000)
    assert found.remaining_at(1_500) == 8_500
    assert found.remaining_at(10_000) is None, "overdue"
    assert measure(*reports((0, 0))).remaining_at(10) is None


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


def test_a_job_that_begins_to_report_late_counts_with_all_of_its_work_at_first():
    """It is left with 12,000 of 32,000 GPU-seconds by its first estimate; then with 6,000."""
    late = reports((16_000, 0), (20_000, 25), (26_000, 62.5))
    found = measure(*late[:2])
    assert (found.left_gpu_s, found.late) == (12_000, pytest.approx(32 / 12))
    assert on(train("j", 1000), found).left_gpu_s == rounded(32_000)
    half = measure(*late)
    assert (half.left_gpu_s, half.late) == (6_000, found.late)
    assert on(train("j", 1000), half).left_gpu_s == rounded(16_000)


def test_an_attempt_that_begins_at_a_checkpoint_is_measured_from_there():
    found = measure(*reports((0, 50), (1_000, 60)))
    assert found.left_gpu_s == 4_000


@pytest.mark.parametrize("again", [(3_000, 1.0, 100.0), (3_000, 20.0, 200.0)])
def test_a_measured_total_that_begins_again_or_changes_is_an_inner_one(again):
    at, done, total = again
    told = [*reports((0, 0), (1_000, 10)), *reports((at, done), total=total)]
    found = measure(*told)
    assert (found.inner, found.left_gpu_s, found.ends_gpu_s) == (True, None, 10_000)
    assert on(train("j", 1000), found) == train("j", 1000)
    assert after(found, reports((9_000, 90), total=total)[0]) == found


def test_a_bar_that_begins_again_early_is_measured_from_there():
    found = measure(*reports((0, 0), (100, 99), (200, 0), (1_200, 10)))
    assert found.left_gpu_s == 9_000


def test_a_report_that_is_withdrawn_early_leaves_nothing_and_the_next_total_is_measured():
    first = measure(*reports((0, 0), (100, 99), total=99))
    assert withdrawn(first, attempt=1, attained_gpu_s=600, gpus=1) is None
    assert withdrawn(None, attempt=1, attained_gpu_s=600, gpus=1) is None
    again = reports((700, 0), (1_700, 10))
    assert after(after(None, again[0]), again[1]).left_gpu_s == 9_000


@pytest.mark.parametrize(("told", "at"), [([(0, 0), (1_000, 10)], 1_000), ([(0, 0)], 601)])
def test_an_attempt_whose_reports_are_withdrawn_late_is_not_measured(told, at):
    found = withdrawn(measure(*reports(*told)), attempt=1, attained_gpu_s=at, gpus=1)
    assert (found.inner, found.left_gpu_s) == (True, None)
    assert on(train("j", 1000), found) == train("j", 1000)
    assert after(found, reports((9_000, 90))[0]) == found


def test_an_attempt_withdraws_only_its_own_reports():
    first = measure(*reports((0, 0), (1_000, 10)))
    assert withdrawn(first, attempt=2, attained_gpu_s=1_000, gpus=1) is first
    again = after(first, reports((1_000, 10), attempt=2)[0])
    assert withdrawn(again, attempt=2, attained_gpu_s=1_000, gpus=1).left_gpu_s is None


def test_inner_bars_measure_nothing_and_are_no_lie():
    told = reports(
        (0, 0),
        *((at, done) for epoch in range(20) for at, done in [(epoch * 500, 1), (epoch * 500 + 499, 99)]),
    )
    found = measure(*told)
    assert (found.inner, found.left_gpu_s) == (True, None)


@pytest.mark.parametrize(("done", "left", "ends"), [(11.0, 32_363.6, 10_000), (90.0, 444.44, 4_444.44)])
def test_a_job_is_held_to_the_least_of_its_estimates(done, left, ends):
    """10,000 GPU-seconds first; then 36,000, and then 4,400."""
    found = measure(*reports((0, 0), (1_000, 10), (4_000, done)))
    assert (found.left_gpu_s, found.ends_gpu_s) == pytest.approx((left, ends), rel=1e-4)
    assert on(train("j", 1000), found).trusted_until_gpu_s == pytest.approx(1.05 * ends, rel=1e-4)


def test_work_that_is_done_at_the_first_estimate_is_no_late_one():
    found = measure(*reports((0, 0), (1_000, 100)))
    assert (found.left_gpu_s, found.late, found.remaining_at(1_000)) == (0, 1, None)


def test_a_new_attempt_begins_where_it_says_and_its_rate_is_measured_anew():
    first = measure(*reports((0, 0), (1_000, 10), (5_000, 50)))
    again = after(first, reports((5_000, 40), attempt=2)[0])
    assert again.left_gpu_s == 6_000, "at the rate of the first attempt"
    faster = after(again, reports((6_000, 60), attempt=2)[0])
    assert faster.left_gpu_s == 2_000


def test_a_new_attempt_with_another_total_is_not_measured_at_first():
    first = measure(*reports((0, 0), (1_000, 10)))
    again = after(first, reports((1_000, 0), total=90, attempt=2)[0])
    assert (again.left_gpu_s, again.ends_gpu_s) == (None, None)
    assert after(again, reports((2_000, 10), total=90, attempt=2)[0]).left_gpu_s == 8_000


def test_attempts_do_not_prolong_the_first_estimate_beyond_the_work_that_they_lost():
    found = measure(*reports((0, 0), (1_000, 99)))
    for attempt in range(2, 6):
        found = after(found, reports((attempt * 400, 99), attempt=attempt)[0])
    assert (found.left_gpu_s, found.ends_gpu_s) == pytest.approx((1_000 / 99, 100_000 / 99))
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
    assert (found.left_gpu_s, found.trusted_until_gpu_s) == (7_680, 10_500)
    assert on(found, None) == lease
    assert on(lease, None) is lease


def test_work_that_begins_again_counts_as_what_it_is():
    """It was measured late; then it is stopped, and begins again with all of its work."""
    late = measure(*reports((0, 0), (90_000, 90)))
    assert (late.left_gpu_s, late.late) == (10_000, 10)
    again = after(late, *reports((95_000, 0), attempt=2))
    assert (again.left_gpu_s, again.late) == (pytest.approx(100_000), 1.0)
    further = after(late, *reports((95_000, 95), attempt=2))
    assert (further.left_gpu_s, further.late) == (pytest.approx(5_000), 10)


def test_an_attempt_with_another_total_is_estimated_anew():
    old = reports((0, 0), (5_000, 50))
    new = reports((9_000, 0), (10_000, 10), total=101, attempt=2)
    found = measure(*old, *new)
    assert found.ends_gpu_s == pytest.approx(10_000 + 9_100)
