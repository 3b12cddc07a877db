from __future__ import annotations

import msgspec
import pytest

from jupyter_gpushare.core.model import State
from jupyter_gpushare.server.watch import JOB_EVENT, LEASE_EVENT, changes, is_warned
from jupyter_gpushare.wire import Status


@pytest.fixture
def said(golden):
    def read(name: str) -> Status:
        return msgspec.convert(golden(name), Status)

    return read


def test_first_answer_is_no_change(said):
    assert changes(None, said("status_active"), "") == []


def test_numbers_alone_are_no_change(said):
    before = said("status_active")
    lease = msgspec.structs.replace(before.leases[0], memory_used_bytes=1, badge="Idle 7 min", idle_s=420.0)
    now = msgspec.structs.replace(before, seq=43, leases=[lease])
    assert changes(before, now, "") == []


def test_warning_is_a_change(said):
    ((schema, data),) = changes(said("status_active"), said("status_warned"), "")
    assert schema == LEASE_EVENT
    assert (data["state"], data["warned"], data["lend_in_s"]) == ("running", True, 300.0)


@pytest.mark.parametrize(
    ("idle_s", "lend_in_s", "warned"),
    [(None, None, False), (600.0, 300.0, True), (599.0, 301.0, False), (6.0, 4.0, False), (7.0, 3.0, True)],
)
def test_warning_comes_300_s_before_or_a_third_of_a_shorter_timeout(said, idle_s, lend_in_s, warned):
    lease = msgspec.structs.replace(said("status_active").leases[0], idle_s=idle_s, lend_in_s=lend_in_s)
    assert is_warned(lease) is warned


def test_leases_of_other_servers_are_not_this_ones_news(said):
    before, now = said("status_active"), said("status_asleep")
    assert changes(before, now, "other") == []


def test_lease_that_ended_is_released(said):
    before = said("status_active")
    ((schema, data),) = changes(before, msgspec.structs.replace(before, leases=[]), "")
    assert (schema, data["state"], data["previous"]) == (LEASE_EVENT, State.RELEASED, "running")


def test_new_job_and_new_attempt_are_changes(said):
    before = said("status_active")
    again = msgspec.structs.replace(before.jobs[0], attempt=2)
    now = msgspec.structs.replace(before, jobs=[again, *before.jobs[1:]])
    ((schema, data),) = changes(before, now, "")
    assert (schema, data["job"], data["attempt"], data["previous"]) == (JOB_EVENT, again.id, 2, "running")
    ((_, data),) = changes(msgspec.structs.replace(before, jobs=before.jobs[1:]), before, "")
    assert (data["job"], data["previous"]) == (again.id, "")
