"""`gpushare-systemd` in a real Hub: a unit for every server, with what a lease and a job need."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.hub.systemd import escaped
from tests.hub.conftest import HERE, Hub, running_hub
from tests.hub.fake_broker import JOB_NAME
from tests.waiting import is_alive

SYSTEMD = "jupyter_gpushare.hub.systemd.GPUShareSystemdSpawner"
ME = pwd.getpwuid(os.getuid()).pw_name
EXTRA = """
os.environ["PATH"] = "{folder}/bin:" + os.environ["PATH"]
import systemdspawner.systemd
systemdspawner.systemd.RUN_ROOT = "{folder}/run"
c.SystemdSpawner.isolate_devices = True
c.SystemdSpawner.readonly_paths = ["/"]
c.SystemdSpawner.readwrite_paths = ["/home/{{USERNAME}}"]
c.SystemdSpawner.unit_extra_properties = {{"CPUWeight": "50"}}
c.Spawner.mem_limit = "2G"
c.SystemdSpawner.user_workingdir = "{folder}"
# The Hub answers a start when the server is up, also on a loaded machine.
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 100}}
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Hub]:
    with tempfile.TemporaryDirectory(prefix="gpushare-systemd-") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "run").mkdir(mode=0o700)
        shutil.copy(HERE / "fake_systemd.py", folder / "bin")
        for program in ("systemd-run", "systemctl"):
            path = folder / "bin" / program
            path.write_text(f"#!{sys.executable}\n{(HERE / 'fake_systemd.py').read_text()}")
            path.chmod(0o755)
        with running_hub(SYSTEMD, folder, extra=EXTRA.format(folder=folder)) as hub:
            yield hub


@pytest.fixture
def hub(shared: Hub) -> Iterator[Hub]:
    shared.broker.reset()
    yield shared
    shared.stop_servers()


def unit(hub: Hub, server: str = "") -> dict[str, Any]:
    path = hub.folder / "bin" / "units" / f"jupyter-{ME}_{server}.json"
    return dict(json.loads(path.read_text()))


def properties(hub: Hub, server: str = "") -> set[str]:
    return set(unit(hub, server)["properties"])


def test_a_job_leaves_its_owners_session_alone(hub):
    hub.ensure_user(ME)
    assert hub.start_server(ME, {"fraction": "1/2"}).status_code == 201, hub.log()[-2000:]
    hub.broker.grant_job()
    assert hub.start_server(ME, name=JOB_NAME).status_code == 201, hub.log()[-2000:]
    assert is_alive(unit(hub)["pid"])
    assert is_alive(unit(hub, JOB_NAME)["pid"])
    hub.stop_server(ME, JOB_NAME, remove=True)
    assert not is_alive(unit(hub, JOB_NAME)["pid"])
    assert is_alive(unit(hub)["pid"])


def test_a_unit_with_a_lease_may_use_the_gpus_and_write_into_its_lease(hub):
    hub.ensure_user(ME)
    assert hub.start_server(ME, {"fraction": "1/2"}).status_code == 201
    found = properties(hub)
    assert {"DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"} <= found
    assert "PrivateDevices=yes" not in found
    assert {f"ReadWriteDirectories=/home/{ME}", "ReadWriteDirectories=/run/gpushare/abc-1"} <= found
    assert "CPUWeight=50" in found
    assert f"MemoryMax={(2 + 42) << 30}" in found  # 40 GiB of GPU memory, and 5 %
    assert unit(hub)["environment"]["GPUSHARE_LEASE"] == "abc-1"


def test_a_unit_without_a_lease_sees_no_device_and_has_the_sites_settings(hub):
    hub.ensure_user(ME)
    assert hub.start_server(ME, {"fraction": "1/2"}).status_code == 201
    hub.stop_server(ME)
    assert hub.start_server(ME).status_code == 201
    found = properties(hub)
    assert "PrivateDevices=yes" in found
    assert not any(each.startswith(("DevicePolicy", "DeviceAllow")) for each in found)
    assert f"ReadWriteDirectories=/home/{ME}" in found
    assert f"MemoryMax={2 << 30}" in found
    assert unit(hub)["environment"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_jobs_unit_gives_its_runner_the_grace_period(hub):
    hub.ensure_user(ME)
    hub.broker.grant_job()
    assert hub.start_server(ME, name=JOB_NAME).status_code == 201
    assert {"KillMode=mixed", "TimeoutStopSec=80s"} <= properties(hub, JOB_NAME)
    assert "jupyter_gpushare.job" in unit(hub, JOB_NAME)["command"]


def test_the_broker_is_told_the_uid_of_the_unit(hub):
    hub.ensure_user(ME)
    assert hub.start_server(ME, {"fraction": "1/2"}).status_code == 201
    assert hub.broker.of("spawner/start")[0].body["uid"] == os.getuid()
    assert unit(hub)["uid"] == str(os.getuid())


def test_a_user_that_the_system_does_not_know_is_told_so(hub):
    hub.ensure_user("ghost")
    answer = hub.start_server("ghost", {"fraction": "1/2"})
    assert answer.status_code == 400
    assert "no system user ghost" in answer.json()["message"]


def test_no_two_servers_have_the_same_unit_name():
    names = ["", "a", "a-b", "a_b", "a.b", "A", "a b", "ä", "a.5f.b"]
    assert len({escaped(name) for name in names}) == len(names)
    assert not any("_" in escaped(name) for name in names)
