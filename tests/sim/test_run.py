"""``gpushare simulate``: words in, numbers out, exit codes; nothing half-written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from jupyter_gpushare.cli import main
from jupyter_gpushare.core.model import DEFAULT_POLICY
from jupyter_gpushare.sim import run, scenario
from jupyter_gpushare.sim.run import progress_bar

JOBS = "num_gpu,submit_time,duration\n1,0,60\n2,10,100\n1,20,30\n"
CELLS = "num_gpu,submit_time,duration\n1,0,1\n1,60,2\n2,5,1\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\na,1,1,1,500,\nb,1,1,1,1000,\n"
NODES = "sn,cpu_milli,memory_mib,gpu,model\nn,1000,1000,2,T4\n"

JOB_KEYS = {
    "jobs", "unfinished", "avg_completion_s", "median_completion_s", "p95_completion_s", "p99_completion_s",
    "avg_queue_s", "p99_queue_s", "makespan_s", "utilization", "allocation", "preemptions_per_job", "wall_s",
}  # fmt: skip
NOTEBOOK_KEYS = {
    "cells", "cells_delayed_percent", "p99_delay_s", "max_delay_s", "cells_waiting_for_cells",
    "idle_gpu_hours", "idle_available_percent", "idle_used_percent", "wall_s",
}  # fmt: skip
FRACTION_KEYS = {"pods", "allocated_percent_at_100", "allocated_percent_final", "wall_s"}


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Runs ``gpushare simulate`` where the files above lie; returns (exit code, output, errors)."""
    for name, text in (("jobs.csv", JOBS), ("cells.csv", CELLS), ("pods.csv", PODS), ("nodes.csv", NODES)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def call(words):
        try:
            code = main(["simulate", *words.split()])
        except SystemExit as stop:
            code = stop.code
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


@pytest.mark.parametrize("order", ["progress", "las", "fifo", "backfill", "srtf"])
@pytest.mark.parametrize("placement", ["--nodes 2", "--placement-nodes none", ""])
def test_jobs_as_json(simulate, order, placement):
    code, out, err = simulate(f"jobs jobs.csv --gpus 4 {placement} --order {order} --json")
    numbers = json.loads(out)
    assert (code, err) == (0, "")
    assert numbers.keys() >= JOB_KEYS
    assert (numbers["jobs"], numbers["unfinished"], numbers["avg_completion_s"]) == (3, 0, 63.333)


def test_jobs_report_progress(simulate):
    code, out, _ = simulate("jobs jobs.csv --gpus 4 --progress 1,0.3 --json")
    assert (code, json.loads(out)["avg_completion_s"]) == (0, 63.333)


@pytest.mark.parametrize("words", ["1", "a,b", "1.1,0", "0.5,-1", "0.5,nan", "0.5,0.3,1"])
def test_a_share_that_is_none_is_refused(simulate, words):
    code, _, errors = simulate(f"jobs jobs.csv --gpus 4 --progress {words}")
    assert code == 2
    assert "is not a share and an error like 0.5,0.3" in errors


@pytest.mark.parametrize("timeout", ["900", "adaptive", "0"])
def test_notebooks_as_json_with_and_without_jobs(simulate, timeout):
    code, out, _ = simulate(f"notebooks cells.csv --gpus 4 --nodes 2 --idle-timeout {timeout} --json")
    assert code == 0
    assert json.loads(out).keys() >= NOTEBOOK_KEYS
    assert "jobs" not in json.loads(out)
    code, out, _ = simulate(f"notebooks cells.csv --gpus 4 --jobs jobs.csv --idle-timeout {timeout} --json")
    assert json.loads(out).keys() >= NOTEBOOK_KEYS | JOB_KEYS


@pytest.mark.parametrize("placement", ["planner", "fgd", "best-fit", "random"])
def test_fractions_as_json(simulate, placement):
    words = f"fractions pods.csv --nodes-file nodes.csv --placement {placement} --seed 7 --json"
    code, out, _ = simulate(words)
    assert code == 0
    assert json.loads(out).keys() >= FRACTION_KEYS
    again = json.loads(simulate(words)[1])
    assert again["allocated_percent_final"] == json.loads(out)["allocated_percent_final"]


def test_a_table_for_people(simulate):
    code, out, _ = simulate("jobs jobs.csv --gpus 4 --weights 1,3")
    assert code == 0
    assert re.search(r"^avg completion s +63\.333$", out, re.MULTILINE)
    assert re.search(r"^p1 +0\.0 +3 ", out, re.MULTILINE)


@pytest.mark.parametrize("kind", ["jobs", "cells"])
def test_a_made_up_trace_can_be_simulated(simulate, kind):
    assert simulate(f"make {kind} load.csv.gz --count 30 --gpus 8")[0] == 0
    verb = "jobs" if kind == "jobs" else "notebooks"
    code, out, _ = simulate(f"{verb} load.csv.gz --gpus 240 --json")
    assert code == 0
    assert json.loads(out)["jobs" if kind == "jobs" else "sessions"] == 30


def test_a_plot_is_an_svg_of_allocation_and_utilization(simulate, tmp_path):
    assert simulate("jobs jobs.csv --gpus 4 --plot use.svg")[0] == 0
    drawing = ET.fromstring((tmp_path / "use.svg").read_text())
    queues = [e for e in drawing.iter() if e.tag.endswith("polyline")]
    assert len(queues) == 2
    assert {"allocation", "utilization"} <= {e.text for e in drawing.iter() if e.text}
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_a_plot_that_cannot_be_written_leaves_nothing(simulate, tmp_path):
    code, out, err = simulate("jobs jobs.csv --gpus 4 --plot nowhere/use.svg")
    assert (code, out) == (2, "")
    assert err.startswith("gpushare: ")
    assert "nowhere" in err
    assert len(err.splitlines()) == 1
    (tmp_path / "taken.svg").mkdir()
    assert simulate("jobs jobs.csv --gpus 4 --plot taken.svg")[0] == 2
    assert [p.name for p in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("jobs nothing.csv --gpus 4", "nothing.csv: cannot be read"),
        (
            "jobs jobs.csv --gpus 1",
            "jobs.csv, row 3: num_gpu is '2'; expected at most 1, the GPUs of the cluster",
        ),
        ("jobs cells.csv --gpus 4", "cells.csv, row 4: submit_time is '5'; expected at least 60"),
        ("jobs pods.csv --gpus 4", "pods.csv, row 1: the header has name"),
        ("jobs jobs.csv --gpus 4 --nodes 5", "4 GPUs cannot make 5 nodes"),
        ("jobs jobs.csv --gpus 4 --weights 1,2 --quotas 1", "--weights names 2 projects, --quotas 1"),
        ("jobs jobs.csv --gpus 4 --quotas 3,3", "--quotas guarantee 6 GPUs; the cluster has 4"),
        ("notebooks cells.csv --gpus 4 --nodes 4", "cells.csv, row 4: num_gpu is '2'; expected at most 1"),
        ("notebooks cells.csv --gpus 4 --saturate", "--saturate needs jobs"),
        ("fractions pods.csv --nodes-file jobs.csv", "jobs.csv, row 1: the header has"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(simulate, words, complaint):
    code, out, err = simulate(words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "",
        "jobs jobs.csv",
        "jobs jobs.csv --gpus 0",
        "jobs jobs.csv --gpus 4 --order sjf",
        "jobs jobs.csv --gpus 4 --guard never",
        "jobs jobs.csv --gpus 4 --preempt-cost -1",
        "jobs jobs.csv --gpus 4 --weights 1,,2",
        "notebooks cells.csv --gpus 4 --idle-timeout soon",
        "fractions pods.csv",
        "make jobs x.csv --load 0",
    ],
)
def test_bad_words_are_a_usage_error(simulate, words):
    code, out, err = simulate(words)
    assert (code, out) == (2, "")
    assert "usage: gpushare simulate" in err


def settings_of(words, monkeypatch):
    seen = {}

    def replay(jobs, fleet, settings, **more):
        seen.update(settings=settings, fleet=fleet, survival=more["survival"])
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "replay_jobs", replay)
    assert run.main(["jobs", "jobs.csv", "--gpus", "16", *words.split()]) == 130
    return seen["settings"], seen["fleet"], seen["survival"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--placement-nodes none", (0.0, None, None)),
        ("--placement-nodes none --preempt-cost 0", (0.0, None, None)),
        (
            "--placement-nodes none --preempt-cost 30",
            (DEFAULT_POLICY.min_run_s, DEFAULT_POLICY.starvation_guard_s, DEFAULT_POLICY.max_bypass_s),
        ),
        ("", (DEFAULT_POLICY.min_run_s, DEFAULT_POLICY.starvation_guard_s, DEFAULT_POLICY.max_bypass_s)),
        ("--min-run none --guard none --skip-wait none", (0.0, None, None)),
        ("--placement-nodes none --min-run 7 --guard 8 --skip-wait 9", (7.0, 8.0, 9.0)),
    ],
)
def test_the_ideal_is_what_was_published_and_all_else_has_its_price(simulate, monkeypatch, words, expected):
    settings, _, _ = settings_of(words, monkeypatch)
    assert (settings.min_run_s, settings.starvation_guard_s, settings.max_bypass_s) == expected


def test_nodes_have_eight_gpus_unless_told_otherwise(simulate, monkeypatch):
    assert settings_of("", monkeypatch)[1].nodes == 2
    _, fleet, _ = settings_of("--nodes 4 --islands 2", monkeypatch)
    assert fleet == scenario.Fleet(gpus=16, nodes=4, islands=2, movable=True)
    assert settings_of("--placement-nodes none", monkeypatch)[1].nodes is None


@pytest.mark.parametrize(
    ("words", "mode", "movable"),
    [
        ("", "suspend", True),
        ("--move off", "suspend", False),
        ("--checkpoint suspend,sigterm", "suspend,sigterm", True),
        ("--checkpoint none", "none", True),
        ("--placement-nodes none", "sigterm", True),
        ("--placement-nodes none --checkpoint suspend", "suspend", True),
    ],
)
def test_jobs_are_suspended_and_move_unless_told_otherwise(simulate, monkeypatch, words, mode, movable):
    _, fleet, survival = settings_of(words, monkeypatch)
    assert (survival, fleet.movable) == (mode, movable)


def test_a_bar_is_drawn_on_a_terminal_only_and_wiped_in_the_end(monkeypatch, capsys):
    monkeypatch.setattr("jupyter_gpushare.sim.run.REDRAW_S", 0.0)
    with progress_bar("jobs") as bar:
        bar(0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar("jobs") as bar:
        bar(0.5)
    err = capsys.readouterr().err
    assert "[###############...............]  50% of the jobs" in err
    assert err.endswith("\r\x1b[K")
