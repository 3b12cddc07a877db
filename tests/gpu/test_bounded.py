"""Driver calls that never return cost one thread, and refuse the next caller at once."""

from __future__ import annotations

import threading

import pytest

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT, BoundedWorker
from tests.waiting import PATIENCE_S


def test_a_call_answers_or_raises_what_it_raised() -> None:
    worker = BoundedWorker("x")
    assert worker.call("answer", lambda: 42, 30) == 42
    with pytest.raises(KeyError):
        worker.call("raise", lambda: {}["nothing"], 30)
    assert worker.stuck_in == ""


def test_a_call_that_hangs_is_left_behind_and_the_lane_refuses_until_it_returns() -> None:
    worker, release = BoundedWorker("x"), threading.Event()
    with pytest.raises(DeviceError) as hung:
        worker.call("hang", lambda: release.wait(120), 0.05)
    assert (hung.value.call, hung.value.code) == ("hang", TIMED_OUT)
    before = threading.active_count()
    for _ in range(10):
        with pytest.raises(DeviceError, match="hang has not returned"):
            worker.call("next", lambda: 1, 30)
    assert threading.active_count() <= before
    release.set()
    for _ in range(1000):
        if not worker.stuck_in:
            break
        threading.Event().wait(0.01)
    assert worker.call("again", lambda: 2, 30) == 2


def test_callers_of_one_lane_wait_their_turn() -> None:
    worker, together = BoundedWorker("x"), []
    inside = threading.Semaphore(1)

    def alone() -> None:
        together.append(inside.acquire(blocking=False))
        inside.release()

    threads = [threading.Thread(target=worker.call, args=("alone", alone, 30)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert together == [True] * 20


def test_a_call_that_was_begun_is_waited_for_apart() -> None:
    worker, release = BoundedWorker("x"), threading.Event()
    job = worker.begin("slow", lambda: release.wait(120) and 42)
    assert not job.done.wait(0.02)
    # Not yet given up: another caller waits its turn, bounded, and nothing is called stuck.
    with pytest.raises(DeviceError, match="x is busy"):
        worker.call("next", lambda: 1, 30, wait_s=0.02)
    assert worker.stuck_in == ""
    assert worker.abandon(job, 3).code == TIMED_OUT
    with pytest.raises(DeviceError, match="slow has not returned"):
        worker.begin("next", lambda: 1)
    release.set()
    assert job.done.wait(PATIENCE_S)
    assert job.result() == 42
    assert worker.begin("after", lambda: 7).done.wait(PATIENCE_S)
