"""`gpushare-docker` in a real Hub, against Docker's API: what a container of a lease is made of."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpushare.hub import distinct
from jupyter_gpushare.hub.docker import GPUShareDockerSpawner, joins
from tests.hub.conftest import HERE, Hub, running_hub, wait_for
from tests.hub.fake_broker import GRANT, JOB_NAME
from tests.hub.fake_docker import FakeDocker

DOCKER = "jupyter_gpushare.hub.docker.GPUShareDockerSpawner"
EXTRA = """
c.DockerSpawner.client_kwargs = {{"base_url": "tcp://127.0.0.1:{port}"}}
c.DockerSpawner.image = "site/lab:1"
c.DockerSpawner.host_ip = "127.0.0.1"
c.DockerSpawner.volumes = {{"home-{{username}}": "/home/jovyan"}}
c.DockerSpawner.mem_limit = "2G"
joined = {{"joined": {{"pid_mode": "host"}}}}
c.DockerSpawner.extra_host_config = lambda spawner: {{"shm_size": "1g", **joined.get(spawner.name, {{}})}}
c.JupyterHub.hub_connect_url = c.JupyterHub.hub_bind_url
del c.Spawner.cmd
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Hub, FakeDocker]]:
    with tempfile.TemporaryDirectory(prefix="gpushare-docker-") as name:
        folder = Path(name)
        docker = FakeDocker(folder / "container_stub.py")
        shutil.copy(HERE / "stub_server.py", docker.stub)
        extra = EXTRA.format(port=docker.port)
        with docker.running(), running_hub(DOCKER, folder, extra=extra) as hub:
            yield hub, docker


@pytest.fixture
def hub(shared: tuple[Hub, FakeDocker]) -> Iterator[Hub]:
    hub, docker = shared
    hub.broker.reset()
    docker.made.clear()
    yield hub
    hub.stop_servers()


@pytest.fixture
def docker(shared: tuple[Hub, FakeDocker]) -> FakeDocker:
    return shared[1]


def test_a_container_with_a_lease_gets_its_mounts_and_its_gpus_alone(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, hub.log()[-3000:]
    (container,) = docker.made
    host = container.created["HostConfig"]
    assert {
        "home-ada:/home/jovyan:rw",
        "/run/gpushare/abc-1:/run/gpushare/abc-1:ro",
        "/run/gpushare/abc-1/account:/run/gpushare/abc-1/account:rw",
        f"{Path(GRANT['env']['LD_PRELOAD']).parent}:{Path(GRANT['env']['LD_PRELOAD']).parent}:ro",
    } <= set(host["Binds"])
    (devices,) = host["DeviceRequests"]
    assert devices["Driver"] == "nvidia"
    assert devices["DeviceIDs"] == ["GPU-1"]
    assert devices["Capabilities"] == [["gpu"]]
    assert list(joins(host)) == []
    assert host["CgroupnsMode"] == "private"
    assert host["ShmSize"] == 1 << 30
    for name, value in GRANT["env"].items():
        assert container.environment[name] == value
    assert container.environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"


def test_the_memory_limit_of_a_container_holds_its_gpu_memory_while_it_sleeps(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    assert hub.start_server("cy").status_code == 201
    assert [each.created["HostConfig"]["Memory"] for each in docker.made] == [(2 + 42) << 30, 2 << 30]


def test_the_folder_of_the_brokers_socket_is_mounted_read_only(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    (container,) = docker.made
    folders = [bind for bind in container.created["HostConfig"]["Binds"] if bind.endswith(":ro")]
    api = container.environment["GPUSHARE_API_URL"]
    assert api.startswith("http+unix://")
    assert any(bind.split(":")[0].replace("/", "%2F") in api for bind in folders)


def test_a_folder_with_more_than_the_brokers_socket_is_shown_to_no_container(hub, docker):
    secret = hub.broker.path.parent / "broker.sqlite"
    secret.touch()
    try:
        assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 503
    finally:
        secret.unlink()
    assert docker.made == []
    assert "broker.sqlite, which lies beside the broker's socket" in hub.log()


def test_a_container_without_a_lease_sees_no_gpu_whatever_its_image_says(hub, docker):
    assert hub.start_server("ada").status_code == 201
    (container,) = docker.made
    host = container.created["HostConfig"]
    assert not host.get("DeviceRequests")
    assert list(joins(host)) == []
    assert container.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert container.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_container_runs_as_the_user_that_the_broker_is_told(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    assert docker.made[0].created["User"] == "1000"
    assert hub.broker.of("spawner/start")[0].body["uid"] == 1000


def test_a_job_runs_beside_the_session_in_a_container_of_its_own_with_its_grace_period(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    hub.broker.grant_job()
    assert hub.start_server("ada", name=JOB_NAME).status_code == 201
    session, job = docker.made
    assert session.name != job.name
    assert session.running
    assert job.created["Cmd"][:6] == ["python3", "-X", "utf8", "-P", "-m", "jupyter_gpushare.job"]
    hub.broker.grant = None
    hub.stop_server("ada", JOB_NAME, remove=True)
    assert job.stopped_after_s == 80  # the grace period and the runner's own 20 s
    assert session.running
    hub.stop_server("ada")
    assert session.stopped_after_s is None


def test_a_second_start_makes_a_new_container_with_the_new_lease(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    hub.stop_server("ada")
    assert "jupyter-ada" not in docker.there
    assert hub.start_server("ada").status_code == 201
    assert "GPUSHARE_LEASE" not in docker.made[-1].environment


def test_the_lease_is_given_back_when_a_container_ends(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    docker.made[0].process.kill()
    wait_for(lambda: hub.broker.of("spawner/stop"), "the Hub has noticed, the lease is given back")


def test_containers_that_are_kept_are_refused_with_the_reason():
    with pytest.raises(TraitError, match="has the lease of its last start"):
        GPUShareDockerSpawner(config=Config({"DockerSpawner": {"remove": False}}))


JOINING = [
    {"pid_mode": "host"},
    {"pid_mode": "container:jupyter-ada"},
    {"ipc_mode": "host"},
    {"network_mode": "host"},
    {"network_mode": "container:jupyter-ada"},
    {"uts_mode": "host"},
    {"userns_mode": "host"},
    {"cgroupns": "host"},
    {"privileged": True},
]


@pytest.mark.parametrize("setting", JOINING, ids=str)
def test_a_setting_that_joins_a_namespace_is_refused(setting):
    (name,) = setting
    with pytest.raises(TraitError, match=f"extra_host_config has {name} = .* not isolated"):
        GPUShareDockerSpawner(config=Config({"DockerSpawner": {"extra_host_config": setting}}))


@pytest.mark.parametrize("network", ["host", "container:jupyter-ada"])
def test_a_network_that_all_servers_share_is_refused(network):
    with pytest.raises(TraitError, match="name a network of Docker"):
        GPUShareDockerSpawner(config=Config({"DockerSpawner": {"network_name": network}}))
    assert GPUShareDockerSpawner(config=Config({"DockerSpawner": {"network_name": "lab"}}))


def test_a_hub_with_such_a_setting_does_not_start(caplog):
    config = Config({"DockerSpawner": {"extra_host_config": {"pid_mode": "host"}}})
    hub = SimpleNamespace(
        spawner_class=GPUShareDockerSpawner, config=config, log=logging.getLogger("jupyterhub")
    )
    with pytest.raises(SystemExit):
        distinct._check_of_hub(hub)
    assert "are not isolated from each other" in caplog.text


def test_a_class_that_cannot_be_looked_at_is_named_in_the_log(caplog):
    class Broken(GPUShareDockerSpawner):
        def __init__(self, **_: object) -> None:
            raise RuntimeError("not outside a start")

    distinct._check_of_hub(SimpleNamespace(spawner_class=Broken, config=Config(), log=None))
    assert "Broken not checked at the Hub's start: not outside a start" in caplog.text


def test_a_function_of_the_site_that_joins_a_namespace_starts_no_container(hub, docker):
    refused = hub.start_server("ada", {"fraction": "1/2"}, name="joined")
    assert refused.status_code == 503, hub.log()[-4000:]
    assert "settings do not fit" in refused.text
    assert docker.made == []
    assert "the container would have pid_mode = 'host'" in hub.log(), hub.log()[-5000:]
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201


async def test_a_function_gives_each_user_a_uid_of_its_own():
    def made(uid: object) -> GPUShareDockerSpawner:
        config = Config({"GPUShareDockerSpawner": {"container_uid": uid}})
        return distinct.sample(GPUShareDockerSpawner, config, "")

    assert made(1000).server_uid() == 1000
    assert made(lambda spawner: 2000 + len(spawner.user.name)).server_uid() > 2000
    with pytest.raises(TraitError):
        made(0)
    for wrong in (None, "1000", True, 0):
        with pytest.raises(Exception, match="settings do not fit"):
            made(lambda spawner, wrong=wrong: wrong).server_uid()


# ---- what keeps users apart: the kernel's rule ------------------------------------------------------

# What a container's runtime makes for `HostConfig` (runc; user namespaces are the engine's setting).
UNSHARED = {"PidMode": "--pid", "IpcMode": "--ipc", "UTSMode": "--uts", "CgroupnsMode": "--cgroup"}
SECRET = "JUPYTERHUB_API_TOKEN=of-ada"
SPY = """
import os, signal, sys
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"of-ada" in open(f"/proc/{pid}/environ", "rb").read():
            found.append(f"read {pid}")
            found.append(f"listed {len(os.listdir(f'/proc/{pid}/root'))}")
            os.kill(int(pid), signal.SIGTERM)
            found.append("killed")
    except OSError:
        pass
print(found)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces as an engine does")
def test_a_user_with_the_same_uid_reads_lists_and_kills_nothing_of_another_container(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    host = docker.made[0].created["HostConfig"]
    own = [flag for name, flag in UNSHARED.items() if host.get(name) != "host"]
    entered = ["unshare", "--fork", "--kill-child", "--mount", *own]
    # A runtime mounts a /proc of the container's pid namespace in it.
    mounted = 'mount -t proc proc /proc; exec setpriv --reuid 1000 --regid 1000 --clear-groups "$@"'
    inside = [*entered, "sh", "-ec", mounted, "sh"]
    server = [*inside, "env", SECRET, "sh", "-c", "echo up; exec sleep 600"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, start_new_session=True) as ada:
        try:
            assert ada.stdout
            assert ada.stdout.readline() == b"up\n"
            spy = subprocess.run(
                [*inside, "/usr/bin/python3", "-c", SPY], capture_output=True, text=True, check=True
            )
            assert spy.stdout == "[]\n"
            assert ada.poll() is None
        finally:
            os.killpg(ada.pid, signal.SIGKILL)
