"""`gpushare admin drain` and `undrain`."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from jupyter_gpushare.cli.drains import time_of_day


def device(uuid: str, drain: dict[str, object] | None = None) -> dict[str, object]:
    names = ("memory_bytes", "used_bytes", "utilization_percent", "held_milli", "claimed_milli")
    texts = ("reason", "level", "suspend_reason")
    known = dict.fromkeys(names, 0) | dict.fromkeys(texts, "")
    return known | {"uuid": uuid, "name": "H100", "healthy": True, "suspendable": True, "drain": drain}


def devices(*of: dict[str, object]) -> dict[str, object]:
    return {
        "devices": list(of),
        "driver": "1",
        "simulated": True,
        "host_budget_bytes": 0,
        "host_saved_bytes": 0,
    }


DRAIN = {
    "by": "root",
    "at": "2026-11-22T10:00:00.000Z",
    "until": "2026-11-22T17:00:00Z",
    "machine": False,
    "sessions": 2,
    "jobs": 1,
}


def test_a_gpu_is_emptied_by_the_beginning_of_its_uuid_and_its_state_is_shown(gpushare, broker):
    broker.answer("GET devices", devices(device("GPU-1a"), device("GPU-2b")))
    broker.answer("PUT devices/GPU-1a/drain", devices(device("GPU-1a", DRAIN), device("GPU-2b")))
    ran = gpushare("admin", "drain", "GPU-1", "--by", "2099-05-06T18:00:00+00:00")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert "GPU-1a (H100): takes nothing new, set by root" in said
    assert "2 sessions and 1 job are still there, asked to finish by" in said
    assert "GPU-2b (H100): takes work." in said
    sent = datetime.fromisoformat(broker.seen[-1].json["until"])
    assert sent == datetime.fromisoformat("2099-05-06T18:00:00+00:00")
    broker.answer("DELETE devices/GPU-1a/drain", devices(device("GPU-1a"), device("GPU-2b")))
    assert gpushare("admin", "undrain", "GPU-1a", "--json").json["devices"][0]["drain"] is None


def test_the_whole_machine_has_a_name_of_its_own(gpushare, broker):
    broker.answer("GET devices", devices(device("GPU-1a")))
    broker.answer("PUT devices/machine/drain", devices(device("GPU-1a", DRAIN)))
    assert gpushare("admin", "drain", "machine").code == 0
    assert broker.seen[-1].json == {"until": None}


@pytest.mark.parametrize("asked", ["GPU-", "GPU-9"])
def test_a_beginning_of_several_or_of_no_gpu_changes_nothing(gpushare, broker, asked):
    broker.answer("GET devices", devices(device("GPU-1a"), device("GPU-2b")))
    ran = gpushare("admin", "drain", asked)
    assert ran.code == 1
    assert "GPU-1a, GPU-2b" in ran.err
    assert [seen.method for seen in broker.seen] == ["GET"]


def test_a_time_of_the_clock_is_the_next_one(gpushare, broker):
    now = datetime.now().astimezone()
    for minutes in (-5, 5):
        at = datetime.fromisoformat(time_of_day((now + timedelta(minutes=minutes)).strftime("%H:%M")))
        assert timedelta(0) < at - now <= timedelta(days=1)
    assert gpushare("admin", "drain", "machine", "--by", "25:00").code == 2
    assert gpushare("admin", "drain", "--by", "18:00").code == 2
