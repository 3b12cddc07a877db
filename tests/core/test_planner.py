"""`plan`: free capacity, sessions and their claims; one line per lease, one behaviour per test."""

from __future__ import annotations

from jupyter_gpushare.core.model import Plan, Resume, Suspend, Why
from jupyter_gpushare.core.planning.planner import plan
from tests.core.build import (
    ASLEEP,
    NOW,
    actions,
    build,
    cluster,
    device,
    grant,
    project,
    started,
    train,
    why,
)


def test_nothing_to_do_is_an_empty_plan():
    assert plan(cluster(), NOW) == Plan(())


def test_free_capacity_is_granted():
    assert actions(cluster(train("job", 1000))) == [grant("job", 0)]


def test_best_fit_keeps_whole_devices_whole():
    c = cluster(train("old", 500, "1"), train("job", 500), gpus=2)
    assert actions(c) == [grant("job", 1, milli=500)]


def test_first_come_first_served_inside_a_priority():
    c = cluster(train("late", 1000, queued_at=2), train("early", 1000, queued_at=1))
    assert actions(c) == [grant("early", 0)]


def test_priority_comes_before_age():
    c = cluster(train("early", 1000, queued_at=1), train("urgent", 1000, queued_at=2, priority=5))
    assert actions(c) == [grant("urgent", 0)]


def test_a_job_that_does_not_fit_blocks_no_other():
    c = cluster(train("old", 500, "0"), train("large", 1000, queued_at=1), train("small", 500, queued_at=2))
    assert actions(c) == [grant("small", 0, milli=500)]


def test_a_cancelled_job_is_not_started():
    assert actions(cluster(train("job", 1000, cancelled=True))) == []


def test_a_job_that_failed_to_start_is_tried_again_at_its_moment():
    c = cluster(train("job", 1000, retry_at=NOW + 30))
    assert plan(c, NOW) == Plan((), next_at=NOW + 30)
    assert plan(c, NOW + 30).actions == (grant("job", 0),)


def test_an_unusable_device_takes_nothing_new():
    assert actions(cluster(train("job", 500), build("nb", 500), gpus=[device(0, usable=False)])) == []


def test_a_gang_gets_all_devices_or_none():
    old = train("old", 500, "0")
    assert actions(cluster(old, train("gang", 1000, device_count=2), gpus=2)) == []
    assert actions(cluster(old, train("gang", 1000, device_count=2), gpus=3)) == [grant("gang", 1, 2)]


def test_a_session_within_quota_gets_its_claim():
    assert actions(cluster(build("nb", 500))) == [grant("nb", 0, milli=500, why=Why.CLAIM)]


def test_sessions_come_before_jobs():
    c = cluster(train("job", 1000, queued_at=1, priority=9), build("nb", 500, queued_at=2))
    assert actions(c) == [grant("nb", 0, milli=500, why=Why.CLAIM)]


def test_a_session_beyond_quota_that_waits_comes_after_jobs_that_the_quota_owes():
    owed, owner = train("owed", 1000, project="q", queued_at=9), [project("p", 0), project("q", 1)]
    session = build("nb", 1000, queued_at=1)
    assert started(cluster(session, owed, projects=owner)) == ["nb"]
    waits = build("nb", 1000, queued_at=1, waits=True)
    assert started(cluster(waits, owed, projects=owner)) == ["owed"]
    assert why(cluster(waits, owed, projects=owner), "nb") is Why.NO_CAPACITY


def test_a_session_that_waits_comes_before_jobs_that_borrow():
    owner = [project("p", 0), project("q", 0)]
    waits = build("nb", 1000, queued_at=9, waits=True)
    found = actions(cluster(waits, train("job", 1000, project="q", queued_at=1), projects=owner))
    assert found == [grant("nb", 0, borrowed=True)]


def test_sessions_that_wait_start_first_come_first_served():
    owner = [project("p", 0)]
    late, early = (build(n, 1000, queued_at=at, waits=True) for n, at in (("late", 2), ("early", 1)))
    assert started(cluster(late, early, projects=owner)) == ["early"]
    assert started(cluster(late, early, gpus=2, projects=owner)) == ["early", "late"]


def test_a_session_on_lent_capacity_starts_asleep():
    c = cluster(train("job", 1000, "0"), build("nb", 500))
    assert actions(c) == [grant("nb", 0, milli=500, why=Why.CLAIM, asleep=True)]


def test_claims_on_a_device_never_exceed_it():
    c = cluster(build("a", 600, "0"), build("nb", 500), projects=[project("p", 9)])
    assert actions(c) == []


def test_a_sleeping_session_keeps_its_claim():
    c = cluster(build("a", 600, "0", state=ASLEEP), build("nb", 500), projects=[project("p", 9)])
    assert actions(c) == []


def test_a_session_beyond_quota_borrows_free_unclaimed_capacity():
    c = cluster(build("a", 500, "0"), build("nb", 500), projects=[project("p", 0.5)])
    assert actions(c) == [grant("nb", 0, milli=500, borrowed=True)]


def test_a_session_beyond_quota_is_not_put_on_lent_capacity():
    c = cluster(build("a", 600, "0", state=ASLEEP), build("nb", 500), projects=[project("p", 0.6)])
    assert actions(c) == []


def test_a_session_beyond_quota_does_not_start_where_it_could_not_be_suspended():
    c = cluster(build("nb", 500), projects=[], gpus=[device(0, suspendable=False)])
    assert actions(c) == []


def test_a_session_is_not_promised_capacity_that_cannot_be_taken_back():
    guest = build("guest", 600, "0", project="q", suspendable=False)
    assert actions(cluster(guest, build("nb", 500))) == []
    guest = build("guest", 600, "0", project="q")
    assert actions(cluster(guest, build("nb", 500))) == [
        grant("nb", 0, milli=500, why=Why.CLAIM, asleep=True)
    ]


def test_a_borrowing_session_does_not_take_a_claim_that_was_granted_as_one():
    old = build("old", 600, "0", queued_at=1, borrowed=True)
    new = build("new", 600, "0", queued_at=2, state=ASLEEP, wanted=True, project="q")
    c = cluster(old, new, projects=[project("p", 1), project("q", 1)])
    assert actions(c) == [Suspend("old", Why.LENDER_RETURNED, "new")]


def test_a_device_that_is_emptied_keeps_what_is_there_and_gets_nothing_new():
    emptied = [device(0, usable=False, draining=True)]
    wakes = build("nb", 500, "0", state=ASLEEP, wanted=True)
    assert plan(cluster(wakes, train("job", 500), gpus=emptied), NOW).actions == (Resume("nb", Why.WANTED),)
    paused = train("old", 500, "0", state=ASLEEP)
    assert [a.lease for a in plan(cluster(paused, train("new", 500), gpus=emptied), NOW).actions] == ["old"]
    # No session sleeps for a job that gets nothing there.
    idle = build("nb", 1000, "0", idle_s=9000)
    assert plan(cluster(idle, train("job", 500), gpus=emptied), NOW).actions == ()
