"""Made-up load: its percentiles are those of its description, its files are read back."""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import pytest

from jupyter_gpushare.sim import synthetic
from jupyter_gpushare.sim.metrics import percentile
from jupyter_gpushare.sim.traces import read_cells, read_jobs

DOCUMENTED = {
    "job duration": synthetic.JOB_S,
    "cell duration": synthetic.CELL_S,
    "pause after a cell": synthetic.PAUSE_S,
}


@pytest.mark.parametrize(("name", "law"), DOCUMENTED.items(), ids=DOCUMENTED)
def test_the_documented_percentiles_are_those_of_the_law(name, law):
    row = next(line for line in (synthetic.__doc__ or "").splitlines() if line.startswith(name))
    median, spread, *percentiles = (float(x.replace(",", "")) for x in re.findall(r"[\d.,]+", row))
    assert (median, spread) == (law.median, law.spread)
    for percent, said in zip((90, 95, 99), percentiles, strict=True):
        exact = law.median * math.exp(law.spread * NormalDist().inv_cdf(percent / 100))
        assert said == pytest.approx(exact, rel=0.002)


def test_jobs_have_the_documented_percentiles_and_load():
    jobs = synthetic.make_jobs(40_000, gpus=64, load=0.9, seed=3)
    durations = [job.duration_s for job in jobs]
    assert percentile(durations, 50) == pytest.approx(600, rel=0.05)
    assert percentile(durations, 90) == pytest.approx(7_785, rel=0.08)
    assert percentile(durations, 99) == pytest.approx(62_928, rel=0.15)
    work = sum(job.duration_s * job.gpus for job in jobs)
    assert work / jobs[-1].submit_at / 64 == pytest.approx(0.9, rel=0.12)
    assert sum(job.gpus == 1 for job in jobs) / len(jobs) == pytest.approx(0.75, abs=0.01)


def test_cells_and_pauses_have_the_documented_percentiles():
    sessions = synthetic.make_sessions(600, days=14, seed=3)
    cells = [cell for s in sessions for cell in s.cells]
    pauses = [
        b.submit_at - a.submit_at - a.duration_s
        for s in sessions
        for a, b in zip(s.cells, s.cells[1:], strict=False)
    ]
    assert percentile([c.duration_s for c in cells], 50) == pytest.approx(120, rel=0.05)
    assert percentile([c.duration_s for c in cells], 90) == pytest.approx(722, rel=0.08)
    assert percentile(pauses, 50) == pytest.approx(300, rel=0.05)
    assert percentile(pauses, 90) == pytest.approx(2_331, rel=0.08)
    assert percentile([float(len(s.cells)) for s in sessions], 50) == pytest.approx(20, rel=0.15)


def test_a_seed_makes_the_same_load_again_and_another_one_does_not():
    assert synthetic.make_sessions(5, days=1, seed=1) == synthetic.make_sessions(5, days=1, seed=1)
    assert synthetic.make_jobs(5, gpus=8, load=1, seed=1) != synthetic.make_jobs(5, gpus=8, load=1, seed=2)


def test_what_was_written_is_read_back(tmp_path):
    jobs = synthetic.make_jobs(50, gpus=8, load=0.5, seed=1)
    (tmp_path / "jobs.csv").write_text(synthetic.jobs_csv(jobs))
    assert read_jobs(tmp_path / "jobs.csv") == jobs
    sessions = synthetic.make_sessions(30, days=3, seed=1)
    (tmp_path / "cells.csv").write_text(synthetic.cells_csv(sessions))
    read = read_cells(tmp_path / "cells.csv")
    assert [(s.gpus, len(s.cells)) for s in read] == [(s.gpus, len(s.cells)) for s in sessions]
    for ours, theirs in zip(sessions, read, strict=True):
        assert theirs.cells[-1].submit_at == pytest.approx(ours.cells[-1].submit_at)
