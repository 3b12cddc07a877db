"""What ran on a site, exported and replayed by the simulator."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
from typing import Any

import pytest

from jupyter_gpushare.broker.state import store as store_module
from jupyter_gpushare.broker.state import tables
from jupyter_gpushare.broker.state.observations import PauseTracker
from jupyter_gpushare.broker.state.records import BusyStretch, JobRecord
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.cli.administer import _write
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.sim.run import main as simulate
from jupyter_gpushare.sim.traces import read_cells, read_jobs
from jupyter_gpushare.wall_clock import seconds_between
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until


def as_file(kind: str, found: wire.Trace) -> str:
    text = io.StringIO()
    _write(text, kind, found)
    return text.getvalue()


def stretch(lease: str, minute: int, *, minutes: float = 1.0, gpus: float = 1.0) -> BusyStretch:
    return BusyStretch(
        lease=lease,
        user=f"user of {lease}",
        project="=nlp",
        gpus=gpus,
        began_at=f"2031-05-06T10:{minute:02d}:00.000Z",
        duration_s=60 * minutes,
    )


STRETCHES = [
    stretch("bone", 0),
    stretch("btwo", 1, gpus=0.5),
    stretch("bone", 2, minutes=2),
    stretch("bthree", 9),  # after all of the others have ended
    stretch("bfour", 9),  # in the same moment
    stretch("btwo", 5, minutes=0.5),
]


def replay_site(folder, jobs: int = 0) -> tuple[wire.Trace, wire.Trace]:
    """Return the traces of a site on which bo ran jobs of 30 s and more, and `STRETCHES` are stored."""
    found: list[wire.Trace] = []

    @in_virtual_time
    async def run() -> None:
        async with Site(folder) as site:
            broker = await site.start_broker()
            await broker.registry.journal.commit(*STRETCHES)
            for n in range(jobs):
                job = await site.submit("bo", program=Program(work_s=30.0 + n))
                await until(lambda id=job.id: bool(broker.registry.jobs[id].result), 600)
            found.append(await history.jobs(broker.registry, names=True))
            found.append(await history.cells(broker.registry, names=False))

    run()
    return found[0], found[1]


def test_sessions_are_told_apart_and_read_as_they_were(tmp_path):
    found = replay_site(tmp_path)[1]
    file = tmp_path / "cells.csv"
    file.write_text(as_file("cells", found))
    sessions = read_cells(file)
    assert sorted((each.gpus, [c.duration_s for c in each.cells]) for each in sessions) == sorted(
        [(1, [60, 120]), (1, [60, 30]), (1, [60]), (1, [60])]
    )
    (two,) = [each for each in sessions if [c.duration_s for c in each.cells] == [60, 30]]
    assert two.cells[1].submit_at - two.cells[0].submit_at == pytest.approx(240, abs=0.01)
    assert {row.user for row in found.rows} == {"u1", "u2", "u3", "u4"}
    assert {row.gpus for row in found.rows} == {0.5, 1.0}
    assert "user of" not in file.read_text()


def test_a_simulation_replays_the_export(tmp_path, capsys):
    jobs, cells = replay_site(tmp_path, jobs=3)
    assert [row.user for row in jobs.rows] == ["bo"] * 3
    assert [round(row.duration_s) for row in jobs.rows] == pytest.approx([30, 31, 32], abs=3)
    files = {"jobs": tmp_path / "jobs.csv", "cells": tmp_path / "cells.csv"}
    for kind, found in (("jobs", jobs), ("cells", cells)):
        files[kind].write_text(as_file(kind, found))
    assert len(read_jobs(files["jobs"])) == 3
    asked = ["notebooks", str(files["cells"]), "--gpus", "8", "--jobs", str(files["jobs"]), "--json"]
    assert simulate([*asked, "--idle-timeout", "60"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cells"] == 6
    assert simulate(["jobs", str(files["jobs"]), "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == 3


async def test_the_work_of_a_session_is_measured_and_kept(site):
    registry = (await site.start_broker()).registry
    held = await site.session("ada", "1/2")
    await asyncio.sleep(400)  # its start is a stretch of its own
    began_at = site.wall()
    for _ in range(30):
        await site.gpu_cell(held)
        await asyncio.sleep(1)
    await asyncio.sleep(400)  # sums are stored every few minutes
    *_, last = await store_module.cells(registry.store)
    assert (last.user, last.project, last.gpus) == ("ada", "vision", 0.5)
    assert seconds_between(began_at, last.began_at) <= 5
    assert last.duration_s == pytest.approx(29, abs=5)


async def test_stretches_below_a_second_are_not_kept(site):
    registry = (await site.start_broker()).registry
    await site.session("ada", "1/2")
    lease = registry.by_server("ada", "").lease
    await asyncio.sleep(400)
    stored = await store_module.cells(registry.store)
    for seconds in (10.0, 20.0, 0.5):  # the last is what is left of the time of a sample
        registry.usage.worked(lease, 100.0, seconds, registry.iso_now())
    await asyncio.sleep(400)
    added = (await store_module.cells(registry.store))[len(stored) :]
    assert [each.duration_s for each in added] == [10.0, 20.0]


def test_an_export_is_read_in_pages_of_short_columns_that_no_commit_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PAGE", 7)
    monkeypatch.setattr(store_module, "_REQUESTS_PER_QUERY", 3)
    pages: list[tuple[str, int, int]] = []
    plain = Store._rows

    def noted(self: Store, query: Any) -> Any:
        found = plain(self, query)
        pages.append((threading.current_thread().name, len(found), len(str(found))))
        return found

    monkeypatch.setattr(Store, "_rows", noted)
    request = wire.encode(wire.JobRequest(command=["x"], gpus="1/2", env={"A": "a" * 5_000})).decode()
    ended = [
        JobRecord(
            id=f"j{n:02d}",
            user="bo",
            project="nlp",
            name="x",
            command=("x",),
            cwd=None,
            env={"A": "a" * 5_000},
            retries=0,
            grace_s=1.0,
            request=request if n else "{",
            submitted_at=f"2031-05-06T14:{n // 2:02d}:00.000Z",
            result="succeeded",
            ran_s=1.0,
        )
        for n in range(20)
    ]
    store = Store(f"sqlite:///{tmp_path / 'pages.sqlite'}", "boot")
    store._write((*ended, *(stretch("bone", n) for n in range(20))))
    pages.clear()
    jobs = asyncio.run(store_module.ended_jobs(store))
    cells = asyncio.run(store_module.cells(store))
    assert all(length < 2_000 for _, _, length in pages), "no commands, no environments"
    sizes = asyncio.run(store_module.sizes(store, (job.id for job in jobs)))
    store.close()
    assert [job.id for job in jobs] == [job.id for job in ended]
    assert [each.began_at[14:16] for each in cells] == [f"{n:02d}" for n in range(20)]
    assert sizes.keys() == {job.id for job in ended[1:]}
    assert {size.text for size in sizes.values()} == {"1/2 GPU"}
    assert len(pages) == 3 + 3 + 7
    assert all(name.startswith("store-scans") and rows <= 7 for name, rows, _ in pages)


def test_a_session_that_worked_and_paused_is_one_stretch():
    pauses = PauseTracker(busy_from=100.0)
    assert pauses.saw(None, 110.0) is None
    assert pauses.saw(130.0, 132.0) == 30.0
    assert pauses.saw(130.0, 140.0) is None, "a pause is counted once"
    assert pauses.saw(None, 150.0) is None
    assert pauses.saw(155.0, 158.0) == 5.0
    assert pauses.busy_from == 150.0


def test_the_oldest_work_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_CELLS", 10)
    store = Store(f"sqlite:///{tmp_path / 'cells.sqlite'}", "boot")
    store._write(tuple(stretch("bone", n % 60) for n in range(1_005)))
    kept = asyncio.run(store_module.cells(store))
    store.close()
    assert len(kept) == 15


def test_a_name_of_the_trace_starts_no_formula():
    row = wire.TraceRow(
        session="s1", user="=cmd()", project="+p", num_gpu=1, gpus=1.0, submit_s=0.0, duration_s=60.0
    )
    text = as_file("cells", wire.Trace(rows=[row], left_out=0, since=""))
    (_, cells) = csv.reader(io.StringIO(text))
    assert cells == ["1", "0.000000", "1.000000", "s1", "'=cmd()", "'+p", "1"]
