"""Read the log of a job: from the user's own files, or from the running job's server.

The runner keeps one log file per attempt (`jupyter_gpushare.protocol.jobfiles`).
On the user's machine and account these files are read directly, also after the
job has ended.  Bytes of a running attempt that the disk did not take come from the
memory of its runner (`jupyter_gpushare.protocol.heldlog`).  Elsewhere the log comes
from the running job's server, through the Hub's proxy (``log?offset=N``).  After the
job has ended only the files remain, and the error names their folder.  A gap in a long
log is marked with the number of missing bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from jupyter_gpushare.cli.output import note
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, NotAllowed
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.heldlog import Held, held_of, read_kept
from jupyter_gpushare.protocol.jobfiles import attempts_of, jobs_dir

# The bytes of one read, which bounds the memory used.
CHUNK_BYTES = 1 << 20
ENDED = frozenset({"succeeded", "failed", "cancelled", "timed_out"})


def directory(job_id: str) -> Path:
    """Return the folder of this user's files of a job; it may not exist."""
    return jobs_dir(Path.home()) / job_id


def source(
    job_id: str, job: wire.Job | None, *, hub_url: str, token: str, only: int | None
) -> LocalLog | ProxyLog:
    """Return the best source for the log of a job; ``only`` is one attempt, or None for all.

    Raises:
        Conflict: the log can only be read elsewhere; the text says how.
    """
    folder = directory(job_id)
    if folder.is_dir() or _is_own_account(job):
        return LocalLog(folder, job, only)
    if job is not None and job.state not in ENDED and hub_url:
        return ProxyLog(job, hub_url, token)
    if job is not None and job.started_at is None:
        return LocalLog(folder, job, only)  # the job has not printed anything
    where = job.log if job is not None and job.log else f"~/.local/share/gpushare/jobs/{job_id}/"
    owner = job.user if job is not None else "its owner"
    raise Conflict(
        f"the log is a file of {owner}, {where}: run `gpushare logs {job_id}` in a terminal of a server of"
        f" {owner}; while the job runs, --url with the Hub's address works from anywhere",
        reason="elsewhere",
    )


def _is_own_account(job: wire.Job | None) -> bool:
    return job is not None and os.environ.get("JUPYTERHUB_USER") == job.user


class LocalLog:
    """Reads the log files of all attempts, or of one."""

    def __init__(self, folder: Path, job: wire.Job | None, only: int | None = None) -> None:
        self.job = job  # a caller that follows the log updates it
        self._folder = folder
        self._only = only
        self._offset_bytes: dict[int, int] = {}
        self._why = ""

    def read_on(self) -> Iterator[tuple[int, bytes]]:
        """Yield the output since the last call, as (attempt, bytes)."""
        held = held_of(self._folder.name)
        for attempt in self._attempts(held):
            path, memory = self._folder / f"attempt-{attempt}.log", None
            if held is not None and held.attempt == attempt:
                memory = held
                self._why = _report_loss(held.left_out_bytes, held.why, self._why)
            while True:
                at = self._offset_bytes.get(attempt, 0)
                piece = read_kept(path, memory, at, CHUNK_BYTES)
                if not piece.data:
                    break
                self._offset_bytes[attempt] = piece.next_offset
                yield attempt, _left_out(at, piece.offset) + piece.data

    def _attempts(self, held: Held | None) -> list[int]:
        found = {*attempts_of(self._folder)} | ({held.attempt} if held is not None else set())
        return sorted(n for n in found if self._only in (None, n))


class ProxyLog:
    """Reads the log of the running attempt from the job's own server."""

    def __init__(self, job: wire.Job, hub_url: str, token: str) -> None:
        self.job: wire.Job | None = job
        self._hub_url = hub_url
        self._token = token
        self._offset_bytes: dict[str, int] = {}
        self._why = ""

    def read_on(self) -> Iterator[tuple[int, bytes]]:
        """Yield the output of the running attempt since the last call; nothing if no attempt runs.

        Raises:
            NotAllowed: the token does not give access to the job's server.
            Conflict: the Hub uses subdomains, so the host of the job's server is unknown.
            BrokerUnavailable: the Hub's proxy does not answer.
        """
        import httpx

        job = self.job
        if job is None or not job.server:
            return
        url = f"{self._hub_url}/user/{quote(job.user)}/{quote(job.server)}/log"
        while True:
            at = self._offset_bytes.get(job.server, 0)
            try:
                answer = httpx.get(
                    url,
                    params={"offset": at},
                    headers={"Authorization": f"token {self._token}"},
                    timeout=10.0,
                    trust_env=False,
                )
            except httpx.TransportError as error:
                raise BrokerUnavailable(f"{self._hub_url} does not answer ({type(error).__name__})") from None
            redirect = answer.next_request
            if redirect is not None and answer.url.host.endswith(f".{redirect.url.host}"):
                raise Conflict(
                    "each user of this Hub has a host of their own, so the log cannot be read from here: "
                    f"open the page of the job's server, or run `gpushare logs {job.id}` in a terminal there",
                    reason="elsewhere",
                )
            if answer.status_code in (302, 401, 403):
                raise NotAllowed("the token may not open the job's server: it needs the scope access:servers")
            if answer.status_code != 200:
                return  # the server is starting, or has just ended
            if left_out := _number(answer.headers.get("X-Gpushare-Left-Out"), 0):
                self._why = _report_loss(left_out, answer.headers.get("X-Gpushare-Why", ""), self._why)
            if not answer.content:
                return
            begin = _number(answer.headers.get("X-Gpushare-Offset"), at)
            self._offset_bytes[job.server] = begin + len(answer.content)
            yield job.attempt, _left_out(at, begin) + answer.content


def _left_out(offset: int, begin: int) -> bytes:
    return f"\n[{begin - offset} bytes of this log were not kept]\n".encode() if begin > offset else b""


def _report_loss(left_out_bytes: int, why: str, last_why: str) -> str:
    """Report the bytes that the disk did not take, once for each reason; return the reason."""
    if why != last_why:
        note(f"{left_out_bytes:,} bytes of this log were not written: {why}; the job keeps the last 64 KiB")
    return why


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else default


class Printer:
    """Writes pieces of logs to standard output, unchanged or with one JSON object per line."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._rest = b""  # an unfinished line; only for JSON
        self.attempts: list[int] = []

    def print(self, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Write pieces; return whether there were any."""
        wrote = False
        for attempt, piece in pieces:
            wrote = True
            if attempt not in self.attempts:
                self.finish()
                if self.attempts or attempt > 1:
                    sys.stdout.flush()
                    print(f"--- attempt {attempt} ---", file=sys.stderr, flush=True)
                self.attempts.append(attempt)
            if self._as_json:
                self._print_lines(attempt, piece)
            else:
                sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        return wrote

    def _print_lines(self, attempt: int, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            print(json.dumps({"attempt": attempt, "line": line.decode(errors="replace")}))

    def finish(self) -> None:
        """Write the last line if it has no newline."""
        if self._rest:
            self._print_lines(self.attempts[-1], b"\n")
