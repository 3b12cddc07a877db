"""The engine: what happens when, on one line per lease."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.idle import PauseHistory, adaptive_timeout_s
from jupyter_gpushare.core.model import (
    CheckpointMode,
    Cluster,
    Lease,
    Order,
    Plan,
    Resume,
    Settings,
    State,
    Why,
)
from jupyter_gpushare.core.replay import Cell, CellRun, Costs, Replay, ReplayWatcher
from jupyter_gpushare.core.simulated_lease import SimulatedLease
from tests.core.build import GIB, build, device, project, train


class Story(ReplayWatcher):
    """What happened, as lines like "10 a pending->granted"."""

    def __init__(self) -> None:
        self.queues: list[str] = []
        self.cells: list[CellRun] = []
        self.leases: dict[str, Lease] = {}

    def changed(self, now, before, after):
        self.leases[after.id] = after
        if before is None or before.state is not after.state:
            was = f"{before.state}->" if before else ""
            self.queues.append(f"{now:g} {after.id} {was}{after.state}")

    def began(self, now, run):
        self.cells.append(run)

    def at(self, id: str, state: State) -> list[float]:
        """The moments at which a lease came into a state."""
        ends = f"{state}"
        found = [line.split() for line in self.queues]
        return [float(now) for now, name, change in found if name == id and change.split("->")[-1] == ends]

    def ended(self, id: str) -> float:
        (moment,) = self.at(id, State.RELEASED)
        return moment


@pytest.fixture
def story():
    return Story()


def world(story, *, gpus=1, projects=None, costs=None, now=0.0, adaptive=False, **settings):
    devices = [device(n) for n in range(gpus)]
    projects = projects or [project("p", len(devices))]
    given = {"idle_timeout_s": 60.0} | settings
    costs = costs or Costs()
    c = Cluster(devices=tuple(devices), projects=tuple(projects), leases=(), settings=Settings(**given))
    return Replay(c, costs, now=now, adaptive=adaptive, watcher=story)


def job(id, gpus=1, at=0.0, **more):
    given = {
        "device_count": gpus,
        "survival": CheckpointMode.SIGTERM,
        "submitted_at": at,
        "consolidate": False,
    }
    return train(id, 1000, **given | more)


def session(id="nb", **more):
    return build(id, 1000, **{"used_bytes": 8 * GIB} | more)


# -- jobs


def test_a_job_starts_when_it_comes_and_ends_when_its_work_is_done(story):
    r = world(story)
    r.add_job(job("a", at=10), 60)
    assert r.run() is False
    assert story.queues == [
        "10 a pending",
        "10 a pending->running",
        "70 a running->released",
    ]
    assert (r.now, r.rounds, r.decisions) == (70, 1, 1)


def test_a_job_without_capacity_starts_when_there_is_some(story):
    r = world(story, order=Order.FIFO)
    r.add_job(job("a"), 50)
    r.add_job(job("b", at=10), 5)
    r.run()
    assert (story.ended("a"), story.ended("b")) == (50, 55)


def test_no_session_is_suspended_when_no_job_waits(story):
    r = world(story, gpus=2)
    r.add_job(job("a"), 50)
    r.add_job(job("b"), 60)
    r.run()
    assert r.rounds == 1


def test_a_preempted_job_goes_on_from_where_it_was_and_its_restart_takes_time(story):
    r = world(
        story, order=Order.LAS, las_thresholds_gpu_s=(100.0,), costs=Costs(restart_s=30), preempt_cost_s=30
    )
    r.add_job(job("long"), 1000)
    r.add_job(job("new", at=500), 80)
    r.run()
    assert story.at("long", State.PENDING) == [0, 500]
    assert story.ended("new") == 580
    assert story.at("long", State.RUNNING) == [0, 610]
    assert story.ended("long") == 610 + 500


@pytest.mark.parametrize("at", [0, 10])
def test_a_demotion_comes_without_any_event(story, at):
    r = world(story, order=Order.LAS, las_thresholds_gpu_s=(100.0,))
    r.add_job(job("a"), 150)
    r.add_job(job("b", at=at), 50)
    r.run()
    assert story.at("a", State.PENDING) == [0, 100]
    assert (story.ended("b"), story.ended("a")) == (150, 200)


def test_without_a_checkpoint_a_job_begins_anew(story):
    r = world(story, order=Order.LAS, las_thresholds_gpu_s=(100.0,))
    r.add_job(job("a", survival=CheckpointMode.NONE), 150)
    r.add_job(job("b", at=10), 50)
    r.run()
    assert story.ended("a") == 150 + 150


def test_grace_passes_before_the_capacity_is_free(story):
    r = world(story, order=Order.LAS, las_thresholds_gpu_s=(100.0,), grace_s=7)
    r.add_job(job("a"), 150)
    r.add_job(job("b", at=10), 50)
    r.run()
    assert story.at("b", State.RUNNING) == [107]


def test_what_a_job_has_attained_is_counted_when_it_stops(story):
    r = world(story, gpus=2, order=Order.LAS, las_thresholds_gpu_s=(100.0,))
    r.add_job(job("a", gpus=2), 80)
    r.add_job(job("b", gpus=2, at=10), 10)
    r.run()
    assert story.at("a", State.PENDING) == [0, 50]
    assert story.leases["a"].attained_gpu_s == 160


# -- sessions


def test_cells_run_one_after_the_other_and_the_last_ends_the_session(story):
    r = world(story)
    r.add_session(session(), [Cell(10, 5), Cell(12, 3), Cell(100, 1)])
    r.run()
    assert [(c.due_at, c.waited_s, c.lent, c.crowded) for c in story.cells] == [
        (10, 0, False, False),
        (15, 0, False, False),
        (100, 0, False, False),
    ]
    assert story.leases["nb"].state is State.RELEASED
    assert story.ended("nb") == 101


def test_an_idle_session_lends_its_gpu_and_gets_it_back(story):
    r = world(story, costs=Costs(copy_bytes_per_s=4 * GIB), projects=[project("p", 1), project("q", 0)])
    r.add_session(session(), [Cell(0, 10), Cell(200, 10)])
    r.add_job(job("j", at=5, project="q", survival=CheckpointMode.SUSPEND, used_bytes=4 * GIB), 500)
    r.run()
    assert story.at("nb", State.SUSPENDING) == [70]  # idle since 10, for 60
    assert story.at("j", State.RUNNING)[0] == 72
    assert story.at("j", State.SUSPENDING) == [200]
    assert story.at("j", State.SUSPENDED) == [201]
    assert story.at("nb", State.RUNNING)[-1] == 203
    assert (story.cells[1].due_at, story.cells[1].waited_s, story.cells[1].lent) == (200, 3, True)
    # Cell 203-213; the session ends with it; the job goes on after a copy of 1 s.
    assert story.ended("nb") == 213
    assert story.ended("j") == 214 + 500 - 128


def test_a_session_that_is_wanted_while_it_goes_to_sleep_wakes_at_once(story):
    r = world(story, costs=Costs(copy_bytes_per_s=GIB), projects=[project("p", 1), project("q", 0)])
    r.add_session(session(), [Cell(0, 10), Cell(72, 10)])
    r.add_job(job("j", at=20, project="q"), 500)
    r.run()
    assert story.at("nb", State.SUSPENDED) == [78]
    assert story.cells[1].waited_s == 72 + 6 + 8 - 72
    assert story.cells[1].lent


def test_a_session_starts_asleep_where_its_capacity_is_lent_and_wakes(story):
    r = world(story, projects=[project("p", 1), project("q", 0)], grace_s=5)
    r.add_job(job("j", project="q"), 500)
    r.add_session(session(), [Cell(100, 10)])
    r.run()
    assert story.at("nb", State.SUSPENDED) == [100]
    assert (story.cells[0].waited_s, story.cells[0].lent, story.cells[0].crowded) == (5, False, False)


def test_a_session_that_finds_all_claimed_waits_for_others(story):
    r = world(story)
    r.add_session(session("a"), [Cell(0, 10), Cell(50, 10)])
    r.add_session(session("b"), [Cell(20, 10)])
    r.run()
    assert [(c.lease.id, c.waited_s, c.crowded) for c in story.cells] == [
        ("a", 0, False),
        ("a", 0, False),
        ("b", 40, True),
    ]


def test_a_busy_session_on_borrowed_capacity_is_suspended_in_its_cell_and_goes_on(story):
    r = world(story, projects=[project("p", 0), project("q", 1)], costs=Costs(copy_bytes_per_s=8 * GIB))
    r.add_session(session(), [Cell(0, 100)])
    r.add_job(job("j", at=30, project="q"), 20)
    r.run()
    assert story.at("nb", State.SUSPENDING) == [30]
    assert story.ended("j") == 51
    assert story.at("nb", State.RUNNING)[-1] == 52
    assert story.ended("nb") == 52 + 70


# -- bounds


def test_a_run_can_be_bounded_in_time_and_events_and_goes_on(story):
    r = world(story)
    r.add_job(job("a"), 50)
    r.add_job(job("b", at=100), 50)
    assert r.run(until_at=60) is True
    assert story.ended("a") == 50
    assert r.run(max_events=1) is True
    assert r.now == 100
    assert r.run() is False
    assert story.ended("b") == 150


def test_a_watcher_may_end_the_run(story):
    r = world(story)
    r.add_job(job("a"), 50)
    story.changed = lambda now, before, after: setattr(r, "stopped", True)
    assert r.run() is False
    assert r.now == 0


def test_a_plan_that_never_settles_is_an_error_and_not_a_hang(story, monkeypatch):
    r = world(story)
    r.add_job(job("a"), 50)
    r.run(until_at=1)
    monkeypatch.setattr(r, "_carry_out", lambda action: setattr(r, "_due", True))
    r.add_job(job("b", at=2), 50)
    monkeypatch.setattr("jupyter_gpushare.core.replay.MAX_ROUNDS", 5)
    monkeypatch.setattr(r._planner, "plan", lambda now: Plan((Resume("b", Why.CAPACITY_BACK),)))
    with pytest.raises(AssertionError, match="does not settle at 2"):
        r.run()


def test_an_adaptive_timeout_is_learned_from_the_pauses_of_the_session(story):
    r = world(story, adaptive=True)
    cells = [Cell(0, 60), Cell(30, 60), Cell(4000, 10), Cell(4010, 10), Cell(9000, 1)]
    r.add_session(session(), cells)
    timeouts = {}
    story.changed = lambda now, before, after: timeouts.update({now: after.idle_timeout_s})
    r.run(until_at=8000)
    first = PauseHistory().after(0.0, 120.0)
    second = first.after(4000 - 120.0, 20.0)
    assert timeouts[120] == adaptive_timeout_s(first, 1.0)
    assert timeouts[4020] == adaptive_timeout_s(second, 1.0)


def test_a_job_that_reports_is_ordered_by_what_it_has_left(story):
    """Both received 8,000 GPU-seconds when the third ends; one has 1,000 left and the other 30,000."""
    r = world(story, gpus=2, order=Order.PROGRESS)
    r.add_job(train("long", 1000, submitted_at=0), 38_000, lambda done: done)
    r.add_job(train("short", 1000, submitted_at=0), 9_000, lambda done: done)
    r.add_job(train("new", 1000, submitted_at=8_000), 2_000)
    r.run()
    assert (story.at("long", State.SUSPENDED), story.at("short", State.SUSPENDED)) == ([8_000], [])
    assert story.leases["short"].left_gpu_s == 0
    assert story.ended("short") == 9_000


def test_a_requeued_job_reports_where_it_begins_again(story):
    r = world(story, order=Order.PROGRESS)
    job = train("long", 1000, submitted_at=0, survival=CheckpointMode.SIGTERM)
    r.add_job(job, 38_000, lambda done: done)
    r.add_job(train("new", 1000, submitted_at=8_000), 1_000)
    r.run(until_at=9_100)
    assert story.leases["long"].left_gpu_s == 30_720
    r.run()
    assert story.ended("long") == 39_000


def test_a_job_that_reports_nothing_has_no_measure():
    assert SimulatedLease(train("a", 1000), 10.0).report(0.0) == train("a", 1000)
