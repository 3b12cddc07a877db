"""The helper's socket: which users may speak, what is understood, what is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.server import MAX_CONNECTIONS, Server
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES
from tests.gpu.machine import GIB, PATIENCE_S, Client, Machine, Refused, until

UUID = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        (b"nonsense", "bad_request", "not a line of JSON"),
        (b"\xff", "bad_request", "not a line of JSON"),
        (b"[" * 100_000, "bad_request", "not a line of JSON"),
        (b"[1]", "bad_request", "JSON object"),
        (b'{"verb":"sample","verb":"drop"}', "bad_request", "twice"),
        (b'{"verb":"sample","epoch":NaN}', "bad_request", "NaN"),
        (b"{}", "bad_request", "needs a verb"),
        (b'{"verb":"reboot"}', "unknown_verb", "reboot"),
        (b'{"verb":"sample","pid":1}', "bad_request", "'pid'"),
        (b'{"verb":"suspend","lease":"ada"}', "bad_request", "needs the epoch"),
        (b'{"verb":"suspend","epoch":1}', "bad_request", "'lease'"),
        (b'{"verb":"suspend","epoch":"1","lease":"ada"}', "bad_request", "epoch"),
        (b'{"verb":"suspend","epoch":true,"lease":"ada"}', "bad_request", "epoch"),
        (b'{"verb":"suspend","epoch":1,"lease":"../ada"}', "bad_request", "[a-z0-9-]"),
        (b'{"verb":"suspend","epoch":1,"lease":"ada","pid":5}', "bad_request", "'pid'"),
        (b'{"verb":"suspend","epoch":1,"lease":"ada","timeout_s":0}', "bad_request", "timeout_s"),
        (b'{"verb":"drop","epoch":1,"lease":""}', "bad_request", "[a-z0-9-]"),
        (b'{"verb":"resume","epoch":1,"lease":"ada","timeout_s":"long"}', "bad_request", "expected float"),
        (b'{"verb":"signal","epoch":1,"lease":"ada","number":9.0}', "bad_request", "expected int"),
        (b'{"verb":"signal","epoch":1,"lease":"ada","number":true}', "bad_request", "expected int"),
        (b'{"verb":"signal","epoch":1,"lease":"ada","number":null}', "bad_request", "expected int"),
    ],
)
def test_a_bad_request_gets_a_clear_answer(machine: Machine, line: bytes, kind: str, says: str) -> None:
    client = machine.client()
    client.send(line + b"\n")
    answer = json.loads(client.line())
    assert (answer["ok"], answer["error"]["kind"]) == (False, kind)
    assert says in answer["error"]["message"]
    assert client.ask("hello")["pid"]  # the connection is still good


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"limits": {}}, "bad_request", "1 to 16 devices"),
        ({"limits": {UUID: GIB}}, "bad_request", "no device"),
        ({"limits": {"": 0}}, "bad_request", "1 to"),
        ({"limits": {"": 1 << 50}}, "bad_request", "1 to"),
        ({"uid": -1}, "not_allowed", "uid -1"),
        ({"lease": "A" * 65}, "bad_request", "[a-z0-9-]"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    machine: Machine, fields: dict[str, Any], kind: str, says: str
) -> None:
    mine = machine.uuids()[0]
    request: dict[str, Any] = {"lease": "ada", "uid": os.geteuid(), "limits": {mine: GIB}} | fields
    request["limits"] = {uuid or mine: count for uuid, count in request["limits"].items()}
    with pytest.raises(Refused) as refused:
        machine.ask("set_limit", **request)
    assert refused.value.kind == kind
    assert says in refused.value.message
    assert machine.ask("sample")["leases"] == []


def test_a_line_without_end_is_cut_off(machine: Machine) -> None:
    client = machine.client()
    client.send(b"x" * (MAX_LINE_BYTES + 2))
    answer = json.loads(client.line())
    assert answer["error"]["kind"] == "bad_request"
    assert client.line(5) == b""


def test_more_requests_in_progress_than_allowed_are_told_so(machine: Machine) -> None:
    many: list[Client] = []

    def fills() -> bool:
        """Connections that were closed a moment ago may still count."""
        with contextlib.suppress(Refused):
            many.append(machine.watch())
        return len(many) == MAX_CONNECTIONS

    until(fills, "as many as allowed")
    with pytest.raises(Refused) as refused:
        machine.client().ask("hello")
    assert refused.value.kind == "busy"
    many.pop().close()
    until(lambda: _answers(machine), "there is room again")


def test_a_connection_that_may_be_silent_for_ever_gives_way_to_no_other(tmp_path: Path) -> None:
    def echo(lines: Lines) -> None:
        while True:
            lines.write(lines.read() + b"\n")

    server = Server(tmp_path / "seats.sock", frozenset(), echo, 2, idle_s=None)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(3):
            peers.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            peers[-1].settimeout(PATIENCE_S)
            peers[-1].connect(str(tmp_path / "seats.sock"))
            peers[-1].sendall(b"one\n")
            answer = peers[-1].recv(1024)
            assert answer == b"one\n" if len(peers) < 3 else b'"busy"' in answer
        peers[0].sendall(b"two\n")
        assert peers[0].recv(1024) == b"two\n"
        server.stop()
    thread.join()


def test_an_idle_connection_gives_way_to_a_new_one(machine: Machine) -> None:
    watch = machine.watch()
    idle = []
    for _ in range(2 * MAX_CONNECTIONS):
        idle.append(machine.client())
        assert idle[-1].ask("hello")
    assert idle[0].line() == b""
    machine.lease("ada")
    assert idle[-1].ask("suspend", lease="ada")
    assert watch.event("phase", "ada")


def _answers(machine: Machine) -> bool:
    try:
        return bool(machine.ask("hello"))
    except (Refused, AssertionError, OSError):
        return False


def test_a_reader_that_does_not_read_is_disconnected_and_others_go_on(machine: Machine) -> None:
    deaf = socket.socket(socket.AF_UNIX)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    deaf.connect(str(machine.socket))
    deaf.sendall(b'{"verb":"watch"}\n')
    machine.lease("ada")
    watch = machine.watch()
    client = machine.client()
    for _ in range(150):  # four events each: beyond the queue and the socket's buffer
        client.ask("suspend", lease="ada")
        client.ask("resume", lease="ada")
    assert watch.event("phase", "ada")
    deaf.settimeout(PATIENCE_S)
    with deaf:
        while deaf.recv(1 << 20):
            pass  # what was sent before, and then the end


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to speak as another user")
def test_another_user_is_refused_unless_allowed(bare: Machine) -> None:
    bare.start("--allow-uid", "65533", "--allow-uid", "65532")
    open_to_others(bare)
    assert json.loads(_hello_as(bare, 65533))["ok"]
    refused = json.loads(_hello_as(bare, 65534))
    assert refused["error"]["kind"] == "not_allowed"
    assert "65534" in refused["error"]["message"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to speak as another user")
def test_a_socket_for_one_user_is_that_users(bare: Machine) -> None:
    bare.start("--allow-uid", "65533")
    open_to_others(bare)
    assert (bare.socket.stat().st_uid, bare.socket.stat().st_mode & 0o777) == (65533, 0o600)
    assert json.loads(_hello_as(bare, 65533))["ok"]
    assert _hello_as(bare, 65534) == b"no connection"


def test_a_socket_for_no_other_user_is_the_helpers(bare: Machine) -> None:
    bare.start()
    assert (bare.socket.stat().st_uid, bare.socket.stat().st_mode & 0o777) == (os.geteuid(), 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to speak as another user")
def test_refused_users_do_not_keep_out_admitted_ones(bare: Machine) -> None:
    bare.start("--allow-uid", "65533", "--allow-uid", "65532")
    open_to_others(bare)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writes)
            os.setuid(65534)
            crowd = [Client(bare.socket) for _ in range(60)]
            os.read(reads, 1)
            crowd.clear()
        finally:
            os._exit(0)
    os.close(reads)
    try:
        for _ in range(20):
            assert bare.ask("hello")
    finally:
        os.close(writes)
        os.waitpid(child, 0)


def open_to_others(machine: Machine) -> None:
    """Let every user reach the socket of a machine."""
    for folder in (machine.folder, *machine.folder.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)


def _hello_as(machine: Machine, uid: int) -> bytes:
    """What the helper answers to this user: a forked child, for the user may not run our Python."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            client = Client(machine.socket)
            client.send(b'{"verb":"hello"}\n')
            os.write(writes, client.line())
        except OSError:
            os.write(writes, b"no connection")
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads, "rb") as answer:
        return answer.read()


def test_a_second_helper_does_not_take_the_socket(bare: Machine) -> None:
    bare.start()
    first, bare.state_dir = bare.helper, bare.folder / "other-state"
    assert "answers on" in bare.fails()
    bare.helper = first
    assert bare.ask("hello")


def test_a_socket_that_a_killed_helper_left_is_taken_over(bare: Machine) -> None:
    bare.start()
    bare.stop(9)
    assert bare.socket.exists()
    bare.start()
    assert bare.ask("hello")


@pytest.mark.parametrize(
    "arguments", [["--host-budget-percent", "0"], ["--sample-s", "60"], ["--watchdog", "bite"]]
)
def test_an_option_that_makes_no_sense_is_refused(bare: Machine, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.gpu.service.helper",
         "--state-dir", str(bare.folder), *arguments],
        env=bare.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_without_a_driver_the_reason_is_said(bare: Machine) -> None:
    environment = {k: v for k, v in bare.environment.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.gpu.service.helper", "--state-dir", str(bare.folder / "s")],
        env=environment | {"LD_LIBRARY_PATH": "/nonexistent"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1
    assert "nvml" in done.stderr.lower()


def test_systemd_is_told_when_the_helper_answers_and_when_it_ends(bare: Machine, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"{short}/notify")
        systemd.settimeout(PATIENCE_S)
        bare.environment["NOTIFY_SOCKET"] = f"{short}/notify"
        bare.start()
        assert systemd.recv(100) == b"READY=1"
        bare.stop()
        assert systemd.recv(100) == b"STOPPING=1"
