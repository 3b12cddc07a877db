"""`gpushare-docker` in a real Hub, against Docker's API: what a container of a lease is made of."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpushare.hub.docker import GPUShareDockerSpawner
from tests.hub.conftest import HERE, Hub, running_hub, wait_for
from tests.hub.fake_broker import GRANT
from tests.hub.fake_docker import FakeDocker

DOCKER = "jupyter_gpushare.hub.docker.GPUShareDockerSpawner"
EXTRA = """
c.DockerSpawner.client_kwargs = {{"base_url": "tcp://127.0.0.1:{port}"}}
c.DockerSpawner.image = "site/lab:1"
c.DockerSpawner.host_ip = "127.0.0.1"
c.DockerSpawner.volumes = {{"home-{{username}}": "/home/jovyan"}}
c.DockerSpawner.mem_limit = "2G"
c.DockerSpawner.extra_host_config = {{"shm_size": "1g"}}
c.JupyterHub.hub_connect_url = c.JupyterHub.hub_bind_url
del c.Spawner.cmd
"""
JOB = {"id": "0123456789", "attempt": 1, "name": "n", "command": ["sleep", "600"], "cwd": None, "env": {}}
JOB_GRANT = {**GRANT, "kind": "train", "job": {**JOB, "grace_s": 60.0}}


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
    hub.broker.reset()
    for user in hub.api("GET", "users?include_stopped_servers").json():
        for name, server in user["servers"].items():
            if not server.get("stopped"):
                hub.stop_server(user["name"], name, remove=bool(name))


@pytest.fixture
def docker(shared: tuple[Hub, FakeDocker]) -> FakeDocker:
    return shared[1]


def test_a_container_with_a_lease_gets_its_mounts_its_gpus_and_the_hosts_pids(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, hub.log()[-3000:]
    (container,) = docker.made
    host = container.created["HostConfig"]
    assert {
        "home-ada:/home/jovyan:rw",
        "/run/gpushare/abc-1:/run/gpushare/abc-1:rw",
        f"{Path(GRANT['env']['LD_PRELOAD']).parent}:{Path(GRANT['env']['LD_PRELOAD']).parent}:ro",
    } <= set(host["Binds"])
    (devices,) = host["DeviceRequests"]
    assert devices["Driver"] == "nvidia"
    assert devices["DeviceIDs"] == ["GPU-1"]
    assert devices["Capabilities"] == [["gpu"]]
    assert host["PidMode"] == "host"
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


def test_a_container_without_a_lease_sees_no_gpu_whatever_its_image_says(hub, docker):
    assert hub.start_server("ada").status_code == 201
    (container,) = docker.made
    host = container.created["HostConfig"]
    assert not host.get("DeviceRequests")
    assert not host.get("PidMode")
    assert container.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert container.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_container_runs_as_the_user_that_the_broker_is_told(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    assert docker.made[0].created["User"] == "1000"
    assert hub.broker.of("spawner/start")[0].body["uid"] == 1000


def test_a_job_runs_beside_the_session_in_a_container_of_its_own_with_its_grace_period(hub, docker):
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code == 201
    hub.broker.grant = JOB_GRANT
    assert hub.start_server("ada", name="j0123456789-1").status_code == 201
    session, job = docker.made
    assert session.name != job.name
    assert session.running
    assert job.created["Cmd"][:4] == ["python3", "-P", "-m", "jupyter_gpushare.job"]
    hub.broker.grant = None
    hub.stop_server("ada", "j0123456789-1", remove=True)
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
