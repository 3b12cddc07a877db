"""Two jobs on one GPU in the engine: their speeds, the end of a pair, and what is left of each."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import CheckpointMode, Cluster, Lease, Order, Settings, State
from jupyter_gpushare.core.pairs import ALONE_S, TRIAL_S, Because, PairDecision, Parted
from jupyter_gpushare.core.replay import Costs, Replay
from tests.core.build import GIB, device, project, train
from tests.core.test_replay import Story


class Pairs(Story):
    """What happened, and what a `Replay` says of hosts and guests."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[tuple[float, str, str, PairDecision, Because]] = []
        self.guests: list[tuple[float, str, str]] = []  # who became a guest of whom
        self.done: dict[str, float] = {}
        self.ran_s: dict[tuple[str, str], float] = {}  # by job and its guest

    def changed(self, now, before, after):
        super().changed(now, before, after)
        if (
            after.host
            and after.state is State.RUNNING
            and (before is None or before.state is not after.state)
        ):
            self.guests.append((now, after.id, after.host))

    def ran(self, lease, seconds, speed, guest):
        self.done[lease.id] = self.done.get(lease.id, 0.0) + seconds * speed
        self.ran_s[lease.id, guest] = self.ran_s.get((lease.id, guest), 0.0) + seconds

    def judged(self, now, host, guest, verdict):
        self.verdicts.append((now, host.id, guest.id, verdict.decision, verdict.why))


def world(speeds=(0.95, 0.5), *, gpus=1, order=Order.BACKFILL, costs=None, parted=None, **settings):
    story = Pairs()
    c = Cluster(
        devices=tuple(device(n, movable=True) for n in range(gpus)),
        projects=(project("p", gpus),),
        leases=(),
        settings=Settings(order=order, **settings),
    )
    of = speeds if callable(speeds) or speeds is None else lambda host, guest: speeds
    return Replay(c, costs or Costs(), watcher=story, speeds=of, parted=parted), story


def job(id, at=0.0, gpus=1, **more) -> Lease:
    given = {"share": True, "pair_key": id, "needs_bytes": 16 * GIB, "used_bytes": 16 * GIB, "movable": True}
    given |= {"survival": CheckpointMode.SUSPEND, "device_count": gpus, "submitted_at": at}
    return train(id, 1000, **given | more)


def test_host_and_guest_do_exactly_their_work_at_their_speeds():
    r, story = world()
    r.add_job(job("h"), 10_000)
    r.add_job(job("g", at=1_000), 1_000)
    assert r.run() is False
    assert story.guests == [(1_000, "g", "h")]
    assert story.ended("g") == 1_000 + 1_000 / 0.5
    assert story.ended("h") == pytest.approx(10_000 + 2_000 * 0.05)
    assert story.done == pytest.approx({"h": 10_000, "g": 1_000})
    assert story.ran_s == pytest.approx({("h", ""): 8_100, ("h", "g"): 2_000, ("g", ""): 2_000})
    assert story.leases["g"].attained_gpu_s == pytest.approx(1_000)  # what it got
    assert story.leases["h"].attained_gpu_s == pytest.approx(10_100)
    assert story.verdicts == [(1_000 + TRIAL_S, "h", "g", PairDecision.KEEP, Because.IT_PAYS)]


def test_a_job_is_a_host_once_it_was_watched_alone():
    r, story = world()
    r.add_job(job("h"), 10_000)
    r.add_job(job("g", at=10), 1_000)
    r.add_job(job("next", at=20), 100)
    r.run()
    assert story.guests == [(ALONE_S, "g", "h"), (ALONE_S + 2_000 + ALONE_S, "next", "h")]


@pytest.mark.parametrize(
    "more", [{"share": False}, {"needs_bytes": 70 * GIB}, {"survival": CheckpointMode.SIGTERM}]
)
def test_other_jobs_are_no_guests(more):
    r, story = world()
    r.add_job(job("h"), 2_000)
    r.add_job(job("g", at=1_000, **more), 100)
    r.run()
    assert story.guests == []
    assert story.ended("g") == 2_100


def test_without_speeds_nobody_is_a_host():
    r, story = world(None)
    r.add_job(job("h"), 2_000)
    r.add_job(job("g", at=1_000), 100)
    r.run()
    assert (story.guests, story.done, story.ended("g")) == ([], {}, 2_100)
    assert not r.shares


def test_a_guest_keeps_the_device_that_its_host_leaves():
    r, story = world()
    r.add_job(job("h"), 2_000)
    r.add_job(job("g", at=1_000), 5_000)
    r.run()
    remaining_at = 1_000 + 1_000 / 0.95
    assert story.ended("h") == pytest.approx(remaining_at)
    assert story.ended("g") == pytest.approx(remaining_at + 5_000 - (remaining_at - 1_000) * 0.5)
    assert story.at("g", State.RUNNING) == [1_000]
    assert story.leases["g"].host == ""
    assert story.leases["g"].granted_at == pytest.approx(remaining_at)
    assert story.done == pytest.approx({"h": 2_000, "g": 5_000})


def test_a_guest_that_gets_capacity_elsewhere_goes_there():
    r, story = world(gpus=2, costs=Costs(copy_bytes_per_s=8 * GIB))
    r.add_job(job("h"), 10_000)
    r.add_job(job("x", share=False), 2_000)
    r.add_job(job("g", at=1_000), 5_000)
    r.run()
    assert story.guests == [(1_000, "g", "h")]
    assert story.at("g", State.SUSPENDED) == [2_002]
    assert story.at("g", State.RUNNING) == [1_000, 2_004]
    assert story.leases["g"].devices == ("gpu1",)
    assert story.ended("g") == 2_004 + 5_000 - 500
    assert story.ended("h") == pytest.approx(10_000 + 1_000 * 0.05)


@pytest.mark.parametrize(
    ("speeds", "because"), [((0.8, 0.9), Because.HOST_SLOWED), ((0.95, 0.1), Because.GAINS_TOO_LITTLE)]
)
def test_a_pair_that_does_not_pay_is_parted_after_its_trial_and_not_tried_again(speeds, because):
    r, story = world(lambda host, guest: speeds if guest.id == "g" else (0.95, 0.5))
    r.add_job(job("g"), 3_000)  # its speed alone is known
    r.add_job(job("h", priority=1, at=1_000), 10_000)
    r.add_job(job("next", at=1_700), 500)
    r.run()
    parted_at = 1_000 + ALONE_S + TRIAL_S
    assert story.verdicts[0] == (parted_at, "h", "g", PairDecision.PART, because)
    assert story.guests == [(1_000 + ALONE_S, "g", "h"), (parted_at + ALONE_S, "next", "h")]
    assert story.done == pytest.approx({"g": 3_000, "h": 10_000, "next": 500})


def test_a_guest_is_suspended_with_its_host():
    r, story = world(order=Order.LAS, las_thresholds_gpu_s=(3_000.0,), costs=Costs(copy_bytes_per_s=8 * GIB))
    r.add_job(job("h"), 10_000)
    r.add_job(job("g", at=1_000, priority=-1), 10_000)
    r.add_job(job("new", at=4_000, share=False), 100)
    r.run()
    assert story.guests[0] == (1_000, "g", "h")
    assert story.at("h", State.SUSPENDED)[0] == story.at("g", State.SUSPENDED)[0] == 4_002
    assert story.at("new", State.RUNNING) == [4_002]
    assert story.done == pytest.approx({"h": 10_000, "g": 10_000, "new": 100})


def test_what_a_guest_reports_and_attains_is_what_it_got():
    r, story = world((0.95, 0.5), order=Order.PROGRESS, las_thresholds_gpu_s=(1e9,))
    r.add_job(job("h"), 20_000)
    r.add_job(job("g", at=1_000), 4_000, lambda done: done)
    r.run(until_at=3_400)
    guest = story.leases["g"]
    assert guest.host == "h"
    assert guest.left_gpu_s == 1_920  # rounded down from 4,000 less what it did
    r.run()
    assert story.ended("g") == 1_000 + 8_000


def test_pairs_are_forbidden_from_the_start():
    r, story = world(parted=Parted([("h", "g", float("inf"))]))
    r.add_job(job("h"), 2_000)
    r.add_job(job("g", at=1_000), 100)
    r.run()
    assert story.guests == []
