"""The sealed connection: which peers it accepts, and what it notices of frames on the way."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol.sealed import (
    CHALLENGE_BYTES,
    HEADER_BYTES,
    HELLO_BYTES,
    MAC_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    SealError,
    ServerHandshake,
    Session,
    read_secret,
)

SECRET = b"s" * 32


def connected(secret: bytes = SECRET) -> tuple[Session, Session]:
    """The sessions of a client and of a server after a handshake."""
    client, server = ClientHandshake(secret, "node-1"), ServerHandshake(secret, "node-1")
    proof = client.prove(server.challenge(client.hello()))
    return client.session(), server.accept(proof)


def opened(session: Session, frame: bytes) -> bytes:
    header, rest = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
    assert len(rest) == session.rest_bytes(header)
    return session.open(header, rest)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), max_size=8))
def test_frames_arrive_as_they_were_sent_in_both_directions(said: list[tuple[bool, bytes]]) -> None:
    client, server = connected()
    for from_client, payload in said:
        sender, receiver = (client, server) if from_client else (server, client)
        assert opened(receiver, sender.seal(payload)) == payload


def test_messages_of_the_handshake_have_the_sizes_that_are_read() -> None:
    client, server = ClientHandshake(SECRET, "n"), ServerHandshake(SECRET, "n")
    hello = client.hello()
    challenge = server.challenge(hello)
    sizes = len(hello), len(challenge), len(client.prove(challenge))
    assert sizes == (HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES)


def test_the_secret_never_crosses_the_wire() -> None:
    secret = secrets.token_bytes(32)
    client, server = ClientHandshake(secret, "n"), ServerHandshake(secret, "n")
    hello = client.hello()
    challenge = server.challenge(hello)
    proof = client.prove(challenge)
    wire = hello + challenge + proof + client.session().seal(b"x") + server.accept(proof).seal(b"y")
    assert not any(secret[at : at + 8] in wire for at in range(len(secret) - 7))


def test_a_server_with_another_secret_is_refused_before_the_client_proves_anything() -> None:
    client = ClientHandshake(SECRET, "node-1")
    challenge = ServerHandshake(b"t" * 32, "node-1").challenge(client.hello())
    with pytest.raises(SealError, match="another secret"):
        client.prove(challenge)
    with pytest.raises(SealError, match="not been verified"):
        client.session()


def test_a_client_with_another_secret_is_refused() -> None:
    server = ServerHandshake(SECRET, "node-1")
    server.challenge(ClientHandshake(SECRET, "node-1").hello())
    with pytest.raises(SealError, match="another secret"):
        server.accept(secrets.token_bytes(PROOF_BYTES))


def test_a_connection_that_is_led_to_another_node_is_refused() -> None:
    client = ClientHandshake(SECRET, "node-1")
    with pytest.raises(SealError, match="not node-1"):
        client.prove(ServerHandshake(SECRET, "node-2").challenge(client.hello()))


def test_a_recorded_handshake_opens_no_second_connection() -> None:
    client, server = ClientHandshake(SECRET, "n"), ServerHandshake(SECRET, "n")
    hello = client.hello()
    proof = client.prove(server.challenge(hello))
    server.accept(proof)
    again = ServerHandshake(SECRET, "n")
    again.challenge(hello)
    with pytest.raises(SealError):
        again.accept(proof)


def test_a_servers_own_answer_does_not_prove_a_client() -> None:
    server = ServerHandshake(SECRET, "n")
    challenge = server.challenge(ClientHandshake(SECRET, "n").hello())
    with pytest.raises(SealError):
        server.accept(challenge[-MAC_BYTES:])


def test_a_proof_before_a_hello_is_refused() -> None:
    with pytest.raises(SealError):
        ServerHandshake(SECRET, "n").accept(secrets.token_bytes(PROOF_BYTES))


@pytest.mark.parametrize("hello", [b"", MAGIC, b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES), bytes(HELLO_BYTES)])
def test_another_protocol_gets_no_challenge(hello: bytes) -> None:
    with pytest.raises(SealError, match="another protocol"):
        ServerHandshake(SECRET, "n").challenge(hello)


def test_a_repeated_frame_is_refused_and_so_is_all_that_follows() -> None:
    client, server = connected()
    frame = client.seal(b"suspend")
    assert opened(server, frame) == b"suspend"
    with pytest.raises(SealError):
        opened(server, frame)
    following = client.seal(b"resume")
    with pytest.raises(SealError):
        opened(server, following)


def test_reordered_frames_are_refused() -> None:
    client, server = connected()
    client.seal(b"first")
    with pytest.raises(SealError):
        opened(server, client.seal(b"second"))


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    client, _ = connected()
    with pytest.raises(SealError):
        opened(client, client.seal(b"suspend"))


def test_a_frame_of_another_connection_is_refused() -> None:
    client, _ = connected()
    _, server = connected()
    with pytest.raises(SealError):
        opened(server, client.seal(b"suspend"))


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_changed_bit_anywhere_in_a_frame_is_noticed(payload: bytes, data: st.DataObject) -> None:
    client, server = connected()
    frame = bytearray(client.seal(payload))
    at = data.draw(st.integers(HEADER_BYTES, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SealError):
        opened(server, bytes(frame))


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_truncated_frame_is_refused(payload: bytes, data: st.DataObject) -> None:
    client, server = connected()
    frame = client.seal(payload)
    length = data.draw(st.integers(0, len(payload) - 1))
    # The one on the way also writes the length that fits.
    header, rest = length.to_bytes(HEADER_BYTES, "big"), frame[HEADER_BYTES:][: length + MAC_BYTES]
    with pytest.raises(SealError):
        server.open(header, rest)


def test_the_length_of_a_frame_is_bounded_before_anything_is_read() -> None:
    client, server = connected()
    with pytest.raises(SealError, match="at most"):
        server.rest_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(SealError):
        opened(server, client.seal(b"after it"))
    with pytest.raises(SealError, match="at most"):
        client.seal(bytes(MAX_PAYLOAD_BYTES + 1))


def test_a_frame_of_the_largest_size_passes() -> None:
    client, server = connected()
    assert len(opened(server, client.seal(bytes(MAX_PAYLOAD_BYTES)))) == MAX_PAYLOAD_BYTES


# ---- the file of the secret ----------------------------------------------------


def written(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    assert read_secret(written(tmp_path / "s", b"0" * 64 + b"\n", 0o400)) == b"0" * 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(GpuShareError, match="read by others"):
        read_secret(written(tmp_path / "s", b"0" * 64, mode))


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "is_read"),
    [
        (0o440, 0, 2000, True),
        (0o640, 0, 2000, True),
        (0o440, 0, 2001, False),  # of a group that the process is not in
        (0o444, 0, 2000, False),
        (0o460, 0, 2000, False),
        (0o440, 1000, 2000, False),  # the owner may add others to what was root's to say
    ],
)
def test_a_secret_of_kubernetes_is_read_by_a_process_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, gid: int, is_read: bool
) -> None:
    path = written(tmp_path / "s", b"0" * 64)
    fields = list(path.stat())
    fields[0], fields[4], fields[5] = stat.S_IFREG | mode, uid, gid
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result(fields))
    of_root = list(path.stat())
    of_root[4] = 0  # the link
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result(of_root))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000, 2000])
    if is_read:
        assert read_secret(path) == b"0" * 64
    else:
        with pytest.raises(GpuShareError, match="read by others"):
            read_secret(path)


@pytest.mark.parametrize("text", [b"", b"short", b" " * 64, b"0" * 5000])
def test_a_secret_of_a_wrong_length_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(GpuShareError, match="32 to 4096 bytes"):
        read_secret(written(tmp_path / "s", text))


def test_a_secret_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuShareError, match="No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(GpuShareError, match="directory"):
        read_secret(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s", b"0" * 64)
    os.chown(path, 12345, -1)
    with pytest.raises(GpuShareError, match="another user"):
        read_secret(path)
