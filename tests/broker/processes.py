"""Run brokers as processes, without a Hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import httpx

from tests.forks import Forked, Forks
from tests.waiting import PATIENCE_S

BROKER = [sys.executable, "-m", "jupyter_gpushare.cli", "broker"]
IMPORTS = "import jupyter_gpushare.broker.app, jupyter_gpushare.cli, sqlalchemy.dialects.sqlite.pysqlite"
RUN = "from jupyter_gpushare.cli import main; raise SystemExit(main())"


class ForkedBroker:
    """A broker that a `Forks` started; as the `subprocess.Popen` of the others."""

    def __init__(self, process: Forked, stderr: IO[str]) -> None:
        self._process = process
        self.stderr = stderr
        self.pid, self.poll, self.wait = process.pid, process.poll, process.wait
        self.send_signal, self.terminate, self.kill = process.send_signal, process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        self.stderr.seek(0)
        return None, self.stderr.read()


class Brokers:
    """Starts brokers as the Hub would, and ends them with the test.

    With ``forks`` each broker is a fork of a process that has imported it, except under ``--respawn``
    and where `start` is called with ``forked=False``.
    """

    def __init__(self, folder: Path, port: int, forks: Forks | None = None) -> None:
        self.folder, self.port = folder, port
        self._forks = forks
        self.started: list[subprocess.Popen[str] | ForkedBroker] = []

    def service_environment(self, port=None):
        return {
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port or self.port}",
            "JUPYTERHUB_SERVICE_PREFIX": "/services/gpushare/",
            "JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api",
            "JUPYTERHUB_API_TOKEN": "token",
            "JUPYTERHUB_CLIENT_ID": "service-gpushare",
            "JUPYTERHUB_HOST": "",
            "JUPYTERHUB_BASE_URL": "/",
        }

    def start(self, *arguments, port=None, state="state", forked=True, **environment):
        words = ["--state-dir", str(self.folder / state), *arguments]
        env = os.environ | self.service_environment(port) | environment
        if self._forks is None or not forked or "--respawn" in words:
            broker = subprocess.Popen(
                [*BROKER, *words], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        else:
            # The broker shares the position of this file, but writes at its end.
            said = (self.folder / f"broker-{len(self.started)}.log").open("a+")
            broker = ForkedBroker(self._forks.start(RUN, ["broker", *words], env=env, stderr=said), said)
        self.started.append(broker)
        return broker

    def refused(self, *arguments, **options):
        """Return the last output line of a broker that does not start."""
        broker = self.start(*arguments, **options)
        _, said = broker.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in said, said
        assert broker.returncode == 1
        return said.strip().splitlines()[-1]

    def answers(self, broker=None):
        """Return whether the broker answers; without a device helper it cannot be healthy."""
        assert broker is None or broker.poll() is None, broker.communicate(timeout=PATIENCE_S)[1]
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/services/gpushare/api/v1/health").json()
        except httpx.TransportError:
            return None

    def close(self):
        for broker in self.started:
            if broker.poll() is None:
                try:
                    os.killpg(broker.pid, signal.SIGKILL)
                except ProcessLookupError:  # a fork that leads no process group yet
                    broker.kill()
            broker.communicate()
            broker.stderr.close()
