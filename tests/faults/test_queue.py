"""Ten thousand queued jobs: a broker that starts finds all of them, decides, and refuses one more."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from jupyter_gpushare.errors import RequestError
from tests.broker.machine import Program
from tests.broker.virtual_time import until

JOBS = 10_000


def multiply(database: Path, job_id: str) -> set[str]:
    """Copy a queued job and its lease until there are `JOBS`; ids of all."""
    ids = [f"q{number:09d}" for number in range(JOBS - 1)]
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.row_factory = sqlite3.Row
        for table, old, prefix in (("jobs", job_id, ""), ("leases", f"j{job_id}", "j")):
            row = dict(connection.execute(f"select * from {table} where id = ?", (old,)).fetchone())
            copies = [row | {"id": prefix + each} for each in ids]
            for copy, each in zip(copies, ids, strict=True):
                copy.update({name: each for name in ("idempotency_key",) if name in row})
            names = ",".join(f":{name}" for name in row)
            connection.executemany(f"insert into {table} ({','.join(row)}) values ({names})", copies)
    return {job_id, *ids}


async def test_ten_thousand_queued_jobs_outlive_a_kill_and_go_on(site):
    site.policy = replace(site.policy, max_jobs=JOBS, max_jobs_per_user=JOBS)
    broker = await site.start_broker()
    holder = await site.running("bo", "2", program=Program(work_s=10))
    waiting = await site.submit("bo", "2")
    await broker.end()
    queued = multiply(Path(sa.make_url(site.url).database), waiting.id)
    broker = await site.start_broker()
    assert set(broker.registry.jobs) == {holder.id, *queued}
    with pytest.raises(RequestError) as refused:
        await site.submit("bo", "1")
    assert (refused.value.status, refused.value.reason) == (429, "too_many")
    await until(lambda: broker.job(holder).result, 600)
    await until(lambda: sum(site.started.values()) == 3, 600)
    assert set(site.started.values()) == {1}
