"""`gpushare admin release`: processes without a lease."""

from __future__ import annotations

from tests.cli.test_drains import device, devices


def listed(**more: object) -> dict[str, object]:
    process = {"process": "4711-99", "pid": 4711, "uid": 1003, "name": "python", "used_bytes": 3 * 2**29}
    return devices(device("GPU-1a") | {"unleased": [process | {"kept": "", "ending": False} | more]})


def test_processes_without_a_lease_are_listed(gpushare, broker):
    broker.answer("GET devices", listed(kept="it belongs to a system user"))
    ran = gpushare("admin", "release")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert "PID UID NAME GPU MEMORY" in said
    assert "4711 1003 python GPU-1a 1.5 GiB left alone: it belongs to a system user" in said
    broker.answer("GET devices", devices(device("GPU-1a")))
    assert "No process is known to use a GPU without a lease." in gpushare("admin", "release").out


def test_one_is_ended_after_a_yes_and_another_pid_is_not_known(gpushare, broker):
    broker.answer("GET devices", listed())
    broker.answer("DELETE devices/GPU-1a/processes/4711-99", listed(ending=True))
    unsure = gpushare("admin", "release", "4711")
    assert (unsure.code, "without a terminal say --yes" in unsure.err) == (2, True)
    assert not broker.asked("DELETE devices/GPU-1a/processes/4711-99")
    assert "It was told to end." in gpushare("admin", "release", "4711", "--yes").out
    assert len(broker.asked("DELETE devices/GPU-1a/processes/4711-99")) == 1
    broker.answer("GET devices", listed(ending=True))
    assert "told to end" in gpushare("admin", "release").out
    assert gpushare("admin", "release", "1", "--yes").code == 1


def test_one_pid_on_two_machines_ends_neither(gpushare, broker):
    both = listed()["devices"] + listed(process="4711-12")["devices"]
    broker.answer("GET devices", listed() | {"devices": both})
    ran = gpushare("admin", "release", "4711", "--yes")
    assert (ran.code, "of several machines" in ran.err) == (1, True)
