"""What ``gpushare doctor --site`` looks at: both configurations, files, and this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_gpushare import procfs
from jupyter_gpushare.backends.base import HubError
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.state.policy import ProjectConfig
from jupyter_gpushare.channel import api_url
from jupyter_gpushare.cli.checks import Check
from jupyter_gpushare.client import BlockingClient
from jupyter_gpushare.errors import GpuShareError, NotSetUp
from jupyter_gpushare.internal_tls import internal_tls
from jupyter_gpushare.protocol import wire

SERVICE = "gpushare"
_HUB_S = 5.0
_LISTENS = "0A"  # TCP_LISTEN

# A check yields what is wrong, or nothing.
Found = Iterator[Check]


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine for the checks; ``driver`` is empty where none is found."""

    gpu_memory_bytes: tuple[int, ...]
    ram_bytes: int
    driver: str
    cgroup_v2: bool
    # What a Hub that runs refuses to a token (with the broker's environment), and the remedy; whether a
    # broker that runs has not the API at an address (with its certificate); uids that listen at a port.
    ask_hub: Callable[[str, str, Mapping[str, str]], tuple[str, str] | None] = lambda *_: None
    ask_broker: Callable[[str, str], str] = lambda *_: ""
    listeners: Callable[[int], frozenset[int]] = lambda _port: frozenset()


@dataclass(frozen=True, slots=True)
class Files:
    """Where an installation keeps what no configuration names."""

    broker_environment: Path = Path("/etc/gpushare/broker.env")
    units: Path = Path("/etc/systemd/system")


@dataclass(frozen=True, slots=True)
class Site:
    """The configurations of Hub and broker, and the machine."""

    hub: Any  # JupyterHub with its configuration
    broker: GPUShareBroker
    projects: tuple[ProjectConfig, ...]
    machine: Machine
    files: Files

    @property
    def spawner(self) -> dict[str, Any]:
        """Settings of the mixin."""
        return {
            name: self.hub.config.GPUShareMixin.get(name, "")
            for name in ("broker_url", "broker_token_file", "broker_certificate_file")
        }

    def service(self) -> dict[str, Any] | None:
        """The broker as a service of the Hub."""
        return next((each for each in self.hub.services if each.get("name") == SERVICE), None)


def this_machine() -> Machine:
    """Return the facts about this machine as they are now."""
    from jupyter_gpushare.errors import DeviceError
    from jupyter_gpushare.gpu.driver.nvml import Nvml

    try:
        nvml = Nvml()
        driver, memory = nvml.driver, tuple(gpu.memory_bytes for gpu in nvml.gpus)
    except DeviceError:
        driver, memory = "", ()
    return Machine(
        gpu_memory_bytes=memory,
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        driver=driver,
        cgroup_v2=Path("/sys/fs/cgroup/cgroup.controllers").is_file(),
        ask_hub=ask_hub,
        ask_broker=ask_broker,
        listeners=listeners,
    )


def ask_hub(url: str, token: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what a running Hub refuses to this token, and the remedy; None: nothing, or no Hub runs.

    ``env`` is the broker's: it names the certificates of the Hub's internal TLS.

    Raises:
        GpuShareError: they cannot be used.
    """

    async def ask() -> tuple[str, str] | None:
        client = HubClient(url, token, timeout_s=_HUB_S, tls=internal_tls(env))
        try:
            await client.servers()
        except HubError as error:
            return (f"{error}.", error.remedy) if error.remedy else None
        finally:
            await client.close()
        return None

    return asyncio.run(ask())


def ask_broker(url: str, certificate: str) -> str:
    """Return why what listens at a spawner's address is not its broker; empty: it is, or nothing answers."""
    try:
        with contextlib.closing(
            BlockingClient(api_url(url), "", certificate=certificate, retry_s=0.0)
        ) as client:
            client.get("health", wire.Health)
    except NotSetUp as error:
        return str(error)
    except GpuShareError:
        return ""  # of a broker that does not run, other checks say so
    return ""


def listeners(port: int) -> frozenset[int]:
    """Return the uids of the sockets that listen at a port of this machine (proc(5), net/tcp)."""
    rows: list[list[str]] = []
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(procfs.path(0, table)).read_text().splitlines()[1:]]
    ours = [row for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    return frozenset(int(row[7]) for row in ours)
