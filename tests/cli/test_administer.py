"""`gpushare admin` and `gpushare sleep`."""

from __future__ import annotations

import io
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.cli import output
from jupyter_gpushare.cli.administer import time_of_day
from jupyter_gpushare.protocol import wire

LENDING = wire.Lending(
    mode="watch", configured="on", set_by="root", set_at="2026-11-22T10:00:00.000Z", tried=3, failed=1, lost=0
)


def test_lending_is_shown_and_changed(gpushare, broker):
    broker.answer("GET lending", msgspec.to_builtins(LENDING))
    shown = gpushare("admin", "lending")
    assert shown.code == 0
    assert "watch: Nothing is lent" in shown.out
    assert f"Set by root at {output.day_and_time(LENDING.set_at)}; configured: on." in shown.out
    broker.answer("PUT lending", msgspec.to_builtins(LENDING))
    assert gpushare("admin", "lending", "off").code == 0
    assert broker.seen[-1].json == {"mode": "off"}
    assert gpushare("admin", "lending", "default", "--json").json["mode"] == "watch"
    assert broker.seen[-1].json == {"mode": None}
    assert gpushare("admin", "lending", "always").code == 2


@pytest.mark.parametrize(("word", "action"), [("never", "never-sleep"), ("allow", "may-sleep")])
def test_the_session_of_this_server_is_marked(gpushare, broker, golden, word, action):
    lease = golden("status_active")["leases"][0] | {"job": None, "server": ""}
    broker.answer("GET leases", {"leases": [lease]})
    broker.answer(f"POST leases/{lease['id']}/{action}", lease)
    ran = gpushare("sleep", word)
    assert (ran.code, ran.out.strip()) == (0, f"{lease['badge']}: {lease['sentence']}")
    assert gpushare("sleep", word, "--server", "other").code == 1


def test_numbers_of_projects_are_shown_changed_and_taken_back(gpushare, broker, golden):
    projects = {"projects": golden("status_active")["projects"]}
    name = projects["projects"][0]["name"]
    broker.answer("GET projects", projects)
    broker.answer(f"PUT projects/{name}", projects)
    broker.answer(f"DELETE projects/{name}", projects)
    shown = gpushare("admin", "quota")
    assert (shown.code, shown.out.splitlines()[0].split(":")[0]) == (0, name)
    assert (
        gpushare(
            "admin", "quota", name, "--quota", "1.5", "--weight", "3", "--limit", "2", "--priority-max", "5"
        ).code
        == 0
    )
    assert broker.seen[-1].json == {
        "quota": 1.5,
        "weight": 3,
        "limit": 2.0,
        "priority_max": 5,
        "force": False,
    }
    assert gpushare("admin", "quota", name, "--reset", "--json").json["projects"][0]["name"] == name
    assert broker.seen[-1].method == "DELETE"


@pytest.mark.parametrize(
    "words", [("--quota", "1"), ("nlp", "--reset", "--weight", "2"), ("--reset",), ("nlp", "--weight", "-1")]
)
def test_half_a_change_of_a_project_is_a_usage_error(gpushare, broker, words):
    assert gpushare("admin", "quota", *words).code == 2
    assert not broker.seen


def test_a_project_that_does_not_exist_is_named(gpushare, broker, golden):
    broker.answer("GET projects", {"projects": golden("status_active")["projects"]})
    shown = gpushare("admin", "quota", "nosuch")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == "gpushare: There is no project 'nosuch' for you.\n"


def row(**values):
    hours = {"held_gpu_h": 2.5, "computing_gpu_h": 2.0, "borrowed_gpu_h": 0.5, "lent_gpu_h": 0.0}
    return msgspec.to_builtins(wire.UsageRow(**hours | values))


USAGE = {
    "since": "2031-05-01",
    "until": "2031-05-06",
    "by": ["user", "gpu"],
    "rows": [row(user="=ada", gpu="NVIDIA H200"), row(user="bo", gpu="")],
    "total": row(held_gpu_h=5.0),
    "kept_days": 400,
}


def test_use_is_a_table_csv_or_json(gpushare, broker):
    broker.answer("GET usage", USAGE)
    shown = gpushare("admin", "usage", "--by", "user,gpu", "--since", "2031-05-01").out.splitlines()
    assert broker.seen[-1].query == {"by": "user,gpu", "since": "2031-05-01"}
    assert [line.split() for line in shown[:3]] == [
        ["USER", "GPU", "HELD", "COMPUTING", "BORROWED", "LENT"],
        ["=ada", "NVIDIA", "H200", "2.50", "2.00", "0.50", "0.00"],
        ["bo", "unknown", "2.50", "2.00", "0.50", "0.00"],
    ]
    assert shown[3].startswith("total")
    assert shown[4] == "GPU-hours from 2031-05-01 to 2031-05-06 (UTC); kept for 400 days."
    assert gpushare("admin", "usage", "--csv").out.splitlines()[1] == "'=ada,NVIDIA H200,2.5,2.0,0.5,0.0"
    assert gpushare("admin", "usage", "--json").json["total"]["held_gpu_h"] == 5.0
    broker.answer("GET usage", USAGE | {"rows": []})
    assert gpushare("admin", "usage").out == "No GPU was used from 2031-05-01 to 2031-05-06 (UTC).\n"


@pytest.fixture
def lease(broker, golden):
    lease = golden("status_active")["leases"][0] | {"user": "ada", "job": None}
    broker.answer("GET leases", {"leases": [lease]})
    for action in ("resume", "lend", "stop"):
        broker.answer(f"POST leases/{lease['id']}/{action}", lease)
    return lease


@pytest.mark.parametrize(("verb", "action"), [("wake", "resume"), ("lend", "lend"), ("stop", "stop")])
def test_sessions_of_others_are_listed_and_acted_on(gpushare, broker, lease, verb, action):
    listed = gpushare("admin", "leases").out
    assert broker.seen[-1].query == {"all": "1"}
    assert listed.splitlines()[1].split()[:2] == [lease["id"], "ada"]
    assert "ada's" in listed
    assert "Your" not in listed
    ran = gpushare("admin", verb, lease["id"], *(["--yes"] if verb == "stop" else []))
    assert ran.code == 0, ran.err
    assert broker.seen[-1].path == f"leases/{lease['id']}/{action}"
    assert gpushare("admin", verb, "nosuch").code == 1


def test_stopping_asks_first(gpushare, broker, lease, monkeypatch):
    words = ("admin", "stop", lease["id"])
    without_terminal = gpushare(*words)
    assert (without_terminal.code, "say --yes" in without_terminal.err) == (2, True)
    for said, stops in (("", False), ("n\n", False), ("y\n", True)):
        terminal = io.StringIO(said)
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        ran = gpushare(*words)
        assert "Stop ada's session, with all its kernels and their variables, of 1/2 GPU? [y/N]" in ran.err
        assert ran.code == (0 if stops else 1)
        assert (broker.seen[-1].method == "POST") is stops


def test_a_job_that_had_not_begun_is_printed_as_json_once_it_is_stopped(gpushare, broker, lease, golden):
    job = golden("job") | {"state": "cancelled"}
    broker.answer("GET leases", {"leases": [lease | {"job": job["id"]}]})
    broker.answer(f"POST leases/{lease['id']}/stop", None, 204)
    broker.answer(f"GET jobs/{job['id']}", job)
    assert gpushare("admin", "stop", job["id"], "--yes", "--json").json["state"] == "cancelled"
    assert gpushare("admin", "stop", job["id"], "--yes").out == "Stopped.\n"


def test_the_priority_of_any_job_is_changed(gpushare, broker, golden):
    broker.answer("PUT jobs/k3v9m2x7qa", golden("job"))
    assert gpushare("admin", "priority", "k3v9m2x7qa", "20").code == 0
    assert broker.seen[-1].json["priority"] == 20
    assert gpushare("admin", "priority", "k3v9m2x7qa", "101").code == 2


# ---- `gpushare admin drain` and `undrain` ------------------------------------


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


# ---- `gpushare admin owners`, `adopt` and `end` ------------------------------

MADE = "2026-11-22T03:05:09.123456Z"


def owners(*names: str) -> dict[str, Any]:
    return {
        "owners": [
            {"name": n, "user": f"{n}/{MADE}", "created": MADE, "jobs": 2, "others": 1, "held": n != "cy"}
            for n in names
        ]
    }


def test_absent_owners_are_a_table(gpushare, broker):
    broker.answer("GET owners", owners("ada", "cy"))
    ran = gpushare("admin", "owners")
    assert ran.code == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines()[1:]]
    assert rows == [["ada", MADE, "2", "1", "held"], ["cy", MADE, "2", "1", "absent"]]
    broker.answer("GET owners", owners())
    assert gpushare("admin", "owners").out == "The Hub has the owners of all sessions and jobs.\n"


def test_what_belongs_to_an_owner_is_given_to_a_user(gpushare, broker):
    broker.answer("GET owners", owners("ada", "bo"))
    broker.answer("PUT owners/ada", owners("bo"))
    assert gpushare("admin", "adopt", "ada", "--to", "lovelace", "--json").json == owners("bo")
    assert broker.seen[-1].json == {"to": "lovelace"}


def test_all_owners_are_adopted_and_those_that_cannot_be_are_named(gpushare, broker):
    broker.answer("GET owners", owners("ada", "bo"))
    broker.answer("PUT owners/ada", {"status": 409, "reason": "conflict", "message": "no user 'ada'"}, 409)
    broker.answer("PUT owners/bo", owners("ada"))
    ran = gpushare("admin", "adopt", "--all")
    assert ran.code == 1
    assert "no user 'ada'" in ran.err
    assert [seen.path for seen in broker.seen if seen.method == "PUT"] == ["owners/ada", "owners/bo"]


def test_jobs_are_ended_after_a_question(gpushare, broker):
    broker.answer("GET owners", owners("ada"))
    broker.answer("DELETE owners/ada", owners())
    assert gpushare("admin", "end", "ada").code == 2  # there is no terminal to ask at
    assert all(seen.method == "GET" for seen in broker.seen)
    assert gpushare("admin", "end", "ada", "--yes").code == 0
    assert gpushare("admin", "end", "--all", "--yes").code == 0


@pytest.mark.parametrize(("method", "words"), [("PUT", ["adopt"]), ("DELETE", ["end", "--yes"])])
def test_a_change_is_not_sent_again_when_its_answer_was_lost(gpushare, broker, method, words):
    """The second answer would be that no such owner is absent."""
    broker.answer("GET owners", owners("ada"))
    broker.answer(f"{method} owners/ada", {"status": 503, "reason": "unavailable", "message": "later"}, 503)
    assert gpushare("admin", *words, "ada").code != 0
    assert [seen.method for seen in broker.seen].count(method) == 1


def test_one_owner_is_named_or_all(gpushare, broker):
    broker.answer("GET owners", owners("ada"))
    for words in (("end",), ("adopt",), ("adopt", "ada", "--all"), ("adopt", "--all", "--to", "bo")):
        assert gpushare("admin", *words).code == 2


# ---- `gpushare admin release`: processes without a lease ---------------------


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


# ---- `gpushare admin export` -------------------------------------------------

TRACE = {
    "rows": [
        {
            "session": "",
            "user": "u1",
            "project": "p1",
            "num_gpu": 1,
            "gpus": 0.5,
            "submit_s": 0.0,
            "duration_s": 90.0,
        }
    ],
    "left_out": 2,
    "since": "2026-11-22T10:00:00.000Z",
}


def test_a_trace_is_written_to_a_new_file_in_the_units_of_the_simulator(gpushare, broker, tmp_path):
    broker.answer("GET trace/jobs", TRACE)
    broker.answer("GET trace/cells", TRACE)
    file = tmp_path / "jobs.csv"
    ran = gpushare("admin", "export", "jobs", str(file))
    assert ran.code == 0, ran.err
    assert "1 rows" in ran.err
    assert "2 never ran and are left out" in " ".join(ran.err.split())
    head = "num_gpu,submit_time,duration,session,user,project,gpus"
    assert file.read_text().splitlines() == [head, "1,0.000000,90.000000,,u1,p1,0.5"]
    assert gpushare("admin", "export", "jobs", str(file)).code == 1, "no file is written over"
    cells = gpushare("admin", "export", "cells", "-")
    assert cells.out.splitlines() == [head, "1,0.000000,1.500000,,u1,p1,0.5"]
    assert gpushare("admin", "export", "jobs", "-", "--json").json["left_out"] == 2
    assert gpushare("admin", "export", "pods", "-").code == 2
