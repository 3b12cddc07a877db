"""`gpushare wake`, `keep`, `lend`, `usage`, `show`, `retry`, and notebooks as jobs."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from jupyter_gpushare.cli import output, verbs


@pytest.fixture
def leases(golden):
    """The leases of ada's default server and of her server "b"."""
    lease = golden("status_active")["leases"][0]
    return [lease, lease | {"id": "bother", "server": "b"}]


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (["wake"], "resume", None),
        (["lend"], "lend", None),
        (["keep"], "keep", {"minutes": 30.0}),
        (["keep", "--minutes", "60"], "keep", {"minutes": 60.0}),
    ],
)
def test_a_verb_acts_on_the_session_of_the_server_it_runs_in(
    gpushare, broker, monkeypatch, leases, words, path, body
):
    monkeypatch.setenv("JUPYTERHUB_SERVER_NAME", "b")
    broker.answer("GET leases", {"leases": leases})
    broker.answer(f"POST leases/bother/{path}", leases[1])
    ran = gpushare(*words)
    assert ran.code == 0, ran.err
    left = "90 min of that are left today; `gpushare keep --minutes 0` undoes it.\n"
    assert ran.out == "Active: Your 1/2 GPU is in use.\n" + (left if words[0] == "keep" else "")
    (request,) = broker.asked(f"POST leases/bother/{path}")
    assert (request.json if request.body else None) == body


def test_resize_changes_the_session_and_says_what_kernels_see(gpushare, broker, leases):
    broker.answer("GET leases", {"leases": leases[:1]})
    path = f"PUT leases/{leases[0]['id']}/size"
    broker.answer(path, leases[0])
    ran = gpushare("resize", "--memory", "40GiB", "--borrow")
    assert ran.code == 0, ran.err
    assert "This session has 1/2 GPU now (40 GiB)." in " ".join(ran.out.split())
    assert "JAX and TensorFlow after a restart" in " ".join(ran.out.split())
    (request,) = broker.asked(path)
    assert request.json == {"gpus": None, "memory": "40GiB", "borrow": True, "project": None}
    assert json.loads(gpushare("resize", "--gpus", "1/2", "--json").out)["size"] == "1/2 GPU"
    assert gpushare("resize").code == 2


def test_from_elsewhere_the_only_session_is_meant_and_of_several_one_is_named(gpushare, broker, leases):
    broker.answer("GET leases", {"leases": leases[:1]})
    broker.answer(f"POST leases/{leases[0]['id']}/resume", leases[0])
    assert gpushare("wake").code == 0
    broker.answer("GET leases", {"leases": leases})
    ran = gpushare("wake")
    assert ran.code == 1
    assert "--server NAME: '', 'b'" in ran.err
    broker.answer("POST leases/bother/resume", leases[1])
    assert gpushare("wake", "--server", "b").code == 0


def test_a_server_without_gpu_is_named_and_no_job_is_taken_for_it(gpushare, broker, leases):
    broker.answer("GET leases", {"leases": [leases[0] | {"job": "k3v9m2x7qa"}]})
    ran = gpushare("lend", "--server", "b")
    assert (ran.code, ran.out) == (1, "")
    assert "The server 'b' holds no GPU" in ran.err


def test_usage_is_a_table_in_which_a_few_minutes_are_not_nothing(gpushare, broker):
    day = {"day": "2031-05-06", "project": "vision", "used_gpu_s": 7200.0, "lent_gpu_s": 60.0}
    broker.answer("GET history", {"days": [day], "used_gpu_s": 7200.0, "lent_gpu_s": 60.0, "helped_jobs": 1})
    out = gpushare("usage").out
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["DAY", "PROJECT", "USED", "LENT"],
        ["2031-05-06", "vision", "2.0", "0.017"],
        ["total", "2.0", "0.017"],
    ]
    assert "lent their GPUs to 1 job." in out
    broker.answer("GET history", {"days": [], "used_gpu_s": 0, "lent_gpu_s": 0, "helped_jobs": 0})
    assert gpushare("usage").out == "No GPU was used in the last seven days.\n"


def test_show_tells_the_job_and_every_pause_at_the_times_of_this_machine(gpushare, broker, golden, india):
    since = {"key": "time", "args": ["2031-05-06T14:31Z"]}
    paused = {"key": "job.requeued", "args": [since, {"key": "because.idle", "args": []}]}
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"reason": "At 14:31.", "reason_texts": [paused]})
    moment = {"at": "2031-05-06T14:31:00.000Z", "what": "suspend", "sentence": "Paused for nlp."}
    broker.answer("GET jobs/k3v9m2x7qa/timeline", {"moments": [moment]})
    out = gpushare("show", "k3v9m2x7qa").out
    assert out.startswith(f"{golden('job')['name']} (k3v9m2x7qa): {golden('job')['state']}\n")
    assert "  Paused at 6 May 20:01 because it was idle and others wait.\n" in out
    assert "2031-05-06 20:01:00  Paused for nlp." in out
    assert "  shares its GPU with job p4w8n1y6rb\n" in out
    shown = gpushare("show", "--json", "k3v9m2x7qa").json
    assert (shown["job"]["id"], shown["timeline"]) == ("k3v9m2x7qa", [moment | {"sentence_texts": []}])


PRINTED = "Ended with exit code 1. It last printed:\nIn line 3:\nValueError: bad"


def test_a_failed_job_shows_its_last_lines_and_in_a_table_the_last(gpushare, broker, golden):
    failed = golden("job") | {"state": "failed", "reason": PRINTED, "reason_texts": []}
    broker.answer("GET jobs/k3v9m2x7qa", failed)
    broker.answer("GET jobs/k3v9m2x7qa/timeline", {"moments": []})
    quoted = ["Ended with exit code 1. It last printed:", "In line 3:", "ValueError: bad"]
    assert gpushare("show", "k3v9m2x7qa").out.splitlines()[1:4] == [f"  {line}" for line in quoted]
    broker.answer("POST jobs", failed, 201)
    assert gpushare("submit", "--wait", "--", "false").out.splitlines() == [
        f"k3v9m2x7qa  failed  {quoted[0]}",
        "    In line 3:",
        "    ValueError: bad",
    ]
    broker.answer("GET jobs", {"jobs": [failed]})
    assert gpushare("jobs").out.splitlines()[1].endswith(f"{quoted[0]} ValueError: bad")


def test_retry_prints_the_new_job(gpushare, broker, golden):
    broker.answer("POST jobs/k3v9m2x7qa/retry", golden("job") | {"id": "newjob0001"}, 201)
    assert gpushare("retry", "k3v9m2x7qa").out.startswith("newjob0001  ")


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """A notebook with a parameter below the working directory, in the home of a user of the Hub."""
    folder = tmp_path / "home" / "work"
    folder.mkdir()
    tagged = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "steps = 1\nrate = 0.1"}
    (folder / "train it.ipynb").write_text(json.dumps({"cells": [tagged], "metadata": {}}))
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    monkeypatch.chdir(folder)
    return folder / "train it.ipynb"


@pytest.mark.parametrize(
    "words",
    [
        ["train it.ipynb", "-p", "steps=5", "--gpus", "1/2"],
        ["--gpus", "1/2", "-p", "steps=5", "train it.ipynb"],
    ],
)
def test_a_notebook_is_submitted_as_the_dialog_submits_it(gpushare, broker, golden, notebook, words):
    broker.answer("POST jobs", golden("job"), 201)
    ran = gpushare("submit", *words)
    assert ran.code == 0, ran.err
    (request,) = broker.asked("POST jobs")
    command = request.json["command"]
    assert command[:4] == [sys.executable, "-X", "utf8", "-P"]
    assert command[4:7] == ["-m", "jupyter_gpushare.job.notebook", str(notebook)]
    assert command[7].startswith(str(notebook.with_name(f"train it-{time.strftime('%Y')}")))
    assert command[8:] == ["-p", "steps", "5"]
    assert (request.json["gpus"], request.json["cwd"]) == ("1/2", str(notebook.parent))
    assert request.json["name"] == "train it.ipynb"
    assert request.json["source"]["path"] == "work/train it.ipynb"


def test_a_notebook_that_is_not_there_is_named(gpushare, broker, notebook):
    ran = gpushare("submit", "other.ipynb")
    assert ran.code == 2
    assert f"there is no notebook '{notebook.with_name('other.ipynb')}'" in ran.err


def test_in_a_terminal_lines_are_wrapped_at_words(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    output.print_table(["ID", ""], [["k3v9m2x7qa", "Two GPUs together are needed and one is free. " * 3]])
    output.say("Your session sleeps and its GPU is lent to a job. " * 3, indent="  ")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 60
    assert lines[2].startswith(" " * 12)
    assert all(not line.endswith((" ", "-")) for line in lines[1:])


def test_in_a_terminal_errors_are_wrapped_at_words(gpushare, broker, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(verbs, "RETRY_S", 0.1)
    said = gpushare("frobnicate").err + gpushare("status", "--url", "http://127.0.0.1:9/" + "x" * 5).err
    assert max(map(len, said.splitlines())) <= 60
    assert re.search(r"choose\s+from status, jobs,", said)
