"""The broker as a process: what it refuses at start, and how it ends and comes back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from jupyter_gpushare.broker import respawn
from jupyter_gpushare.broker.http.secret_files import secret_file
from jupyter_gpushare.errors import StoreError
from tests.ports import free_ports
from tests.simulator import Simulator
from tests.waiting import PATIENCE_S, until


def test_it_ends_cleanly_when_told_and_starts_again_on_its_database(brokers):
    for epoch in (1, 2):
        broker = brokers.start(forked=False)  # with its imports, as the Hub starts it
        until(lambda broker=broker: brokers.answers(broker), "it answers")
        broker.send_signal(signal.SIGTERM)
        _, said = broker.communicate(timeout=PATIENCE_S)
        assert broker.returncode == 0, said
        assert f"epoch={epoch}" in said


# A configuration file is Python: a thread, a part, a connection and the disk hang when the broker ends.
HANGS = """
import asyncio, pathlib, time
from jupyter_gpushare import errors
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.respawn import Heartbeat
from jupyter_gpushare.broker.http.listener import Listener
from jupyter_gpushare.broker.state.store import Store

async def fail(self):
    thread = asyncio.create_task(asyncio.to_thread(time.sleep, 600))
    while not (reason := pathlib.Path("{reason}")).exists():
        await asyncio.sleep(0.02)
    raise getattr(errors, reason.read_text())("the reason")

async def deaf(self):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

Heartbeat.run, Announcer.run, Listener.end, Store.close = fail, deaf, deaf, lambda self: time.sleep(600)
"""


@pytest.mark.parametrize(("reason", "status"), [("SIGTERM", 0), ("StoreError", 1), ("Superseded", 3)])
def test_it_ends_soon_whatever_hangs(brokers, tmp_path, reason, status):
    """Soon: `END_S` after the reason; everything here would take ten minutes."""
    config, written = tmp_path / "config.py", tmp_path / "reason"
    config.write_text(HANGS.format(reason=written))
    broker = brokers.start("--config", str(config))
    until(lambda: brokers.answers(broker), "it answers")
    if reason == "SIGTERM":
        broker.terminate()
    else:
        (tmp_path / "new").write_text(reason)
        (tmp_path / "new").rename(written)
    _, said = broker.communicate(timeout=PATIENCE_S)
    assert broker.returncode == status, said
    assert reason == "SIGTERM" or said.splitlines()[-1].endswith("the reason")


def test_a_port_in_use_is_named(brokers):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = brokers.refused(port=port)
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "change the url of the service" in said


def test_a_second_broker_on_the_database_is_refused_and_the_first_goes_on(brokers):
    first = brokers.start()
    until(lambda: brokers.answers(first), "it answers")
    said = brokers.refused(port=9)
    assert "another broker uses the database" in said
    assert f"process {first.pid} on {socket.gethostname()[:20]} since 20" in said
    assert brokers.answers(first)


def test_outside_of_a_hub_it_says_what_it_is(brokers):
    assert "the broker is a service of JupyterHub" in brokers.refused(JUPYTERHUB_API_TOKEN="")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--GPUShareBroker.projects={'vision': {'quota': -1}}", "vision"),
        ("--GPUShareBroker.projects={'vision': {'quotas': 1}}", "quotas"),
        ("--GPUShareBroker.idle_timeout=-1", "idle_timeout is a number of 0 or more (below 10000000)"),
        ("--GPUShareBroker.sizes=lots", "lots"),
        ("--GPUShareBroker.max_jobs=0", "max_jobs"),
        ("--GPUShareBroker.order=srtf", "order"),
        ("--GPUShareBroker.las_thresholds=[7200.0, 3250.0]", "ascending"),
    ],
)
def test_a_wrong_setting_is_named(brokers, argument, says):
    assert says in brokers.refused(argument)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no configuration file"),
        ("c.GPUShareBroker.max_jobs = (", "SyntaxError"),
        ("c.GPUShareBroker.max_jobs = 10\nimport no_such_module", "no_such_module"),
    ],
)
def test_a_configuration_file_that_does_not_work_is_named(brokers, content, says):
    path = brokers.folder / "config.py"
    if content is not None:
        path.write_text(content)
    said = brokers.refused("--config", str(path))
    assert says in said
    assert str(path) in said


def test_a_state_directory_that_cannot_be_made_is_named(brokers):
    (brokers.folder / "file").write_text("")
    assert "file/state" in brokers.refused(state="file/state")


def test_the_helper_of_a_broker_gets_no_secret_of_its_environment(brokers, tmp_path):
    simulator = Simulator(tmp_path)
    names = ("GPUSHARE_SIMULATE", "GPUSHARE_SIM_STATE", "LD_LIBRARY_PATH")
    driver = {name: value for name, value in simulator.env().items() if name in names}
    parent = brokers.start("--respawn", "--with-helper", **driver, PGPASSWORD="of-the-database")
    path = tmp_path / "state" / "helper.sock"
    pid = None
    try:
        pid = until(lambda: respawn.helper_pid(path), "the helper listens", process=parent)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"GPUSHARE_SIM_STATE={simulator.state_path}".encode() in environment
        secret = re.compile(b"JUPYTERHUB|TOKEN|SECRET|PASSWORD")
        assert not [each for each in environment if secret.search(each.split(b"=")[0])]
        until(lambda: (brokers.answers(parent) or {}).get("status") == "ok", "the devices are examined")
    finally:
        # The helper has a session of its own, and outlives its parent.
        os.killpg(parent.pid, signal.SIGKILL)
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def test_a_broker_that_a_newer_one_superseded_is_not_started_again_by_systemd(brokers, tmp_path):
    helper_socket = tmp_path / "helper.sock"
    seen = tmp_path / "helper/private/epoch"  # of brokers on other databases: both have an older one
    seen.parent.mkdir(parents=True)
    seen.write_text("7\n")
    simulator = Simulator(tmp_path)
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "helper"]
    helper = subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "helper"), "--socket", str(helper_socket)],
        env=simulator.env(),
        stderr=subprocess.DEVNULL,
    )
    try:
        until(helper_socket.exists, "the helper listens", process=helper)
        uses_it = f"--GPUShareBroker.helper_socket={helper_socket}"
        first = brokers.start(uses_it)
        until(lambda: (brokers.answers(first) or {}).get("sample_age_s") is not None, "it measures")
        second = brokers.start(uses_it, port=free_ports(), state="other")
        _, said = first.communicate(timeout=PATIENCE_S)
        unit = Path(__file__).parents[2] / "docs/units/gpushare-broker.service"
        assert f"RestartPreventExitStatus={first.returncode}\n" in unit.read_text(), said
        assert "epoch 8 is stale: a newer broker is at work (epoch 9)" in said.splitlines()[-1]
        assert second.poll() is None
    finally:
        helper.kill()
        helper.wait()


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "token"
    secret = secret_file(path)
    assert len(secret) == 64
    assert secret_file(path) == secret
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        secret_file(path)


def test_a_secret_that_a_full_disk_left_empty_is_made_again(tmp_path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    secret = secret_file(path)
    assert len(secret) == 64
    assert secret_file(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_reload_takes_a_new_spawner_token_beside_the_old_one_and_new_projects(brokers, tmp_path):
    """What rotation of the token rests on: docs/operations.md."""
    token, config = tmp_path / "spawner-token", tmp_path / "config.py"
    token.touch(mode=0o600)
    token.write_text("first\n")
    config.write_text("c.GPUShareBroker.projects = {'vision': {'quota': 1}}\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, tempfile.TemporaryDirectory() as short:
        systemd.bind(f"{short}/notify")
        systemd.settimeout(PATIENCE_S)
        arguments = ("--config", str(config), f"--GPUShareBroker.spawner_token_file={token}")
        broker = brokers.start(*arguments, f"--GPUShareBroker.api_socket={short}/api.sock",
                               NOTIFY_SOCKET=f"{short}/notify")  # fmt: skip

        def told(word: bytes) -> bytes:
            while word not in (said := systemd.recv(4096)):
                pass
            return said

        told(b"READY=1")

        def offers(value: str) -> str:
            transport = httpx.HTTPTransport(uds=f"{short}/api.sock")
            with httpx.Client(transport=transport, base_url="http://broker") as client:
                path = "/services/gpushare/api/v1/spawner/offers?group=nlp"
                return client.get(path, headers={"Authorization": f"token {value}"}).text

        def reload() -> None:
            broker.send_signal(signal.SIGHUP)
            assert b"MONOTONIC_USEC=" in told(b"RELOADING=1")
            told(b"READY=1")

        refused = "only the Hub's spawner"
        assert refused in offers("second")
        assert "you belong to no project" in offers("first")
        token.write_text("first\nsecond\n")
        config.write_text("c.GPUShareBroker.projects = {'nlp': {'quota': 1}}\n")
        reload()
        for each in ("first", "second"):
            assert '"projects":["nlp"]' in offers(each)
        token.write_text("second\n")
        reload()
        assert refused in offers("first")
        config.write_text("c.GPUShareBroker.projects = {'nlp': {'quota': -1}}\n")
        reload()
        assert '"projects":["nlp"]' in offers("second")
        broker.terminate()
        _, said = broker.communicate(timeout=PATIENCE_S)
        assert said.count("the settings were read again") == 2
        assert said.count("the settings stay as they were") == 1


def test_a_reload_that_is_asked_for_while_the_broker_starts_waits_until_it_is_ready(brokers, tmp_path):
    config, begun, goes_on = tmp_path / "config.py", tmp_path / "begun", tmp_path / "goes-on"
    config.write_text(
        f"""
import pathlib, time
pathlib.Path({str(begun)!r}).touch()
while not pathlib.Path({str(goes_on)!r}).exists():
    time.sleep(0.01)
"""
    )
    broker = brokers.start("--config", str(config))
    until(begun.exists, "it reads its configuration")
    broker.send_signal(signal.SIGHUP)
    goes_on.touch()
    until(lambda: brokers.answers(broker), "it answers")
    broker.terminate()
    _, said = broker.communicate(timeout=PATIENCE_S)
    assert said.count("the settings were read again") == 1
