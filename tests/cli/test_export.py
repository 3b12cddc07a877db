"""`gpushare admin export`."""

from __future__ import annotations

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
