"""Traces for tests and benchmarks: the public ones in the folder `GPUSHARE_TRACES`, or made-up ones.

docs/simulator.md says where to get the public traces, which are not part of the project.  A
made-up trace has the columns of the public one and a few hundred rows, the same in every run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from jupyter_gpushare.sim.synthetic import cells_csv, jobs_csv, make_jobs, make_sessions

FOLDER = os.environ.get("GPUSHARE_TRACES")
JOBS, JOB_GPUS = 300, 32
SESSIONS = 40
PODS, NODES = 400, 12


def public(name: str) -> Path:
    """Return the path of a public trace; end the benchmark if there is none."""
    found = sorted(Path(FOLDER).glob(f"{name}.csv*")) if FOLDER else []
    if not found:
        sys.exit(f"no trace {name}: set GPUSHARE_TRACES to the folder of the traces (docs/simulator.md)")
    return found[0]


def made_up(name: str, folder: Path) -> Path:
    """Write a trace with the columns of the public one into ``folder``, and return its path.

    Raises:
        ValueError: no public trace has such a name.
    """
    kind = name.partition("_")[0]
    if kind == "training":
        text = jobs_csv(make_jobs(JOBS, gpus=JOB_GPUS, load=1.2, seed=1))
    elif kind == "notebooks":
        text = cells_csv(make_sessions(SESSIONS, days=7, seed=1))
    elif kind == "fractions":
        text = "\n".join([*(_nodes() if "nodes" in name else _pods()), ""])
    else:
        raise ValueError(f"no trace is named like {name}")
    path = folder / f"{name}.csv"
    path.write_text(text)
    return path


def _nodes() -> Iterator[str]:
    yield "sn,cpu_milli,memory_mib,gpu,model"
    yield from (f"n{number},96000,393216,8,A100" for number in range(NODES))


def _pods() -> Iterator[str]:
    rng = random.Random(1)
    sizes, weights = [(1, 250), (1, 500), (1, 1000), (4, 1000), (8, 1000)], [35, 30, 25, 6, 4]
    yield "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
    for number in range(PODS):
        gpus, milli = rng.choices(sizes, weights)[0]
        yield f"p{number},{4000 * gpus},16384,{gpus},{milli},"
