"""Measure an idle broker with 10,000 waiting jobs.

``.venv/bin/python -m tests.benchmarks.long_queue [seconds]``

Broker and device helper run as processes, with one simulated GPU that an idle
session holds, SQLite on disk and a Hub that knows the tokens.  100 users of two
projects have jobs in the queue, none of which can start.  The first part measures
the broker's CPU time without requests.  In the second, one client requests
``health`` and ``offers`` in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import sqlalchemy as sa
from tornado import httpserver, web

from jupyter_gpushare import native
from jupyter_gpushare.broker.http.secret_files import secret_file
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.state.tables import job_row, jobs, lease_row, leases
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.procfs import boot_id
from tests.benchmarks.broker_footprint import cpu_s
from tests.benchmarks.demo_hub import until
from tests.benchmarks.report import percentile, print_table
from tests.broker.http_site import ACCESS, person
from tests.broker.site import Site
from tests.ports import free_ports

QUEUED = 10_000
USERS = 100
SETTLES_S = 10
ASKED = 200
PROJECTS = ("vision", "nlp")
CONFIG = f"""
c.GPUShareBroker.projects = {{name: {{"quota": "50%", "groups": [name]}} for name in {PROJECTS}}}
c.GPUShareBroker.idle_timeout = 1e6
"""


async def _fill(folder: Path) -> None:
    """Create a database with `QUEUED` jobs, copies of one submitted job."""
    async with Site(folder, gpus=1) as site:
        site.boot_id = boot_id()
        await site.start_broker(running=False)
        await site.broker.loop.observer.measure()
        await site.submit("bo", "1")
    store = Store(site.url, boot_id())
    loaded = store.load()
    store.close()
    (record,), (job,) = loaded.leases, loaded.jobs
    rows_of_leases, rows_of_jobs, now = [], [], time.monotonic()
    for n in range(1, QUEUED):
        id, user, project = f"{n:010}", f"user{n % USERS}", PROJECTS[n % len(PROJECTS)]
        lease = replace(
            record.lease,
            id=f"j{id}",
            user=user,
            project=project,
            size=Size((250, 500, 1000)[n % 3]),
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )
        rows_of_leases.append(lease_row(replace(record, lease=lease, entered_at=now)))
        rows_of_jobs.append(job_row(replace(job, id=id, user=user, project=project, idempotency_key=None)))
    database = sa.create_engine(site.url)
    with database.begin() as connection:
        connection.execute(leases.insert(), rows_of_leases)
        connection.execute(jobs.insert(), rows_of_jobs)
    database.dispose()


class _HubUser(web.RequestHandler):
    """The Hub's model of one user, and its list of users."""

    def get(self, name: str = "") -> None:
        server = {"name": "", "ready": True}
        user = person("user0") | {"groups": [PROJECTS[0]], "servers": {"": server}}
        self.write(json.dumps({"items": [user], "_pagination": {"next": None}} if name == "s" else user))

    def post(self, name: str = "") -> None:
        self.set_status(429)  # until the session holds the GPU: "too many spawns"


def _answer_as_hub(port: int) -> None:
    async def serve() -> None:
        routes = [("/hub/api/user(s?)", _HubUser), ("/hub/api/users/.*", _HubUser)]
        server = httpserver.HTTPServer(web.Application(routes, log_function=lambda _: None))
        server.listen(port, "127.0.0.1")
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def _broker(folder: Path, port: int, hub_port: int) -> Iterator[psutil.Process]:
    (folder / "config.py").write_text("c = get_config()\n" + CONFIG)
    environment = {
        **os.environ,
        "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port}",
        "JUPYTERHUB_SERVICE_PREFIX": "/services/gpushare/",
        "JUPYTERHUB_API_URL": f"http://127.0.0.1:{hub_port}/hub/api",
        "JUPYTERHUB_API_TOKEN": "token",
        "JUPYTERHUB_CLIENT_ID": "service-gpushare",
        "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps([ACCESS]),
        "JUPYTERHUB_HOST": "",
        "JUPYTERHUB_BASE_URL": "/",
        "GPUSHARE_SIMULATE": "1xH100-80GB,host=512GiB",
        "GPUSHARE_SIM_STATE": str(folder / "simulated"),
        "LD_LIBRARY_PATH": str(native.sim_dir()),
    }
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "broker", "--respawn", "--with-helper"]
    with (folder / "log").open("wb") as log:
        parent = subprocess.Popen(
            [*command, "--state-dir", str(folder), "--config", str(folder / "config.py")],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            yield psutil.Process(parent.pid)
        finally:
            parent.terminate()
            parent.wait(60)


def _hold(folder: Path) -> subprocess.Popen[bytes]:
    """Start a session with the GPU, and its process."""
    body = {"user": "user0", "server": "", "groups": [PROJECTS[0]], "uid": os.getuid()}
    body["options"] = {"fraction": "1"}
    headers = {"Authorization": f"token {secret_file(folder / 'spawner-token')}"}
    transport = httpx.HTTPTransport(uds=str(folder / "api.sock"))
    with httpx.Client(transport=transport, headers=headers, timeout=60) as client:
        url = "http://localhost/services/gpushare/api/v1/spawner/start"
        while (answer := client.post(url, json=body)).status_code == 409:  # a job was granted just now
            time.sleep(0.5)
        grant = answer.raise_for_status().json()
    return subprocess.Popen(["sleep", "infinity"], env={**os.environ, **grant["env"]})


def _ask(api: str, seconds: dict[str, list[float]]) -> None:
    with httpx.Client(base_url=api, headers={"Authorization": "token user0"}, timeout=60) as client:
        for _ in range(ASKED):
            for path, took in seconds.items():
                begun = time.perf_counter()
                assert client.get(path).status_code in (200, 503)  # degraded where samples are late
                took.append(time.perf_counter() - begun)
                time.sleep(0.05)


def main(seconds: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".long-queue-") as name:
        folder, port, hub_port = Path(name), free_ports(), free_ports()
        asyncio.run(_fill(folder))
        threading.Thread(target=_answer_as_hub, args=(hub_port,), daemon=True).start()
        api = f"http://127.0.0.1:{port}/services/gpushare/api/v1"
        with _broker(folder, port, hub_port) as parent:

            def healthy() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{api}/health").status_code == 200
                return False

            until(healthy, "the broker answers", patience_s=300)
            held = _hold(folder)
            (broker,) = [x for x in parent.children() if "broker" in x.cmdline()]
            time.sleep(SETTLES_S)
            before, begun = cpu_s([broker]), time.monotonic()
            time.sleep(seconds)
            share = (cpu_s([broker]) - before) / (time.monotonic() - begun)
            took: dict[str, list[float]] = {"/health": [], "/offers": []}
            _ask(api, took)
            held.kill()
            held.wait()
    figures = [f"{1000 * percentile(x, p):.1f}" for x in took.values() for p in (50, 99)]
    head = ["", "CPU, % of a core", "health p50, ms", "p99", "offers p50, ms", "p99"]
    print_table("tests.benchmarks.long_queue", head, [[f"{QUEUED:,} jobs", f"{100 * share:.2f}", *figures]])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
