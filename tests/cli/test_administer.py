"""`gpushare admin` and `gpushare sleep`."""

from __future__ import annotations

import io

import msgspec
import pytest

from jupyter_gpushare.cli import output
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
    assert gpushare("admin", "quota", name, "--quota", "1.5", "--weight", "3").code == 0
    assert broker.seen[-1].json == {
        "quota": 1.5,
        "weight": 3,
        "limit": None,
        "priority_max": None,
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
