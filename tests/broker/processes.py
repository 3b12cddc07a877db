"""Brokers as processes, without a Hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.waiting import PATIENCE_S

BROKER = [sys.executable, "-m", "jupyter_gpushare.cli", "broker"]


class Brokers:
    """Starts brokers as the Hub would, without a Hub; ends them with the test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.started: list[subprocess.Popen[str]] = []

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

    def start(self, *arguments, port=None, state="state", **environment):
        service = self.service_environment(port) | environment
        broker = subprocess.Popen(
            [*BROKER, "--state-dir", str(self.folder / state), *arguments],
            env=os.environ | service,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(broker)
        return broker

    def refused(self, *arguments, **options):
        """The last line of a broker that does not start."""
        broker = self.start(*arguments, **options)
        _, said = broker.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in said, said
        assert broker.returncode == 1
        return said.strip().splitlines()[-1]

    def answers(self, broker=None):
        """Whether it answers at all; healthy it cannot be without a device helper."""
        assert broker is None or broker.poll() is None, broker.stderr.read()
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/services/gpushare/api/v1/health").json()
        except httpx.TransportError:
            return None

    def close(self):
        for broker in self.started:
            if broker.poll() is None:
                os.killpg(broker.pid, signal.SIGKILL)
            broker.communicate()
