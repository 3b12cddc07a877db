"""Sleeping sessions on a site that ends idle kernels and servers: they read when, and what ended them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import running
from tests.e2e.demo import DemoHub, Kernel, Person, until

SERVER_S, KERNEL_S = 600, 45
SITE = """
import sys
c.JupyterHub.services.append({{
    "name": "idle-culler",
    "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout={server}", "--cull-every=600"],
}})
c.JupyterHub.load_roles.append({{
    "name": "idle-culler",
    "services": ["idle-culler"],
    "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
}})
c.Spawner.args += [{arguments}]
"""
ALLOCATE = """
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
weights = gpu.allocate("2GiB")
import os
os.getpid()
"""


def site(*arguments: str) -> str:
    return SITE.format(server=SERVER_S, arguments=", ".join(map(repr, arguments)))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    culling = ["--MappingKernelManager.cull_interval=2"]
    culling.append(f"--MappingKernelManager.cull_idle_timeout={KERNEL_S}")
    with running(DemoHub(tmp_path, site=site(*culling))) as demo:
        yield demo


def losses(person: Person) -> list[str]:
    return [each["sentence"] for each in person.ask("status")["events"] if each["action"] == "saved-lost"]


def open_kernel(ada: Person) -> tuple[Kernel, int]:
    """Return a kernel that holds GPU memory, whose page is closed, and its process."""
    kernel = ada.kernel()
    pid = int(kernel.run(ALLOCATE))
    kernel.disconnect()
    return kernel, pid


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sleeper_reads_when_the_site_ends_it_and_afterwards_what_did(hub: DemoHub, tmp_path: Path) -> None:
    ada, bo = hub.person("ada"), hub.person("bo")
    ada.start_server(fraction="0.5")
    (_, killed), (shut_down, _), _ = open_kernel(ada), open_kernel(ada), open_kernel(ada)
    bo.gpushare("submit", "--gpus", "2", "--", sys.executable, "-c", "import time; time.sleep(600)")
    until("ada sleeps", lambda: ada.state() == "suspended")
    ends = "If it stays idle, its server shuts its kernel down after "
    said = until("the server said when it ends kernels", lambda: ends in (s := ada.lease()["sentence"]) and s)
    assert "safe" not in said
    assert ada.lease()["ends_by"] == "cull_idle_timeout"

    os.kill(killed, signal.SIGKILL)
    until("a killed kernel is told", lambda: len(losses(ada)) == 1)
    assert "lost 2.5 GiB of saved GPU memory at" in losses(ada)[0]
    assert "was killed (SIGKILL), as happens when memory runs out." in losses(ada)[0]

    ada.http.delete(f"/user/ada/api/kernels/{shut_down.id}")
    until("a kernel that was shut down is told", lambda: len(losses(ada)) == 2)
    assert "was shut down on request." in losses(ada)[0]

    until("the setting ended the third", lambda: len(losses(ada)) == 3)
    assert "was shut down after it had been idle for longer than cull_idle_timeout allows." in losses(ada)[0]
    assert not ada.lease()["memory_saved_bytes"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_culler_of_the_hub_is_named_before_and_after_it_ends_a_sleeper(tmp_path: Path) -> None:
    with running(DemoHub(tmp_path, site=site())) as hub:
        ada, bo = hub.person("ada"), hub.person("bo")
        ada.start_server(fraction="0.5")
        open_kernel(ada)
        bo.gpushare("submit", "--gpus", "2", "--", sys.executable, "-c", "import time; time.sleep(600)")
        until("ada sleeps", lambda: ada.state() == "suspended")
        ends = "If it stays idle, idle-culler (a service of the Hub) stops its server after "
        until("the broker knows the Hub's culler", lambda: ends in ada.lease()["sentence"])
        doctor = ada.terminal().run("gpushare doctor")
        assert "idle-culler may end this session or a kernel of it after " in doctor
        ada.stop_server()
        until("the end of the server is told", lambda: losses(ada))
        assert losses(ada)[0].endswith("the Hub stopped its server.")
