"""`resized`: what a running session may hold of its device."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import Cluster, State, Why
from jupyter_gpushare.core.resize import NewSize, NotResized, resized
from jupyter_gpushare.core.size import Size
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, train


def answer(c: Cluster, milli: int, *, memory_bytes: int = 0, lease: str = "nb") -> NewSize | NotResized:
    (found,) = (x for x in c.leases if x.id == lease)
    return resized(c, found, Size(milli, 1, memory_bytes), NOW)


def guaranteed(milli: int) -> NewSize:
    return NewSize(held_milli=milli, borrowed=False)


def borrowed(milli: int) -> NewSize:
    return NewSize(held_milli=milli, borrowed=True)


def refused(why: Why, most: int) -> NotResized:
    return NotResized(why=why, max_milli=most)


def test_a_session_gets_more_of_its_device_where_it_is_free():
    assert answer(cluster(build("nb", 250, "0")), 1000) == guaranteed(1000)


def test_memory_counts_as_the_part_that_it_comes_to():
    assert answer(cluster(build("nb", 250, "0")), 0, memory_bytes=40 * GIB) == guaranteed(500)


def test_a_session_gives_a_part_up_at_any_time():
    assert answer(cluster(build("nb", 1000, "0")), 250) == guaranteed(250)
    draining = [device(0, usable=False, draining=True)]
    assert answer(cluster(build("nb", 1000, "0"), gpus=draining), 250) == guaranteed(250)


def test_nothing_is_reclaimed_for_it_and_the_most_is_named():
    c = cluster(build("nb", 250, "0"), build("idle", 250, "0", idle_s=9999), train("job", 250, "0"))
    assert answer(c, 1000) == refused(Why.NO_CAPACITY, 500)
    assert answer(c, 500) == guaranteed(500)


def test_another_device_is_of_no_use():
    c = cluster(build("nb", 500, "0"), build("other", 500, "0"), gpus=2)
    assert answer(c, 1000) == refused(Why.NO_CAPACITY, 500)


def test_a_claim_of_a_suspended_session_is_not_taken():
    c = cluster(build("nb", 500, "0"), build("asleep", 500, "0", state=ASLEEP))
    assert answer(c, 1000) == refused(Why.NO_CAPACITY, 500)


def test_a_session_that_waits_for_its_start_comes_first():
    waiting = build("new", 500, submitted_at=1.0)
    assert answer(cluster(build("nb", 500, "0"), waiting), 1000) == refused(Why.NO_CAPACITY, 500)


def test_a_waiting_job_does_not_keep_a_session_from_more():
    assert answer(cluster(build("nb", 500, "0"), train("job", 500)), 1000) == guaranteed(1000)


def test_beyond_the_quota_it_becomes_borrowed():
    c = cluster(build("nb", 250, "0"), projects=[project("p", 0.5)])
    assert answer(c, 500) == guaranteed(500)
    assert answer(c, 501) == borrowed(501)


def test_growth_takes_no_claim_from_a_later_session_of_its_project():
    first, later = build("nb", 250, "0"), build("later", 250, "1", queued_at=9.0)
    c = cluster(first, later, gpus=2, projects=[project("p", 0.5)])
    assert answer(c, 500) == borrowed(500)


def test_a_borrowed_session_stays_borrowed():
    c = cluster(build("nb", 250, "0", borrowed=True), projects=[project("p", 0.0)])
    assert answer(c, 500) == borrowed(500)
    assert answer(c, 125) == borrowed(125)


def test_nothing_is_borrowed_where_it_could_not_be_given_back():
    c = cluster(build("nb", 250, "0"), gpus=[device(0, suspendable=False)], projects=[project("p", 0.5)])
    assert answer(c, 1000) == refused(Why.NO_CAPACITY, 500)


def test_the_limit_of_its_project_binds():
    c = cluster(build("nb", 250, "0"), projects=[project("p", 1, limit_milli=500)])
    assert answer(c, 750) == refused(Why.PROJECT_LIMIT, 500)
    assert answer(c, 500) == guaranteed(500)


@pytest.mark.parametrize(
    ("more", "why"),
    [({"draining": True}, Why.DRAINING), ({}, Why.NO_CAPACITY)],
)
def test_a_device_that_takes_nothing_new_gives_no_more(more, why):
    c = cluster(build("nb", 250, "0"), gpus=[device(0, usable=False, **more)])
    assert answer(c, 500) == refused(why, 250)


def test_a_device_that_is_gone_gives_no_more():
    c = cluster(build("nb", 250, "7", state=State.RUNNING))
    assert answer(c, 500) == refused(Why.DEVICE_BROKEN, 250)
