"""The broker's port is never free, and its unix socket proves its listener's identity."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from jupyter_gpushare.broker.http import sockets
from jupyter_gpushare.channel import api_url, unix_url
from jupyter_gpushare.client import BlockingClient, BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, NotSetUp, StoreError
from jupyter_gpushare.protocol import wire
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, until

PREFIX = "services/gpushare/api/v1"


@pytest.fixture
def open_folder():
    """A folder of ours where every user can make files, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="gpushare-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def health(brokers):
    return httpx.get(
        f"http://127.0.0.1:{brokers.port}/{PREFIX}/health", trust_env=False, timeout=PATIENCE_S
    ).json()


def child_of(parent):
    return int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()[0])


def test_the_port_is_never_free_while_a_respawned_broker_restarts(brokers):
    parent = brokers.start("--respawn")
    until(lambda: brokers.answers(parent), "it answers")
    assert health(brokers)["sockets_inherited"] is True
    for _ in range(3):
        killed = child_of(parent)
        os.kill(killed, signal.SIGKILL)
        for _ in range(50):
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    thief.bind(("127.0.0.1", brokers.port))
            time.sleep(0.01)
        # Not refused meanwhile: the request waits for the next broker.
        assert health(brokers)["sockets_inherited"] is True


def test_a_broker_takes_the_sockets_of_systemd(brokers, tmp_path):
    path = tmp_path / "api" / "api.sock"
    path.parent.mkdir(mode=0o711)
    with socket.create_server(("127.0.0.1", brokers.port)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        # As systemd does it: descriptors from 3 on, and the pid of the process itself.
        activate = (
            "import fcntl, os, sys;"
            "tcp, unix = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 50) for fd in sys.argv[1:3]);"
            "os.dup2(tcp, 3); os.dup2(unix, 4);"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2');"
            "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
        )
        command = [sys.executable, "-c", activate, str(tcp.fileno()), str(unix.fileno())]
        broker = subprocess.Popen(
            [*command, "-m", "jupyter_gpushare.cli", "broker", "--state-dir", str(tmp_path / "state")],
            env=os.environ | brokers.service_environment(),
            pass_fds=(tcp.fileno(), unix.fileno()),
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        brokers.started.append(broker)
        until(lambda: brokers.answers(broker), "it answers")
        assert health(brokers)["sockets_inherited"] is True
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get(f"http://x/{PREFIX}/health").json()["sockets_inherited"] is True


def test_a_broker_that_bound_its_port_itself_says_so(brokers):
    broker = brokers.start()
    until(lambda: brokers.answers(broker), "it answers")
    assert health(brokers)["sockets_inherited"] is False


def test_a_port_that_is_not_allowed_is_no_port_in_use(tmp_path, monkeypatch):
    def denied(port: int, host: str, backlog: int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sockets, "bind_sockets", denied)
    with pytest.raises(StoreError, match="cannot listen on port 80 of h"):
        sockets.bind(sockets.Addresses("h", 80, tmp_path / "broker.sock"))


async def test_our_clients_reach_it_over_its_unix_socket(brokers):
    broker = brokers.start()
    until(lambda: brokers.answers(broker), "it answers")
    url = unix_url(brokers.folder / "state" / "api.sock", PREFIX)
    client = BrokerClient(url, "token", retry_s=0)
    assert (await client.get("health", wire.Health)).epoch == 1
    await client.close()
    client = BlockingClient(url, "token", retry_s=0)
    assert client.get("health", wire.Health).epoch == 1
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to listen as another user")
@pytest.mark.parametrize("mode", [0o711, 0o777, 0o1777])
async def test_no_token_is_sent_to_a_socket_of_another_user(open_folder, mode):
    """In a folder of root (which the attacker was let into once), and in one that is open to all."""
    path = open_folder / "api.sock"
    thief = subprocess.Popen([sys.executable, "-c", _THIEF, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert thief.stdout.readline() == "listening\n"
        open_folder.chmod(mode)
        client = BrokerClient(unix_url(path, PREFIX), "secret", retry_s=0)
        with pytest.raises(BrokerUnavailable, match=r"not the broker's user|proves nothing"):
            await client.get("status", wire.Status)
        await client.close()
    finally:
        thief.terminate()
        got, _ = thief.communicate(timeout=PATIENCE_S)
    assert "secret" not in got


_THIEF = """
import os, socket, sys, signal
os.setuid(12345)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    print(connection.recv(4096), flush=True)
"""


async def test_the_api_has_a_fixed_path_and_one_below_the_base_url_of_the_hub(brokers):
    """With IPv6, and a unit that still names the prefix of a Hub without base_url."""
    port = free_ports()
    broker = brokers.start(
        f"--GPUShareBroker.tls_address=[::1]:{port}",
        JUPYTERHUB_SERVICE_URL=f"http://[::1]:{brokers.port}",
        JUPYTERHUB_API_URL="http://[::1]:9/jupyter/hub/api",
    )
    state = brokers.folder / "state"
    until((state / "api-certificate.pem").exists, f"it makes its certificate ({broker.pid})")
    plain, sealed, own = (
        f"http://[::1]:{brokers.port}",
        f"https://[::1]:{port}",
        unix_url(state / "api.sock"),
    )
    # What the proxy sends; addresses as they are written now, and as older configurations wrote them.
    right = [f"{plain}/jupyter", sealed, own, f"{own}/services/gpushare", f"{own}/jupyter/services/gpushare"]
    for url in (*right, f"{own}/other"):
        pinned = (state / "api-certificate.pem").read_text()
        client = BrokerClient(api_url(url), "", certificate=pinned, retry_s=PATIENCE_S)
        if url in right:
            assert (await client.get("health", wire.Health)).epoch == 1
            described = await client.get("openapi.json", dict)
            assert described["servers"] == [{"url": "/jupyter/services/gpushare/api/v1"}]
        else:
            with pytest.raises(NotSetUp, match="404 for /other/services/gpushare/api/v1/health"):
                await client.get("health", wire.Health)
        await client.close()
    login = httpx.get(f"{plain}/jupyter/services/gpushare/")
    assert login.headers["Location"].startswith("/jupyter/hub/api/oauth2/authorize")
    assert "redirect_uri=%2Fjupyter%2Fservices%2Fgpushare%2Foauth_callback" in login.headers["Location"]


async def test_over_tls_a_token_goes_to_the_pinned_certificate_only(brokers):
    port = free_ports()
    broker = brokers.start(f"--GPUShareBroker.tls_address=127.0.0.1:{port}")
    until(lambda: brokers.answers(broker), "it answers")
    pinned = (brokers.folder / "state" / "api-certificate.pem").read_text()
    url = f"https://127.0.0.1:{port}/{PREFIX}"
    client = BrokerClient(url, "token", certificate=pinned, retry_s=0)
    assert (await client.get("health", wire.Health)).epoch == 1
    await client.close()
    other = brokers.start(
        f"--GPUShareBroker.tls_address=127.0.0.1:{free_ports()}", port=free_ports(), state="other"
    )
    elsewhere = brokers.folder / "other" / "api-certificate.pem"
    until(elsewhere.exists, f"another broker makes its certificate ({other.pid})")
    client = BrokerClient(url, "token", certificate=elsewhere.read_text(), retry_s=0)
    with pytest.raises(BrokerUnavailable, match="ConnectError"):
        await client.get("health", wire.Health)
    await client.close()
