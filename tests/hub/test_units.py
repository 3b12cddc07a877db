"""`gpushare-systemd` with a real systemd: units of one user side by side, and what they may use.

The Hub runs beside it and calls its systemd-run and systemctl.  Where the machine's memory is
counted by cgroups of version 1, its systemd keeps no memory limit; the unit's property is read then.
"""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.native import preload_path
from tests.hub.conftest import Hub, running_hub, wait_for
from tests.hub.fake_broker import JOB_NAME
from tests.hub.test_systemd import ME, SYSTEMD
from tests.systemd import Systemd
from tests.waiting import is_alive

pytestmark = pytest.mark.long

SESSION_UNIT, JOB_UNIT = f"jupyter-{ME}_.service", f"jupyter-{ME}_{JOB_NAME}.service"
EXTRA = """
os.environ["PATH"] = "{folder}/bin:" + os.environ["PATH"]
import systemdspawner.systemd
systemdspawner.systemd.RUN_ROOT = "{folder}/run"
c.Spawner.cmd = [sys.executable, "{folder}/report.py"]
c.GPUShareMixin.job_cmd = [sys.executable, "{folder}/job.py"]
c.Spawner.mem_limit = "2G"
c.SystemdSpawner.isolate_devices = True
c.SystemdSpawner.readonly_paths = ["/"]
c.SystemdSpawner.readwrite_paths = ["{folder}/home"]
c.SystemdSpawner.user_workingdir = "{folder}/home"
"""
# What a server finds: files that it can write, devices that it can open.
REPORT = """
import json, os, sys

def tried(path, flags):
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        return error.strerror
    return "opened"

def report():
    lease = os.environ.get("GPUSHARE_LEASE_DIR", "/nowhere")
    found = {{
        "lease": tried(lease + "/written", os.O_WRONLY | os.O_CREAT),
        "home": tried("{folder}/home/written", os.O_WRONLY | os.O_CREAT),
        "elsewhere": tried("{folder}/written", os.O_WRONLY | os.O_CREAT),
        "null": tried("/dev/null", os.O_RDWR),
        "disk": tried("{disk}", os.O_RDONLY),
        "library": "libgpushare_preload.so" in open("/proc/self/maps").read(),
        "environment": dict(os.environ),
    }}
    name = os.environ["JUPYTERHUB_SERVER_NAME"] or "session"
    with open("{folder}/home/." + name, "w") as file:
        json.dump(found, file)
    os.rename("{folder}/home/." + name, "{folder}/home/" + name + ".json")
"""
SERVER = (
    REPORT
    + """
report()
os.execv(sys.executable, [sys.executable, "{folder}/stub_server.py"])
"""
)
JOB_SERVER = (
    REPORT
    + """
import signal, subprocess, threading
child = subprocess.Popen([sys.executable, "{folder}/stub_server.py"])
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
report()
while not ended.wait(0.1):
    pass
with open("{folder}/home/grace.json", "w") as file:
    json.dump({{"child alive": child.poll() is None}}, file)
"""
)


@dataclass
class Site:
    systemd: Systemd
    hub: Hub

    def found(self, server: str) -> dict[str, Any]:
        path = self.hub.folder / "home" / f"{server}.json"
        wait_for(path.exists, f"{server} has written what it found")
        return dict(json.loads(path.read_text()))


def device_that_is_closed() -> str:
    """A device that only a unit without limits of devices may open."""
    for path in (Path("/dev/kmsg"), Path("/dev/mem")):
        if path.exists() and stat.S_ISCHR(path.stat().st_mode):
            return str(path)
    pytest.skip("this machine has neither /dev/kmsg nor /dev/mem")


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="gpushare-units-") as name:
        folder = Path(name)
        for inner in ("bin", "run", "home", "lease", "systemd"):
            (folder / inner).mkdir(mode=0o700)
        values = {"folder": folder, "disk": device_that_is_closed()}
        (folder / "report.py").write_text(SERVER.format(**values))
        (folder / "job.py").write_text(JOB_SERVER.format(**values))
        with Systemd.booted(folder / "systemd") as systemd:
            systemd.write_programs(folder / "bin")
            with running_hub(SYSTEMD, folder, extra=EXTRA.format(folder=folder)) as hub:
                hub.ensure_user(ME)
                yield Site(systemd, hub)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    hub = shared.hub
    hub.broker.reset()
    hub.broker.grant_with(GPUSHARE_LEASE_DIR=str(hub.folder / "lease"), LD_PRELOAD=str(preload_path()))
    for written in (hub.folder / "home").glob("*.json"):
        written.unlink()
    yield shared
    hub.stop_servers()


def test_a_job_runs_beside_its_owners_session_and_its_end_leaves_that_alone(site: Site) -> None:
    assert site.hub.start_server(ME, {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    session = site.systemd.pids(SESSION_UNIT)
    assert session
    site.hub.broker.grant_job()
    assert site.hub.start_server(ME, name=JOB_NAME).status_code == 201, site.hub.log()[-3000:]
    assert len(site.systemd.pids(JOB_UNIT)) == 2
    assert site.systemd.properties(JOB_UNIT, "ActiveState", "KillMode", "TimeoutStopUSec") == [
        "active",
        "mixed",
        "1min 20s",
    ]
    site.found(JOB_NAME)
    site.hub.stop_server(ME, JOB_NAME, remove=True)
    assert site.found("grace") == {"child alive": True}  # SIGTERM went to the runner alone
    wait_for(lambda: not site.systemd.pids(JOB_UNIT), "no process of the job is left")
    assert site.systemd.pids(SESSION_UNIT) == session
    assert all(is_alive(pid) for pid in session)


def test_a_unit_with_a_lease_writes_into_its_lease_and_opens_no_other_devices(site: Site) -> None:
    assert site.hub.start_server(ME, {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    found = site.found("session")
    assert (found["lease"], found["home"], found["elsewhere"]) == (
        "opened",
        "opened",
        "Read-only file system",
    )
    assert (found["null"], found["disk"]) == ("opened", "Operation not permitted")
    assert found["library"] is True
    assert found["environment"]["GPUSHARE_LEASE"] == "abc-1"
    policy, devices, memory = site.systemd.properties(
        SESSION_UNIT, "DevicePolicy", "DeviceAllow", "MemoryMax"
    )
    assert policy == "closed"
    assert "char-nvidia* rw" in devices
    assert int(memory) == (2 + 42) << 30


def test_a_unit_without_a_lease_has_no_devices_and_the_sites_limit(site: Site) -> None:
    site.hub.broker.grant = None
    assert site.hub.start_server(ME).status_code == 201, site.hub.log()[-3000:]
    found = site.found("session")
    assert (found["null"], found["disk"]) == ("opened", "No such file or directory")
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert found["library"] is False
    private, memory = site.systemd.properties(SESSION_UNIT, "PrivateDevices", "MemoryMax")
    assert (private, int(memory)) == ("yes", 2 << 30)


def test_a_stopped_session_starts_again_with_the_lease_of_its_new_start(site: Site) -> None:
    for lease in ("abc-1", "abc-2"):
        given = site.hub.broker.grant
        assert given is not None
        site.hub.broker.grant = {**given, "lease": lease, "env": {**given["env"], "GPUSHARE_LEASE": lease}}
        assert site.hub.start_server(ME, {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
        assert site.found("session")["environment"]["GPUSHARE_LEASE"] == lease
        site.hub.stop_server(ME)
        (site.hub.folder / "home" / "session.json").unlink()
