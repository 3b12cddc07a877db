"""What a runner hands out of a log that its disk does not take."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.protocol import heldlog
from jupyter_gpushare.protocol.heldlog import Held, HeldLog, held_of, read_kept
from jupyter_gpushare.protocol.jobfiles import RECENT_BYTES, BoundedLog, Disk, Piece

DISK = Disk()


@pytest.fixture
def job() -> str:
    return secrets.token_hex(5)


@pytest.fixture
def lacking(tmp_path: Path) -> BoundedLog:
    """A log that no disk takes."""
    (tmp_path / "file").touch()
    return BoundedLog(tmp_path / "file" / "attempt-2.log", DISK)


async def asked(job: str) -> Held | None:
    return await asyncio.to_thread(held_of, job)


async def test_it_hands_out_the_end_of_what_the_files_lack(job: str, lacking: BoundedLog) -> None:
    lacking.write(b"x" * RECENT_BYTES + b"last\n")
    lacking.flush()
    async with HeldLog(job, 2, lacking):
        held = await asked(job)
        assert held is not None
        assert (held.attempt, held.left_out_bytes, held.why) == (2, RECENT_BYTES + 5, lacking.why)
        assert held.piece.offset == 5
        assert held.piece.data.endswith(b"xlast\n")
    assert await asked(job) is None


async def test_it_has_nothing_while_the_files_have_all(job: str, tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "attempt-1.log", DISK)
    log.write(b"line\n")
    log.flush()
    async with HeldLog(job, 1, log):
        assert await asked(job) is None
    log.close()


async def test_a_name_that_another_has_costs_a_runner_nothing(job: str, lacking: BoundedLog) -> None:
    lacking.write(b"line\n")
    lacking.flush()
    async with HeldLog(job, 2, lacking), HeldLog(job, 3, lacking):
        held = await asked(job)
        assert held is not None
        assert held.attempt == 2


async def test_neither_end_trusts_another_user(
    job: str, lacking: BoundedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking.write(b"secret\n")
    lacking.flush()
    async with HeldLog(job, 2, lacking):
        with monkeypatch.context() as other:
            other.setattr(os, "getuid", lambda: 12345)
            assert await asked(job) is None
            # Nor does the runner send anything.
            reader, writer = await asyncio.open_unix_connection(f"\0gpushare-log-{job}")
            assert await reader.read() == b""
            writer.close()


async def test_a_process_of_another_container_gets_nothing(job: str, lacking: BoundedLog) -> None:
    """It has the same uid and network, and the pids of its own."""
    lacking.write(b"secret\n")
    lacking.flush()
    code = f"from jupyter_gpushare.protocol.heldlog import held_of; print(held_of({job!r}))"
    own_pids = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    async with HeldLog(job, 2, lacking):
        process = await asyncio.create_subprocess_exec(*own_pids, stdout=PIPE, stderr=PIPE)
        printed, failed = await process.communicate()
    if process.returncode:
        pytest.skip(f"a pid namespace needs root (CAP_SYS_ADMIN): {failed.decode()[-300:]}")
    assert printed == b"None\n"


async def test_readers_that_do_not_read_are_bounded(
    job: str, lacking: BoundedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldlog, "MAX_READERS", 0)
    lacking.write(b"line\n")
    lacking.flush()
    async with HeldLog(job, 2, lacking):
        assert await asked(job) is None


HEAD = {"attempt": 1, "offset": 0, "left_out_bytes": 5, "why": "full"}


@pytest.fixture
def liar(job: str) -> Iterator[list[bytes]]:
    """What answers in the place of a runner; None of it may end a reader."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0gpushare-log-{job}")
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                if answers:
                    connection.sendall(answers[0])
                else:
                    connection.recv(1)  # until the reader has given up

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield answers
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"\n",
        b"[]\n",
        b"{",
        b"[" * 100_000,
        *(
            json.dumps(HEAD | bad).encode()
            for bad in ({"attempt": 0}, {"offset": -1}, {"left_out_bytes": "x"})
        ),
    ],
    ids=lambda each: each[:40].decode(),
)
def test_an_answer_that_is_none_is_none(job: str, liar: list[bytes], answer: bytes) -> None:
    liar.append(answer)
    assert held_of(job) is None


def test_what_it_says_is_bounded_and_printable(job: str, liar: list[bytes]) -> None:
    liar.append(json.dumps(HEAD | {"why": "a\r\nSet-Cookie: x" + "y" * 400}).encode() + b"\nline\n")
    held = held_of(job)
    assert held is not None
    assert (held.why[:15], len(held.why)) == ("aSet-Cookie: xy", 198)
    assert held.piece == Piece(0, b"line\n")


def test_a_runner_that_does_not_answer_delays_a_reader_for_a_moment(
    job: str, liar: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldlog, "ANSWER_S", 0.05)
    assert held_of(job) is None


def test_what_the_files_lack_is_read_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1.log"
    path.write_bytes(b"0123")
    path.with_name("attempt-1.log.000000000000008").write_bytes(b"89")
    held = Held(1, 2, "full", Piece(6, b"67891011"))
    assert read_kept(path, held, 0, 99) == Piece(0, b"0123")
    assert read_kept(path, held, 4, 99) == Piece(6, b"67891011")
    assert read_kept(path, held, 8, 99) == Piece(8, b"89")
    assert read_kept(path, held, 10, 2) == Piece(10, b"10")
    assert read_kept(path, held, 14, 9) == Piece(14, b"")
    assert read_kept(path, None, 4, 99) == Piece(8, b"89")
