"""When will it start: a range out of three futures."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.estimate import Estimate, estimates, remaining_s
from jupyter_gpushare.core.model import CheckpointMode, Order
from tests.core.build import ASLEEP, NOW, build, cluster, train

# Quartiles: 300, 500, 800.
RAN_S = [100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0]


def queue(*leases, **more):
    return cluster(*leases, **{"order": Order.FIFO} | more)


def running(id="on", ran_s=0.0, **more):
    return train(
        id, 1000, "0", **{"attained_gpu_s": ran_s, "attained_at": NOW, "granted_at": NOW - ran_s} | more
    )


def waiting(id="next", **more):
    return train(id, 1000, **{"queued_at": NOW, "waits_since_at": NOW} | more)


def test_fewer_than_ten_samples_say_nothing():
    assert estimates(queue(running(), waiting()), NOW, RAN_S[:9]) == {}
    assert estimates(queue(running()), NOW, RAN_S) == {}


def test_a_job_behind_another_waits_for_as_long_as_jobs_take():
    assert estimates(queue(running(), waiting()), NOW, RAN_S) == {"next": Estimate(300, 500, 800)}


def test_the_second_in_line_waits_for_two():
    second = waiting("then", queued_at=NOW + 1)
    found = estimates(queue(running(), waiting(), second), NOW, RAN_S)
    assert found["then"] == Estimate(600, 1000, 1600)


def test_of_a_job_that_ran_for_long_less_is_left():
    assert remaining_s(650.0, RAN_S, 50) == 150
    assert remaining_s(1000.0, RAN_S, 50) == 1000
    found = estimates(queue(running(ran_s=650.0), waiting()), NOW, RAN_S)
    assert found["next"] == Estimate(50, 150, 250)


def test_an_idle_session_is_lent_after_its_timeout_and_a_busy_one_never():
    idle = build("nb", 1000, "0", idle_s=0.0)
    assert estimates(queue(idle, waiting()), NOW, RAN_S) == {"next": Estimate(600, 600, 600)}
    busy = build("nb", 1000, "0")
    assert estimates(queue(busy, waiting()), NOW, RAN_S) == {}


def test_a_job_that_sleeps_is_told_when_it_goes_on():
    asleep = train("z", 1000, "0", state=ASLEEP, survival=CheckpointMode.SUSPEND)
    found = estimates(queue(running(), asleep), NOW, RAN_S)
    assert found == {"z": Estimate(300, 500, 800)}


def test_an_estimate_is_bounded_in_work():
    jobs = [waiting(f"w{n}", queued_at=NOW + n) for n in range(50)]
    found = estimates(queue(running(), *jobs), NOW, RAN_S, most_events=20)
    assert 5 < len(found) < 50


@pytest.mark.parametrize("percent", [25, 75])
def test_what_is_left_is_one_of_the_samples(percent):
    assert remaining_s(0.0, RAN_S, percent) in RAN_S
