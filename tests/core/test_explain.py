"""Reasons to wait, `offers`, `check_request`: the same round that decides says why."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.explain import (
    Offer,
    Starts,
    Use,
    borrowed,
    check_request,
    claims,
    lent,
    offers,
    uses,
)
from jupyter_gpushare.core.idle import eligible, eligible_at, warn_at
from jupyter_gpushare.core.model import Order, State, Why
from jupyter_gpushare.core.planning.planner import dry_run
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, smaller_than, train, why


def test_waiting_jobs_are_listed_in_the_order_in_which_they_would_be_served():
    c = cluster(
        build("nb", 900, "0"),
        train("third", 500, queued_at=2),
        train("first", 500, queued_at=9, priority=1),
        train("second", 1000, queued_at=1),
        train("never", 1000, device_count=2, queued_at=0),
    )
    waiting = dry_run(c, NOW).run().waiting
    assert [id for id in waiting if id != "never"] == ["first", "second", "third"]
    assert waiting["never"] is Why.TOO_LARGE


def test_a_smaller_size_that_would_start_now_is_named():
    busy = build("nb", 1000, "0")
    gang = cluster(busy, train("gang", 1000, device_count=4), gpus=4)
    assert smaller_than(gang, "gang") == Size(1000, 3)
    assert smaller_than(cluster(build("nb", 500, "0"), train("job", 1000)), "job") == Size(500)
    assert smaller_than(cluster(busy, train("job", 1000)), "job") is None
    assert smaller_than(cluster(build("nb", 500, "0"), build("new", 1000)), "new") == Size(500)


def test_what_gets_capacity_now_is_explained_by_its_decision():
    assert why(cluster(train("job", 500)), "job") is Why.FREE_CAPACITY
    assert why(cluster(train("job", 500, "0")), "job") is Why.NOT_WAITING


@pytest.mark.parametrize(
    ("reason", "c"),
    [
        (Why.DEVICE_BROKEN, cluster(train("x", 500), gpus=[device(0, usable=False)])),
        (Why.DRAINING, cluster(train("x", 500), gpus=[device(0, usable=False, draining=True)])),
        (Why.DRAINING, cluster(build("x", 500), gpus=[device(0, usable=False, draining=True)])),
        (
            Why.DEVICE_BROKEN,
            cluster(
                train("x", 1000, device_count=2),
                gpus=[device(0, usable=False, draining=True), device(1, usable=False)],
            ),
        ),
        (
            Why.NO_CAPACITY,
            cluster(
                build("a", 500, "1"),
                train("x", 1000),
                gpus=[device(0, usable=False, draining=True), device(1)],
            ),
        ),
        (Why.DEVICE_BROKEN, cluster(train("x", 500, "7", state=ASLEEP))),
        (Why.DEVICE_BROKEN, cluster(build("x", 500, "7", state=ASLEEP, wanted=True))),
        (
            Why.DEVICE_BROKEN,
            cluster(build("x", 500, "7", state=ASLEEP, wanted=True), projects=[project("p", 0)]),
        ),
        (Why.TOO_LARGE, cluster(train("x", 0, memory_bytes=81 * GIB))),
        (Why.TOO_LARGE, cluster(train("x", 0, memory_bytes=1), gpus=[device(0, reserve_bytes=80 * GIB)])),
        (Why.TOO_LARGE, cluster(build("x", 1000, device_count=2))),
        (Why.BACKING_OFF, cluster(train("x", 500, retry_at=NOW + 1))),
        (Why.BACKING_OFF, cluster(build("x", 500, retry_at=NOW + 1))),
        (Why.BACKING_OFF, cluster(build("x", 500, "0", state=ASLEEP, wanted=True, retry_at=NOW + 1))),
        (Why.AWAITING_RELEASE, cluster(train("a", 500, "0", state=State.STOPPING), train("x", 1000))),
        (Why.AWAITING_RELEASE, cluster(build("a", 500, "0", idle_s=9000), train("x", 1000))),
        (
            Why.HOST_MEMORY,
            cluster(build("a", 500, "0", idle_s=9000, used_bytes=9), train("x", 1000), host_budget_bytes=9),
        ),
        (  # its session could sleep, but the job could not beside it
            Why.JOB_HOST_MEMORY,
            cluster(build("a", 500, "0", idle_s=9000, used_bytes=9), train("x", 1000), host_budget_bytes=GIB),
        ),
        (
            Why.JOB_HOST_MEMORY,
            cluster(build("a", 500, "0", state=ASLEEP), train("x", 1000), host_budget_bytes=GIB),
        ),
        (  # suspended before: more than it saved is needed
            Why.JOB_HOST_MEMORY,
            cluster(
                build("a", 500, "0", state=ASLEEP), train("x", 1000, "0", state=ASLEEP), host_budget_bytes=GIB
            ),
        ),
        (  # the job's own memory is not what it lacks
            Why.NO_CAPACITY,
            cluster(
                build("a", 500, "0", state=ASLEEP),
                build("b", 500, "0"),
                train("x", 1000),
                host_budget_bytes=GIB,
            ),
        ),
        (Why.NO_CAPACITY, cluster(build("a", 600, "0"), build("x", 500))),
        (Why.QUOTA, cluster(train("x", 500, borrow=False), projects=[project("p", 0)])),
        (Why.PROJECT_LIMIT, cluster(build("x", 500), projects=[project("p", 0, limit_milli=400)])),
        (Why.PROJECT_LIMIT, cluster(train("x", 500), projects=[project("p", 0, limit_milli=400)])),
        (
            Why.PROJECT_LIMIT,
            cluster(
                build("x", 500, "0", state=ASLEEP, wanted=True), projects=[project("p", 0, limit_milli=400)]
            ),
        ),
    ],
)
def test_why(reason, c):
    assert why(c) is reason


def test_in_a_strict_queue_all_jobs_wait_for_its_head():
    held = train("old", 500, "0")
    line = [train(f"j{n}", milli, queued_at=n) for n, milli in enumerate((1000, 500, 250))]
    c = cluster(held, *line, order=Order.FIFO)
    assert [why(c, f"j{n}") for n in range(3)] == [Why.NO_CAPACITY, Why.IN_LINE, Why.IN_LINE]
    assert list(dry_run(c, NOW).run().waiting) == ["j0", "j1", "j2"]


# -- offers


def test_offers_of_sessions_are_guaranteed_asleep_borrowed_or_refused():
    c = cluster(train("job", 1000, "0"), gpus=2, projects=[project("p", 2)])
    now, both = offers(c, "p", [Size(500), Size(1000, 2)], NOW)
    assert now == Offer(
        size=Size(500),
        starts=Starts.NOW,
        why=Why.CLAIM,
        devices=("gpu1",),
        free_milli=1000,
    )
    assert (both.starts, both.borrowed, both.devices) == (Starts.ASLEEP, False, ("gpu0", "gpu1"))
    (beyond,) = offers(c, "other", [Size(500)], NOW)
    assert (beyond.starts, beyond.borrowed) == (Starts.NOW, True)
    (refused,) = offers(c, "other", [Size(1000, 2)], NOW)
    assert (refused.starts, refused.why, refused.devices) == (Starts.NO, Why.NO_CAPACITY, ())


def test_an_offer_says_whether_waiting_helps():
    c = cluster(build("nb", 1000, "0"), projects=[project("p", 1, limit_milli=1000)])
    assert [o.waits for o in offers(c, "p", [Size(500), Size(1000), Size(1000, 2)], NOW)] == [
        True,
        True,
        False,
    ]
    assert [o.waits for o in offers(cluster(), "p", [Size(500)], NOW)] == [False]


def test_offers_count_a_session_that_is_being_granted_and_one_that_wakes():
    c = cluster(build("ada", 500, "0", state=ASLEEP, wanted=True), build("new", 250, queued_at=NOW - 1))
    assert [o.starts for o in offers(c, "p", [Size(250), Size(500)], NOW)] == [Starts.NOW, Starts.NO]


# -- requests


@pytest.mark.parametrize(
    ("lease", "message"),
    [
        (
            train("x", 1000, device_count=8),
            r"8 GPUs together; the largest machine has 2, all machines 3\.",
        ),
        (
            train("x", 1000, profile="1g.10gb"),
            r"a MIG instance of profile 1g\.10gb; no GPU here is divided\.",
        ),
        (train("x", 1000, device_count=8, consolidate=False), r"Asks for 8 GPUs; there are 3\."),
        (train("x", 0, memory_bytes=100 * GIB), r"100 GiB of GPU memory; the largest GPU has 78 GiB"),
        (train("x", 1000, device_count=2), r"Asks for 2 GPUs; project p may use at most 1 GPU\."),
        (train("x", 0), "asks for nothing"),
        (train("x", -1), "asks for nothing"),
        (train("x", 1001), "asks for nothing"),
        (train("x", 1000, device_count=0), "asks for nothing"),
        (train("x", 500, device_count=2), "only given whole"),
        (train("x", 0, memory_bytes=1, device_count=2), "only given whole"),
    ],
)
def test_what_can_never_run_is_refused_at_once(lease, message):
    devices = [device(n, node=f"n{n // 2}", reserve_bytes=2 * GIB) for n in range(3)]
    c = cluster(gpus=devices, projects=[project("p", 1, limit_milli=1000)])
    with pytest.raises(InvalidRequest, match=message):
        check_request(c, lease)


def test_a_job_larger_than_a_machine_is_taken_where_whole_machines_hold_it():
    four = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = cluster(gpus=four)
    check_request(c, train("x", 1000, device_count=4))
    check_request(c, train("x", 1000, device_count=3))
    uneven = cluster(gpus=[device(n, node=f"n{max(0, n - 2)}") for n in range(6)])
    with pytest.raises(InvalidRequest, match="largest machine has 3, all machines 6"):
        check_request(uneven, train("x", 1000, device_count=7))
    with pytest.raises(InvalidRequest, match=r"8 GPUs together; the largest machine has 4\."):
        check_request(cluster(gpus=4), train("x", 1000, device_count=8))


def test_a_machine_of_mig_instances_has_no_undivided_gpu():
    large = device(1, profile="3g.40gb", memory_bytes=40 * GIB)
    c = cluster(gpus=[device(0, profile="1g.10gb", memory_bytes=10 * GIB), large])
    there = r"there are MIG instances of profile 3g\.40gb, 1g\.10gb\."
    with pytest.raises(InvalidRequest, match=f"Asks for a GPU that is not divided; {there}"):
        check_request(c, train("x", 500))
    with pytest.raises(InvalidRequest, match=rf"Asks for a MIG instance of profile 7g\.80gb; {there}"):
        check_request(c, train("x", 1000, profile="7g.80gb"))
    check_request(c, train("x", 1000, profile="1g.10gb"))
    check_request(c, train("x", 0, memory_bytes=5 * GIB))


def test_a_mig_instance_is_offered_by_its_profile():
    c = cluster(gpus=[device(0, profile="1g.10gb"), device(1)], projects=[project("p", 2)])
    whole, instance = offers(c, "p", [Size(1000), Size(1000, profile="1g.10gb")], NOW)
    assert (whole.devices, instance.devices) == (("gpu1",), ("gpu0",))
    assert (whole.size.profile, instance.size.profile) == ("", "1g.10gb")


def test_nothing_smaller_than_a_mig_instance_is_proposed():
    c = cluster(
        train("a", 1000, "0"),
        train("x", 1000, profile="1g.10gb"),
        gpus=[device(0, profile="1g.10gb"), device(1)],
        projects=[project("p", 2)],
    )
    assert smaller_than(c, "x") is None


def test_a_machine_without_devices_refuses_everything():
    with pytest.raises(InvalidRequest, match="has no GPU"):
        check_request(cluster(gpus=0), train("x", 500))


def test_what_can_run_passes():
    c = cluster(gpus=2, projects=[project("p", 1, limit_milli=1000)])
    check_request(c, train("x", 1000))
    check_request(c, train("x", 0, memory_bytes=20 * GIB))
    check_request(c, train("x", 1000, device_count=2, project="unlimited"))
    check_request(cluster(), train("x", 1000))


# -- eligibility


def test_a_session_is_eligible_after_its_timeout_and_warned_before():
    settings = cluster(idle_timeout_s=900).settings
    nb = build("nb", 500, "0", idle_s=0)
    assert eligible_at(nb, settings) == NOW + 900
    assert warn_at(nb, settings) == NOW + 600
    assert warn_at(nb, cluster(idle_timeout_s=30).settings) == NOW + 20
    assert not eligible(nb, settings, NOW + 899)
    assert eligible(nb, settings, NOW + 900)


def test_busy_sleeping_and_unsuspendable_sessions_and_jobs_are_never_eligible():
    settings = cluster().settings
    for lease in (
        build("nb", 500, "0"),
        build("nb", 500, "0", idle_s=9999, state=ASLEEP),
        build("nb", 500, "0", idle_s=9999, suspendable=False),
        train("job", 500, "0", idle_since_at=0.0),
    ):
        assert eligible_at(lease, settings) is None
        assert warn_at(lease, settings) is None
        assert not eligible(lease, settings, NOW)


# -- which leases borrow


def test_use_beyond_quota_and_on_lent_capacity_is_borrowed():
    c = cluster(
        build("ada", 500, "0", state=ASLEEP),
        train("within", 500, "0", granted_at=1),
        train("lent", 500, "0", granted_at=2),
        train("beyond", 1000, "1", granted_at=3),
        train("leaving", 1000, "2", state=State.STOPPING),
        train("waits", 1000),
        gpus=3,
        projects=[project("p", 1.5)],
    )
    assert borrowed(c) == {"within": False, "lent": True, "beyond": True}
    assert lent(c) == {"ada": ("lent",)}
    assert claims(c) == {"gpu0": 500, "gpu1": 0, "gpu2": 0}


def test_use_of_each_project():
    c = cluster(
        build("ada", 500, "0", state=ASLEEP),
        build("awake", 500, "1"),
        build("alone", 500, "1", state=ASLEEP),
        train("bo", 1000, "0", project="q"),
        train("sleeper", 1000, "2", project="q", state=ASLEEP),
        train("waits", 1000, project="q"),
        train("gone", 1000, project="q", cancelled=True),
        gpus=3,
        projects=[project("p", 2), project("q", 1), project("idle", 0)],
    )
    assert uses(c) == (
        Use(
            project="p",
            in_use_milli=500,
            borrowed_milli=0,
            fair_share_milli=500,
            waiting_milli=0,
        ),
        Use(
            project="q",
            in_use_milli=1000,
            borrowed_milli=0,  # on a lent GPU, and within its quota
            fair_share_milli=2500,
            waiting_milli=2000,
        ),
        Use(
            project="idle",
            in_use_milli=0,
            borrowed_milli=0,
            fair_share_milli=0,
            waiting_milli=0,
        ),
    )


def test_a_project_borrows_what_it_holds_over_its_quota_and_no_more():
    wide = cluster(train("wide", 1000, "0 1"), gpus=2, projects=[project("p", 1)])
    assert borrowed(wide) == {"wide": True}
    assert uses(wide)[0].borrowed_milli == 1000
    beside_claim = cluster(
        build("ada", 500, "0", state=ASLEEP),
        train("within", 500, "0", granted_at=1),
        train("beyond", 1000, "1", granted_at=2),
        gpus=2,
        projects=[project("p", 1)],
    )
    assert uses(beside_claim)[0].borrowed_milli == 1000
