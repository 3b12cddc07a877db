"""Start the proxy and the service of the demo's configuration as JupyterHub does, in a tenth of the time.

python -m tests.faults.stand_in FOLDER PORT
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from traitlets.config.loader import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]


def configuration() -> Any:
    """Return `jupyterhub_config.py` as this process reads it."""
    return PyFileConfigLoader("jupyterhub_config.py", path=str(ROOT)).load_config()


def service_environment(service: Any, port: int) -> dict[str, str]:
    """Return the environment of the Hub's service, with the variables by which tests find processes."""
    kept = ("HOME", "GPUSHARE_TEST_RUN")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        **service["environment"],
        "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{port + 3}",
        "JUPYTERHUB_SERVICE_PREFIX": "/services/gpushare/",
        "JUPYTERHUB_API_URL": f"http://127.0.0.1:{port + 1}/hub/api",
        "JUPYTERHUB_API_TOKEN": "token",
        "JUPYTERHUB_CLIENT_ID": "service-gpushare",
        "JUPYTERHUB_HOST": "",
        "JUPYTERHUB_BASE_URL": "/",
    }


def main(port: int) -> None:
    """Start both and wait for a signal."""
    found = configuration()
    (service,) = found.JupyterHub.services
    ports = ("--port", str(port), "--api-port", str(port + 2))
    for command, environment in (
        ([*found.ConfigurableHTTPProxy.command, "--ip", "127.0.0.1", *ports], dict(os.environ)),
        (service["command"], service_environment(service, port)),
    ):
        subprocess.Popen(command, env=environment, start_new_session=True)
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
