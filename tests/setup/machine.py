"""A machine that the commands of the docs set up and run, for tests of the docs' chapters.

It has the units of docs/units under a real systemd and the configurations of docs/admin.md.  Hub, proxy,
broker, device helper, JupyterLab's servers, kernels and jobs are real; only the GPUs are simulated.
Services run as root, because the interpreter of the tests may be in a folder that other users cannot
reach, and without a private /tmp, because the environment is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.chapters import ROOT, block
from tests.e2e.demo import Reached
from tests.ports import free_ports
from tests.systemd import Systemd
from tests.waiting import PATIENCE_S, until

UNITS = {path.name: path.read_text() for path in (ROOT / "docs" / "units").iterdir()}
SERVICES = [name for name in UNITS if name.endswith(".service")]
# Settings of the tests, in addition to those of docs/admin.md.
HUB = """
c.JupyterHub.bind_url = "http://127.0.0.1:{proxy}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_api}"
c.ConfigurableHTTPProxy.command = ["{program}"]
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.spawner_class = "gpushare-simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/home/{{username}}"
c.Spawner.args = ["--allow-root"]
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
c.Spawner.env_keep = ["PATH", "LANG", "GPUSHARE_SIMULATE", "GPUSHARE_SIM_STATE", "LD_LIBRARY_PATH"]
"""
DROP_IN = """
[Service]
PrivateTmp=no
ProtectHome=no
StandardOutput=append:{log}
StandardError=append:{log}
"""


def packages_of(folder: Path) -> Path:
    """Return the folder with the packages of an environment."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def environment(folder: Path) -> Path:
    """Create an environment for wheels, with pip and their dependencies, like /opt/jupyterhub."""
    venv.create(folder, with_pip=True)
    # A folder named in a .pth file comes last, and its own .pth files are not read.
    (packages_of(folder) / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for program, module in (
        ("jupyterhub", "jupyterhub"),
        ("jupyterhub-singleuser", "jupyterhub.singleuser"),
        ("certipy", "certipy"),
    ):
        path = folder / "bin" / program
        path.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {module} "$@"\n')
        path.chmod(0o755)
    return folder


class Site(Reached, Systemd):
    """A machine set up as in docs/admin.md, in the namespaces of its systemd."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # users load the package's library
        self.opt = environment(folder / "opt")
        self.packages = packages_of(self.opt)
        self.port = free_ports(4)
        ports = {
            "proxy": self.port,
            "proxy_api": self.port + 1,
            "hub": self.port + 2,
            "broker": self.port + 3,
        }
        self.etc = folder / "etc"
        self._here = {
            "/opt/jupyterhub": str(self.opt),
            "/etc/systemd/system": str(folder / "units"),
            "/etc/": f"{self.etc}/",
            "/backup/": f"{folder}/backup/",
            "127.0.0.1:8011": f"127.0.0.1:{ports['broker']}",
            "127.0.0.1:8081": f"127.0.0.1:{ports['hub']}",
            "doctor --site": f"doctor --site --hub-config {self.etc}/jupyterhub/jupyterhub_config.py"
            f" --broker-config {self.etc}/gpushare/broker_config.py",
            # The services' user.
            "User=gpushare": "User=root",
            "Group=gpushare": "Group=root",
            "-o gpushare -g gpushare": "-o root -g root",
            "-g gpushare": "-g root",
            "GPUSHARE_BROKER_UID=985": "GPUSHARE_BROKER_UID=0",
            "idle_timeout = 900": "idle_timeout = 2",
        }
        for inner in ("etc/jupyterhub", "etc/gpushare", "backup", "home"):
            (folder / inner).mkdir(parents=True)
        program = Path(sys.executable).with_name("configurable-http-proxy")
        hub = block("admin", "3. The Hub", "python") + HUB.format(folder=folder, program=program, **ports)
        broker = block("admin", "4. The broker", "python")
        (self.etc / "jupyterhub" / "jupyterhub_config.py").write_text(self.here(hub))
        (self.etc / "gpushare" / "broker_config.py").write_text(self.here(broker))
        super().__init__(folder)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def hub_url(self) -> str:
        return f"http://127.0.0.1:{self.port + 2}"

    def here(self, text: str) -> str:
        """Return a text of the docs with the paths, the ports and the user of this site."""
        for there, path in self._here.items():
            text = text.replace(there, path)
        return text

    def write_units(self, units: Path) -> None:
        super().write_units(units)
        for name, text in UNITS.items():
            (units / name).write_text(self.here(text))
        for name in SERVICES:
            (units / f"{name}.d").mkdir()
            (units / f"{name}.d" / "test.conf").write_text(DROP_IN.format(log=self.folder / f"{name}.log"))

    def play(self, page: str, chapter: str, folder: Path = Path("/"), number: int = 0) -> str:
        """Run one block of a chapter's commands where the services run; return the output."""
        return self.shell(f"cd {folder}\n" + self.here(block(page, chapter, "bash", number)))

    def play_as(self, page: str, chapter: str, **variables: str) -> str:
        """Run a chapter's commands with other values for the variables of its first line."""
        first, _, commands = block(page, chapter, "bash").partition("\n")
        assert all(f"{name}=" in first for name in variables)
        values = "\n".join(f"{name}={value}" for name, value in variables.items())
        return self.shell(f"{values}\n{self.here(commands)}")

    def shell(self, commands: str) -> str:
        """Run commands where the services run; return the output."""
        environment = {
            "PATH": f"{self.opt}/bin:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # For `doctor --site`, as on the page.
            "GPUSHARE_SIMULATE": "4xH100-80GB,host=512GiB",
            "GPUSHARE_SIM_STATE": "/run/gpushare/simulated-gpus",
            "LD_LIBRARY_PATH": str(self.packages / "jupyter_gpushare" / "native" / "lib" / "sim"),
        }
        done = subprocess.run(
            [*self.beside, "bash", "-xe", "-c", commands],
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{self._log_of(name)[-2000:]}" for name in SERVICES)

    def _log_of(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def health(self) -> dict[str, Any]:
        """Return the broker's `health` through the proxy, or {} without an answer."""
        try:
            answer = httpx.get(f"{self.url}/services/gpushare/api/v1/health", trust_env=False)
        except httpx.TransportError:
            return {}
        # The proxy answers 503 too, with a page.
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return dict(answer.json()) if is_json else {}

    def is_well(self, version: str) -> bool:
        health = self.health()
        return (health.get("version"), health.get("status")) == (version, "ok")


@contextmanager
def installed(wheel: Path, version: str, hub_config: str = "") -> Iterator[Site]:
    """Yield a working site with a wheel of this version, and extra lines in the Hub's configuration."""
    # A path of a unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gpushare-site-") as name, Site.booted(Path(name)) as made:
        pip = [made.opt / "bin" / "pip", "install", "--quiet", "--no-index", wheel]
        subprocess.run(pip, check=True, timeout=PATIENCE_S)
        with (made.etc / "jupyterhub" / "jupyterhub_config.py").open("a") as file:
            file.write(hub_config)
        made.play("admin", "2. Two secrets")
        made.play("operations", "Rehearse on the simulated driver")
        made.run("start", "gpushare-broker.service")
        log = made.folder / "jupyterhub.service.log"
        until(lambda: made.is_well(version), "the site works", log=log)
        yield made
