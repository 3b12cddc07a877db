"""How long one forecast of all jobs takes: ``python -m tests.benchmarks.forecast_speed``.

Every GPU runs a job of one of one or three projects, and 1,000 jobs of all sizes wait; half
of all jobs have measured progress, the others the run times of 500 ended jobs.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from random import Random

from jupyter_gpushare.core.estimate import Work, forecast
from jupyter_gpushare.core.model import (
    DEFAULT_ORDER,
    DEFAULT_POLICY,
    Cluster,
    Device,
    Kind,
    Lease,
    Order,
    Project,
    State,
)
from jupyter_gpushare.core.size import Size
from tests.benchmarks.report import print_table

NOW = 100_000.0
GIB = 1 << 30
WEIGHTS = (1, 2, 4)  # of the projects


def asked(gpus: int, projects: int, waiting: int, order: Order) -> tuple[Cluster, Work]:
    """A cluster with all GPUs in use, and what is known of its jobs."""
    random = Random(gpus)
    devices = tuple(
        Device(uuid=f"gpu{n:04}", memory_bytes=80 * GIB, node=f"n{n // 8:03}") for n in range(gpus)
    )
    sharing = tuple(
        Project(name=f"p{n}", quota_milli=gpus * 125, weight=w) for n, w in enumerate(WEIGHTS[:projects])
    )
    settings = replace(DEFAULT_POLICY, order=order)
    running = [_job(f"r{n:04}", random, projects, devices=(device.uuid,)) for n, device in enumerate(devices)]
    queued = [_job(f"w{n:04}", random, projects) for n in range(waiting)]
    leases = tuple(running + queued)
    work = Work(
        left_gpu_s={x.id: random.lognormvariate(9, 2) for x in leases if random.random() < 0.5},
        ran_s={p.name: [random.lognormvariate(7, 2) for _ in range(500 // projects)] for p in sharing},
    )
    return Cluster(devices=devices, projects=sharing, leases=leases, settings=settings), work


def _job(id: str, random: Random, projects: int, devices: tuple[str, ...] = ()) -> Lease:
    ran = bool(devices) or random.random() < 0.5
    at = NOW - random.uniform(600, 50_000)
    return Lease(
        id=id,
        project=f"p{random.randrange(projects)}",
        kind=Kind.TRAIN,
        state=State.RUNNING if devices else State.PENDING,
        size=Size(fraction_milli=1000, device_count=1 if devices else random.choice([1, 1, 1, 1, 2, 4, 8])),
        held_milli=1000 if devices else 0,
        devices=devices,
        submitted_at=at,
        queued_at=at,
        waits_since_at=at,
        granted_at=at,
        attained_gpu_s=random.lognormvariate(8, 2) if ran else 0.0,
        attained_at=NOW if devices else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1_000)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--order", type=Order, default=DEFAULT_ORDER)
    args = parser.parse_args()
    rows = []
    for projects in (1, 3):
        for gpus in (8, 64, 256):
            cluster, work = asked(gpus, projects, args.waiting, args.order)
            took = []
            for _ in range(args.times):
                gc.collect()
                began = time.process_time()
                found = forecast(cluster, NOW, work)
                took.append(1000 * (time.process_time() - began))
            took.sort()
            told = f"{len(found.starts)} and {len(found.ends)}"
            times = [f"{ms:.0f} ms" for ms in (took[len(took) // 2], took[-1])]
            rows.append([str(projects), str(gpus), str(args.waiting), told, *times])
    head = ["projects", "GPUs", "waiting jobs", "starts and ends told", "median", "longest"]
    print_table("tests.benchmarks.forecast_speed", head, rows)


if __name__ == "__main__":
    main()
