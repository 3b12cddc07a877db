"""`gpushare-docker` with a real Docker engine: what a program in a container of a lease can do.

The engine is the one that answers (DOCKER_HOST), or the installed dockerd, run for these tests with
folders of its own.  The image is made here, of the machine's own Python.  No container has a network:
the Hub reaches a server by a relay into the network namespace of its container.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import NotFound

from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.hub.docker import GPUShareDockerSpawner
from jupyter_gpushare.native import preload_path
from tests.hub.conftest import HERE, Hub, running_hub, wait_for
from tests.hub.fake_broker import JOB_NAME

pytestmark = pytest.mark.long

IMAGE = "gpushare-test:python"
PYTHON = Path("/usr/bin/python3")
UID = 1000
EXTRA = """
from tests.hub.test_engine import OnLoopback

c.JupyterHub.spawner_class = OnLoopback
c.DockerSpawner.network_name = "none"
c.DockerSpawner.use_internal_ip = True  # publish no port
c.DockerSpawner.client_kwargs = {{"base_url": "{engine}"}}
c.DockerSpawner.image = "{image}"
c.DockerSpawner.volumes = {{"{folder}/home": "/home/jovyan"}}
c.DockerSpawner.mem_limit = "2G"
c.DockerSpawner.cmd = ["/usr/bin/python3", "/server.py"]
c.GPUShareDockerSpawner.job_cmd = ["/usr/bin/python3", "/job.py"]
c.GPUShareDockerSpawner.device_requests = {device_requests}
c.JupyterHub.hub_connect_url = c.JupyterHub.hub_bind_url
del c.Spawner.cmd
"""
REPORT = """
import json, os, socket, sys
from urllib.parse import unquote, urlsplit

def tried(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        return error.strerror
    return "opened"

def broker():
    folder = unquote(urlsplit(os.environ["GPUSHARE_API_URL"]).netloc)
    with socket.socket(socket.AF_UNIX) as asked:
        try:
            asked.connect(folder)
        except OSError as error:
            return error.strerror
    return "reached"

def spied():
    # What is seen of processes of others, all with the same uid.
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = open("/proc/" + pid + "/environ", "rb").read().split(b"\\0")
        except OSError:
            continue
        if ("JUPYTERHUB_USER=" + os.environ["JUPYTERHUB_USER"]).encode() not in variables:
            found.append([pid, os.listdir("/proc/" + pid + "/root")])
    return found

library = os.path.dirname(os.environ.get("LD_PRELOAD", "/nowhere/x"))
found = {
    "pid": os.getpid(),
    "uid": os.getuid(),
    "lease": tried(os.environ.get("GPUSHARE_LEASE_DIR", "/nowhere") + "/written"),
    "account": tried(os.environ.get("GPUSHARE_LEASE_DIR", "/nowhere") + "/account"),
    "library folder": tried(library + "/written"),
    "library": "libgpushare_preload.so" in open("/proc/self/maps").read(),
    "broker": broker(),
    "environment": dict(os.environ),
    "spied": spied(),
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in os.listdir("/proc/self/ns")},
}
name = os.environ["JUPYTERHUB_USER"] + "-" + (os.environ["JUPYTERHUB_SERVER_NAME"] or "session")
with open("/home/jovyan/." + name, "w") as file:
    json.dump(found, file)
os.rename("/home/jovyan/." + name, "/home/jovyan/" + name + ".json")
"""
SERVER = REPORT + 'os.execv(sys.executable, [sys.executable, "/stub_server.py"])\n'
JOB_SERVER = (
    REPORT
    + """
import signal, subprocess, threading
child = subprocess.Popen([sys.executable, "/stub_server.py"])
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
while not ended.wait(0.1):
    pass
with open("/home/jovyan/ada-grace.json", "w") as file:
    json.dump({"told": True}, file)
"""
)


def connected_in(pid: int, port: int) -> socket.socket:
    """Return a socket in the network namespace of a process, connected to its loopback address."""
    made: list[socket.socket] = []

    def in_namespace() -> None:
        with open(f"/proc/{pid}/ns/net") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
                return
        made.append(socket.create_connection(("127.0.0.1", port), 10))

    thread = threading.Thread(target=in_namespace)  # a namespace is a thread's own
    thread.start()
    thread.join()
    if not made:
        raise ConnectionRefusedError
    return made[0]


class OnLoopback(GPUShareDockerSpawner):
    """Servers without a network, each behind a port of this machine."""

    async def get_ip_and_port(self) -> tuple[str, int]:
        inspected = await self.docker("inspect_container", self.container_id)
        pid = inspected["State"]["Pid"]

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inside = await asyncio.to_thread(connected_in, pid, self.port)
            except OSError:
                writer.close()
                return
            inner_reader, inner_writer = await asyncio.open_connection(sock=inside)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        return "127.0.0.1", server.sockets[0].getsockname()[1]


def image_files() -> Iterator[Path]:
    """The machine's Python with all libraries that it and its modules load."""
    code = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'))"
    said = subprocess.run([PYTHON, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    executable, stdlib = map(Path, said.split())
    yield executable
    modules = [path for path in stdlib.rglob("*") if path.is_file()]
    yield from (path for path in modules if "test" not in path.parts)
    extensions = [path for path in modules if path.suffix == ".so"]
    # The preload library names libdl.so.2, which every glibc has and a new Python does not load.
    loaded = ["ldd", executable, preload_path(), *extensions]
    linked = subprocess.run(loaded, capture_output=True, text=True, check=True)
    words = {word for word in linked.stdout.split() if word.startswith("/") and not word.endswith(":")}
    yield from map(Path, sorted(words))


def build_image(engine: docker.DockerClient) -> None:
    """Build an image with this Python and the servers of the tests, without any network."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w", dereference=True) as tar:
        for path in image_files():
            tar.add(path, f"root{path}", recursive=False)
        tar.add(PYTHON, f"root{PYTHON}")
        texts = {
            "Dockerfile": 'FROM scratch\nCOPY root/ /\nCMD ["/usr/bin/python3"]\n',
            "root/etc/passwd": f"jovyan:x:{UID}:{UID}::/home/jovyan:/bin/sh\n",
            "root/stub_server.py": (HERE / "stub_server.py")
            .read_text()
            .replace("127.0.0.1", ""),  # all addresses
            "root/server.py": SERVER,
            "root/job.py": JOB_SERVER,
        }
        for name, text in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    engine.images.build(fileobj=context, custom_context=True, tag=IMAGE, rm=True)


def listens(url: str) -> bool:
    """Whether a connection to an engine can be made; docker's client leaves failed ones open."""
    if not url.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as asked:
        return asked.connect_ex(url.removeprefix("unix://")) == 0


def answers(url: str) -> docker.DockerClient | None:
    if not listens(url):
        return None
    engine = docker.DockerClient(base_url=url, timeout=120)
    engine.ping()
    return engine


@contextmanager
def running_engine(folder: Path) -> Iterator[tuple[str, docker.DockerClient]]:
    """The engine that answers on this machine, or one of our own."""
    url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if (there := answers(url)) is not None:
        yield url, there
        there.close()
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("no Docker engine answers, and none can be started: apt-get install docker.io, as root")
    url = f"unix://{folder}/docker.sock"
    places = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    alone = ["--bridge=none", "--iptables=false", "--ip6tables=false"]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(["dockerd", f"--host={url}", *places, *alone], stdout=log, stderr=log)
    try:
        engine = wait_for(
            lambda: answers(url), "the engine answers", process=process, log=folder / "dockerd.log"
        )
        assert engine is not None
        yield url, engine
        engine.close()
    finally:
        process.terminate()
        process.wait()


@dataclass
class Site:
    hub: Hub
    engine: docker.DockerClient
    folder: Path

    def found(self, server: str = "session", user: str = "ada") -> dict[str, Any]:
        path = self.folder / "home" / f"{user}-{server}.json"
        wait_for(path.exists, f"{path} is written")
        return dict(json.loads(path.read_text()))

    def container(self, name: str) -> Any:
        return self.engine.containers.get(name)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[str, docker.DockerClient]]:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON} to make an image of")
    with (
        tempfile.TemporaryDirectory(prefix="gpushare-engine-", ignore_cleanup_errors=True) as name,
        running_engine(Path(name)) as running,
    ):
        build_image(running[1])
        yield running


@contextmanager
def site_with(engine: tuple[str, docker.DockerClient], device_requests: bool) -> Iterator[Site]:
    url, client = engine
    with tempfile.TemporaryDirectory(prefix="gpushare-containers-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "leases").mkdir()
        (folder / "home").mkdir(mode=0o700)
        (folder / "leases" / "abc-1").mkdir()
        (folder / "leases" / "abc-1" / "account").touch(0o600)
        for inner in ("home", "leases/abc-1/account"):
            os.chown(folder / inner, UID, UID)
        extra = EXTRA.format(engine=url, image=IMAGE, folder=folder, device_requests=device_requests)
        with running_hub("gpushare-docker", folder, extra=extra) as hub:
            lease = f"{folder}/leases/abc-1"
            hub.broker.grant_with(GPUSHARE_LEASE_DIR=lease, LD_PRELOAD=str(preload_path()))
            yield Site(hub, client, folder)
            hub.stop_servers()


@pytest.fixture
def site(engine: tuple[str, docker.DockerClient]) -> Iterator[Site]:
    with site_with(engine, device_requests=False) as made:
        yield made


def test_a_program_in_a_container_of_a_lease_finds_all_that_the_lease_has(site: Site) -> None:
    assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    found = site.found()
    assert found["uid"] == UID
    assert (found["lease"], found["library folder"]) == ("Read-only file system",) * 2
    assert found["account"] == "opened"
    assert (found["library"], found["broker"]) == (True, "reached")
    assert found["environment"]["GPUSHARE_LEASE"] == "abc-1"
    assert found["environment"]["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    assert site.container("jupyter-ada").attrs["HostConfig"]["Memory"] == (2 + 42) << 30


def test_a_server_is_apart_from_that_of_another_user_with_the_same_uid(site: Site) -> None:
    assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    site.hub.broker.grant = {**site.hub.broker.grant, "lease": "abc-2"}  # type: ignore[dict-item]
    assert site.hub.start_server("cy", {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    first, second = site.found(), site.found(user="cy")
    assert (first["uid"], second["uid"], first["pid"], second["pid"]) == (UID, UID, 1, 1)
    assert second["spied"] == []
    machine = {name: os.readlink(f"/proc/self/ns/{name}") for name in first["namespaces"]}
    for name in ("pid", "mnt", "ipc", "net", "uts", "cgroup"):
        seen = {machine[name], first["namespaces"][name], second["namespaces"][name]}
        assert len(seen) == 3, name


def test_the_helper_knows_a_container_of_a_lease_without_the_pids_of_the_machine(site: Site) -> None:
    assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    site.found()
    container = site.container("jupyter-ada")
    processes = Processes(site.folder / "leases")
    seen = wait_for(lambda: processes.scan({"abc-1": UID, "abc-2": UID})["abc-1"], "it is found")
    assert container.attrs["State"]["Pid"] in [process.pid for process in seen]
    assert {(process.container, process.inner_pid) for process in seen} == {(container.id, 1)}
    # A program of another container that names the lease is in none.
    liar = site.engine.containers.run(
        IMAGE,
        ["/usr/bin/python3", "-c", "import time; time.sleep(600)"],
        user=str(UID),
        environment={"GPUSHARE_LEASE": "abc-1", "GPUSHARE_LEASE_DIR": f"{site.folder}/leases/abc-1"},
        detach=True,
    )
    try:
        pid = site.container(liar.name).attrs["State"]["Pid"]
        wait_for(lambda: (processes.scan({"abc-1": UID}), processes.find(pid))[1], "it is seen")
        assert pid not in [each.pid for each in processes.scan({"abc-1": UID})["abc-1"]]
    finally:
        liar.remove(force=True)


def test_a_container_without_a_lease_has_no_gpu(site: Site) -> None:
    site.hub.broker.grant = None
    assert site.hub.start_server("ada").status_code == 201, site.hub.log()[-3000:]
    found = site.found()
    assert (found["pid"], found["uid"]) == (1, UID)
    assert (found["lease"], found["library"]) == ("No such file or directory", False)
    assert found["broker"] == "reached"
    assert found["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert site.container("jupyter-ada").attrs["HostConfig"]["Memory"] == 2 << 30


def test_a_job_runs_beside_its_owners_session_and_has_its_grace(site: Site) -> None:
    assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code == 201, site.hub.log()[-3000:]
    session = site.container("jupyter-ada").id
    site.hub.broker.grant_job()
    assert site.hub.start_server("ada", name=JOB_NAME).status_code == 201, site.hub.log()[-3000:]
    site.found(JOB_NAME)
    site.hub.stop_server("ada", JOB_NAME, remove=True)
    assert site.found("grace") == {"told": True}
    with pytest.raises(NotFound):
        site.container(f"jupyter-ada--{JOB_NAME}")
    left = site.container("jupyter-ada")
    assert (left.id, left.status) == (session, "running")
    site.hub.stop_server("ada")
    with pytest.raises(NotFound):
        site.container("jupyter-ada")


def test_the_engine_is_asked_for_the_leases_gpus(engine: tuple[str, docker.DockerClient]) -> None:
    if "nvidia" in engine[1].info().get("Runtimes", {}):
        pytest.skip("this engine has the NVIDIA container toolkit, and the lease's GPU does not exist")
    with site_with(engine, device_requests=True) as site:
        assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code == 500
        assert 'could not select device driver "nvidia"' in site.hub.log()
