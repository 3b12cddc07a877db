"""Run one attempt of a job, from the Hub's start of its server to its end.

0. Read the records of earlier starts.  An attempt that was started before is not started
   again, not even after the broker or this runner was killed; its outcome is reported.
   An attempt whose lease has ended is not started either.
1. Answer HTTP.  The Hub counts a server that does not answer as a failed spawn,
   even if its command has already ended.
2. Start the command, with its output to a bounded log; report ``started``.
3. Wait for the end of the command, or for a request to stop (SIGTERM from the device
   helper, SIGINT from the Hub).  A stop sends SIGTERM to the command's process group,
   waits up to ``grace_s``, then kills all remaining descendants.  A second signal has no
   effect.  If the command ends by itself, its descendants get SIGTERM and a short grace
   period.
4. Write the record, report ``ended`` until the broker accepts it, stay until the
   Hub has seen the server ready, exit.

The record is on disk before the report is sent.  If the disk does not answer in time, the record is
written when it does.

Only the threads of `Disk` touch files of the user, and no wait for them is unbounded: it takes at most
`DISK_PATIENCE_S` per operation, and `_STOP_PATIENCE_S` after a request to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado.netutil import bind_sockets

from jupyter_gpushare.channel import CERTIFICATE_VARIABLE
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.internal_tls import internal_tls
from jupyter_gpushare.job import pages
from jupyter_gpushare.job.bars import Bars
from jupyter_gpushare.job.children import Command, become_subreaper, descendants, hide_environment
from jupyter_gpushare.job.command import (
    NOT_FOUND,
    CannotStart,
    command_environment,
    lease_has_ended,
    start_error,
    working_directory,
)
from jupyter_gpushare.job.reports import PROGRESS_EVERY_S, Reports, keep_active
from jupyter_gpushare.job.webhook import Webhook
from jupyter_gpushare.listener import Listener
from jupyter_gpushare.protocol.heldlog import HeldLog
from jupyter_gpushare.protocol.jobfiles import (
    SILENT,
    AttemptRecord,
    BoundedLog,
    Disk,
    forget_old_attempts,
    forget_old_jobs,
    jobs_dir,
    last_lines,
    log_path,
    unseen_outcome,
    write_record,
)
from jupyter_gpushare.protocol.wire import MAX_PROGRESS, JobOutcome, JobReport, JobSpec, decode

# The Hub probes as soon as the process exists; after this time it has given up or is gone.
SEEN_PATIENCE_S = 60.0
# After its probe the Hub needs some time to complete the start of the server.
LINGER_S = 2.0
# Grace period for descendants of a command that ended by itself.
LEFTOVER_GRACE_S = 5.0
_BIND_PATIENCE_S = 5.0
# The maximum wait for an operation of the disk after a request to stop.
_STOP_PATIENCE_S = 0.5
_READ_BYTES = 64 << 10
_PROGRESS_BYTES = 4096
# SIGCHLD wakes the runner; polling covers coalesced signals and grandchildren.
_POLL_S = 0.2

# Tokens of this server, with which the job could act as its owner's browser.
_SECRETS = ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN")

_NO_PROGRESS: dict[str, float | None] = {"done": None, "total": None}

log = logging.getLogger("gpushare.job")


class Runner:
    """Runs one `JobSpec` in the environment of a single-user server."""

    def __init__(self, spec: JobSpec, env: Mapping[str, str]) -> None:
        self._spec = spec
        self._env = env
        self._home = env.get("HOME") or os.getcwd()
        self._log_path = log_path(Path(self._home), spec.id, spec.attempt)
        self._record = AttemptRecord(
            id=spec.id,
            attempt=spec.attempt,
            name=spec.name,
            command=list(spec.command),
            state="starting",
            log=str(self._log_path),
        )
        self._disk = Disk()  # for records, and for the pages
        self._log_disk = Disk()  # for the log: a record that is flushed slowly does not delay it
        self._start_disk = Disk()  # for the start of the command: no write of a record delays it
        self._start_lock, self._is_given_up = threading.Lock(), False
        self._log: BoundedLog | None = None  # None if nothing was started
        self._bars = Bars()
        self._shown = _NO_PROGRESS  # by the bars that the program prints
        self._reported: dict[str, float | None] | None = None  # by the program; then its bars are ignored
        self._delivered: dict[str, float | None] | None = _NO_PROGRESS  # to the broker; None: uncertain
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._webhook = Webhook(spec, env)
        self._seen = asyncio.Event()
        self._seen_at = math.inf

    async def run(self) -> AttemptRecord:
        """Run the attempt to its end; return its record, ``reported`` if the broker accepted it.

        Raises:
            GpuShareError: the Hub's address for this server, or its certificates, cannot be used.
        """
        began_at = time.monotonic()
        server = await self._serve()
        become_subreaper()
        self._listen_to_signals()
        broker = BrokerClient(
            self._env["GPUSHARE_API_URL"],
            self._env["JUPYTERHUB_API_TOKEN"],
            certificate=self._env.get(CERTIFICATE_VARIABLE, ""),
        )
        reports = Reports(broker, self._spec, self._stop)
        activity = asyncio.create_task(keep_active(self._env))
        try:
            earlier = self._disk.call(
                unseen_outcome, self._log_path.parent, self._spec.settled, self._spec.attempt
            )
            is_known = await self._answered(earlier, _STOP_PATIENCE_S)
            before = earlier.result() if is_known else None
            if not is_known:  # no file is written: one of an earlier start may exist
                self._ended(-signal.SIGTERM, f"Stopped before it was started: {SILENT}.", stopped=True)
                is_reported = await reports.ended(self._final_report()) is not None
                self._record = replace(self._record, reported=is_reported)
            elif before is None and lease_has_ended(self._env):
                # No file and no report: the broker has stopped this attempt and knows how it ended.
                self._record = replace(self._record, reported=True)
                log.warning("job=%s: not started: the lease of its attempt has ended", self._spec.id)
            else:
                await (self._run_once(reports) if before is None else self._observe(before))
                if (outcome := await reports.ended(self._final_report())) is not None:
                    await self._keep(replace(self._record, reported=True))
                    self._webhook.send("ended", outcome, self._record.exit_code)
            await asyncio.gather(self._stay_until_seen(began_at), self._webhook.close())
        finally:
            activity.cancel()
            server.stop()
        return self._record

    async def _run_once(self, reports: Reports) -> None:
        self._log = BoundedLog(self._log_path, self._log_disk)
        self._disk.call(forget_old_attempts, self._log_path.parent)
        await self._keep(self._record)
        held = HeldLog(self._spec.id, self._spec.attempt, self._log)
        async with held, _ProgressSocket(self._start_disk, self._on_progress) as progress_socket:
            await self._run_command(reports, progress_socket)
        await asyncio.to_thread(self._log.close, self._patience_s)
        await self._keep(self._record)

    async def _observe(self, before: AttemptRecord) -> None:
        """Take over the outcome of an earlier start of this job, without another run of its command."""
        if before.state != "ended":
            # The command dies with its runner (`children`).
            reason = "Its runner was killed, and the command with it."
            before = replace(before, state="ended", exit_code=-signal.SIGKILL, reason=reason)
        if before.attempt != self._spec.attempt:
            self._log = BoundedLog(self._log_path, self._log_disk)
            self._write_line(f"attempt {before.attempt} had ended before: see its log; nothing was started")
            await asyncio.to_thread(self._log.close)
        await self._keep(replace(before, attempt=self._spec.attempt))

    # ---- HTTP ------------------------------------------------------------------

    async def _serve(self) -> Listener:
        url = urlsplit(self._env.get("JUPYTERHUB_SERVICE_URL", ""))
        prefix = self._env.get("JUPYTERHUB_SERVICE_PREFIX", "/")
        if not url.port:
            raise GpuShareError("JUPYTERHUB_SERVICE_URL names no port: the Hub's spawner starts this program")
        tls = internal_tls(self._env, ssl.Purpose.CLIENT_AUTH)
        server = pages.server(
            prefix, tls, now=self._now, log=lambda: self._log, disk=self._disk, seen=self._on_seen
        )
        until = time.monotonic() + _BIND_PATIENCE_S
        while True:
            try:
                server.add_sockets(bind_sockets(url.port, url.hostname or "127.0.0.1", backlog=BACKLOG))
            except OSError as error:
                # An outgoing connection may hold the port for a moment.
                if time.monotonic() >= until:
                    raise GpuShareError(f"cannot listen at {url.netloc}: {error.strerror}") from None
                await asyncio.sleep(_POLL_S)
            else:
                return server

    @property
    def _patience_s(self) -> float:
        """Return the maximum wait for the disk; it is short after a request to stop, as is the broker's."""
        return _STOP_PATIENCE_S if self._stop.is_set() else self._disk.patience_s

    @property
    def _progress(self) -> dict[str, float | None]:
        return self._shown if self._reported is None else self._reported

    def _now(self) -> tuple[AttemptRecord, Mapping[str, float | None]]:
        return self._record, self._progress

    def _on_seen(self) -> None:
        if not self._seen.is_set():
            self._seen_at = time.monotonic()
            self._seen.set()

    async def _stay_until_seen(self, began_at: float) -> None:
        """Return when the Hub has seen this server ready, or after `SEEN_PATIENCE_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, began_at + SEEN_PATIENCE_S - time.monotonic())):
                await self._seen.wait()
                await asyncio.sleep(max(0.0, self._seen_at + LINGER_S - time.monotonic()))

    # ---- the command -----------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_stop(self) -> None:
        self._stop.set()
        self._wake.set()

    async def _run_command(self, reports: Reports, progress_socket: str) -> None:
        """Run the command to its end; put the result into the record."""
        if self._stop.is_set():
            self._ended(-signal.SIGTERM, "Stopped before it was started.", stopped=True)
            return
        # The command dies with the thread that starts it (`Command`); this one lives as long as the runner.
        starting = self._start_disk.call(self._start, progress_socket)
        # This may take long, and nothing waits for it.
        old = (jobs_dir(Path(self._home)),)
        threading.Thread(target=forget_old_jobs, args=old, daemon=True).start()
        if not await self._answered(starting, self._spec.grace_s):
            with self._start_lock:
                self._is_given_up = True
            starting.add_done_callback(_end_late)
            self._ended(-signal.SIGTERM, f"Stopped before it was started: {SILENT}.", stopped=True)
            return
        try:
            command, pump = starting.result()
        except CannotStart as refusal:
            self._write_line(str(refusal))
            self._ended(refusal.exit_code, str(refusal))
            return
        reports.started()
        self._webhook.send("started", JobOutcome(state="running", reason=""))
        self._record = replace(self._record, state="running")
        # These do not delay the supervision of the command, even if the disk does not answer.
        work = (self._keep(self._record), self._report_progress(reports), self._report_stop(reports))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await self._wait_for_end(command)
        finally:
            for task in tasks:
                task.cancel()
        # All writers of the pipe are gone, unless one is stuck in the kernel.
        await asyncio.to_thread(pump.join, LEFTOVER_GRACE_S)
        if self._progress == _NO_PROGRESS:
            await self._send_progress(reports)  # the final report cannot withdraw progress
        if self._log is not None:
            await asyncio.to_thread(self._log.flush, self._patience_s)
        self._add_output_to_reason()

    def _add_output_to_reason(self) -> None:
        """Add to the reason the bytes that the log lacks, and, unless it is empty, the last lines."""
        record, printed = self._record, self._log
        if printed is None:
            return
        reason = record.reason
        if printed.left_out_bytes:
            ended = reason or "It ran to its end."
            reason = f"{ended} {printed.left_out_bytes:,} bytes of its log were not written: {printed.why}."
        if reason and not record.stopped and (lines := last_lines(printed.recent().data)):
            reason = "\n".join([f"{reason} It last printed:", *lines])
        self._record = replace(record, reason=reason)

    async def _report_stop(self, reports: Reports) -> None:
        """Call the webhook as soon as the attempt must stop, because at its end there may be no time."""
        await self._stop.wait()
        if self._webhook and (outcome := await reports.stopping()) is not None:
            self._webhook.send("stopping", outcome)

    def _start(self, progress_socket: str) -> tuple[Command, threading.Thread]:
        env = command_environment(self._env, self._spec, progress_socket)
        folder = working_directory(self._spec, self._home)
        argv = list(self._spec.command)
        if not argv or not argv[0]:
            raise CannotStart("The job has no command.", NOT_FOUND)
        # The command is looked up in its own PATH, not in the runner's.
        argv[0] = shutil.which(argv[0], path=env.get("PATH")) or argv[0]
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with self._start_lock:
                if self._is_given_up:
                    raise CannotStart("Stopped before it was started.", -signal.SIGTERM)
                command = Command(argv, cwd=folder, env=env, output=writing)
        except (OSError, ValueError) as error:
            os.close(reading)
            raise start_error(error, self._spec.command) from None
        finally:
            os.close(writing)
        pump = threading.Thread(target=_pump, args=(reading, self._on_print), daemon=True)
        pump.start()
        return command, pump

    async def _wait_for_end(self, command: Command) -> None:
        await self._until(lambda: command.reap() is not None or self._stop.is_set())
        stopped = command.exit_code is None
        if stopped:
            # A command that cannot notice the signal and exits with 0 had finished: it does not run again.
            ignores_stop = not command.can_notice(signal.SIGTERM)
            command.signal_group(signal.SIGTERM)
            self._write_line(f"asked to stop: SIGTERM now, SIGKILL after {self._spec.grace_s:g} s")
            until = time.monotonic() + self._spec.grace_s
            await self._until(lambda: command.reap() is not None, until)
            stopped = not (ignores_stop and command.exit_code == 0)
        else:
            until = time.monotonic() + min(LEFTOVER_GRACE_S, self._spec.grace_s)
        if command.exit_code is not None and descendants():
            # Only after the end of the command, which may end them in its own way.
            command.signal_all(signal.SIGTERM)
        await self._until(lambda: command.reap() is not None and not descendants(), until)
        remaining = await asyncio.to_thread(command.end_all)
        if remaining:
            self._write_line(f"{len(remaining)} processes cannot be ended; they hang in the kernel")
        code = command.exit_code if command.exit_code is not None else -signal.SIGKILL
        self._ended(code, self._reason(code, stopped), stopped=stopped)

    async def _answered(self, call: Future[Any], grace_s: float) -> bool:
        """Wait for a call of the disk, ``grace_s`` at most once stopping; return whether it is done."""
        loop = asyncio.get_running_loop()
        call.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._wake.set))
        await self._until(lambda: call.done() or self._stop.is_set())
        await self._until(call.done, time.monotonic() + grace_s)
        return call.done()

    async def _until(self, done: Callable[[], bool], until: float = math.inf) -> None:
        """Return when ``done``, or at ``until``; check at every SIGCHLD and every `_POLL_S`."""
        while not done() and time.monotonic() < until:
            self._wake.clear()
            pause_s = min(_POLL_S, max(0.0, until - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _reason(self, code: int, stopped: bool) -> str:
        if stopped and code == -signal.SIGKILL:
            return f"Stopped; it had not ended {self._spec.grace_s:g} s after the request and was killed."
        if stopped:
            return "Stopped."
        if code == 0:
            return ""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"Ended by {signal.Signals(-code).name}."
            return f"Ended by signal {-code}."
        return f"Ended with exit code {code}."

    # ---- record, log and progress ----------------------------------------------

    def _ended(self, code: int, reason: str, *, stopped: bool = False) -> None:
        self._record = replace(self._record, state="ended", exit_code=code, reason=reason, stopped=stopped)

    def _final_report(self) -> JobReport:
        record = self._record
        return JobReport(
            state="ended",
            exit_code=record.exit_code,
            reason=record.reason,
            stopped=record.stopped,
            **self._progress,
        )

    async def _keep(self, record: AttemptRecord) -> None:
        self._record = record
        if self._log is not None:
            end, left_out = self._log.end, self._log.left_out_bytes
            self._record = replace(record, log_bytes=end, log_left_out_bytes=left_out)
        path, kept = self._log_path.with_suffix(".json"), list[bool]()
        # The write may complete after the wait: the next start of this attempt reads the record.
        await self._disk.do(self._patience_s, lambda now: kept.append(write_record(path, now)), self._record)
        if kept != [True]:
            log.warning("job=%s attempt=%d: the disk does not take its record", record.id, record.attempt)
        log.info(
            "job=%s attempt=%d state=%s exit_code=%s",
            record.id,
            record.attempt,
            record.state,
            record.exit_code,
        )

    def _write_line(self, text: str) -> None:
        """Write a line of the runner to the log of the job."""
        if self._log is not None:
            self._log.write(f"[gpushare] {text}\n".encode(errors="replace"), waits=False)

    def _on_progress(self, done: float, total: float | None) -> None:
        self._reported = {"done": done, "total": total}

    def _on_print(self, data: bytes) -> None:
        """Write the command's output to the log, and parse its progress bars (in the pump's thread)."""
        if self._log is not None:
            self._log.write(data)
        if self._reported is not None:
            return
        with contextlib.suppress(Exception):  # no output may end the job
            self._bars.feed(data, time.monotonic())
        found = self._bars.progress
        if found is None or found[1] > MAX_PROGRESS:
            self._shown = _NO_PROGRESS
        else:
            self._shown = {"done": found[0], "total": found[1]}

    async def _report_progress(self, reports: Reports) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            await self._send_progress(reports)

    async def _send_progress(self, reports: Reports) -> None:
        # An undelivered report is sent again, so that the broker does not keep withdrawn progress.
        if (now := self._progress) != self._delivered:
            self._delivered = None
            if await reports.progress(**now):
                self._delivered = now


def _end_late(starting: Future[tuple[Command, threading.Thread]]) -> None:
    """End a command that was started after the end of its attempt."""
    if starting.exception() is None:
        starting.result()[0].end_all()


def _pump(reading: int, write: Callable[[bytes], None]) -> None:
    """Copy the command's output to the log; in its own thread, so that a slow disk blocks nothing else."""
    with open(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(_READ_BYTES):
            write(data)


class _ProgressSocket:
    """A datagram socket for progress reports, in a private folder; malformed messages are dropped."""

    def __init__(self, disk: Disk, on_progress: Callable[[float, float | None], None]) -> None:
        self._disk = disk
        self._on_progress = on_progress
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self._folder = ""

    async def __aenter__(self) -> str:
        """Return the address; empty if the socket cannot be created, and progress is not reported."""
        try:
            address = await self._disk.ask(self._bind)
        except OSError as error:  # also TimeoutError
            log.warning("the job cannot report its progress: %s", error.strerror or SILENT)
            return ""
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return address

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        with contextlib.suppress(OSError):
            self._read()
        self._socket.close()
        if self._folder:
            await self._disk.do(_STOP_PATIENCE_S, shutil.rmtree, self._folder, True)

    def _bind(self) -> str:
        # Not in the user's home, because the path of a socket has at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="gpushare-")
        address = os.path.join(self._folder, "progress")
        self._socket.bind(address)
        return address

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # The batch is bounded at any rate of the sender (the kernel queues net.unix.max_dgram_qlen).
            for _ in range(64):
                self._take(self._socket.recv(_PROGRESS_BYTES))

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
            done, total = float(report["done"]), report.get("total")
            total = None if total is None else float(total)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return
        if 0 <= done <= MAX_PROGRESS and (total is None or 0 <= total <= MAX_PROGRESS):
            self._on_progress(done, total)


def main(env: Mapping[str, str] | None = None) -> int:
    """Run the job that the environment describes; return 0 if the broker accepted its outcome."""
    logging.basicConfig(format="[%(levelname).1s %(asctime)s gpushare.job] %(message)s", level=logging.INFO)
    for chatty in ("httpx", "httpcore", "tornado.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    env = os.environ if env is None else env
    hide_environment(*_SECRETS)
    try:
        spec = decode(env.get("GPUSHARE_JOB", "").encode(), JobSpec)
        record = asyncio.run(_run(spec, env))
    except GpuShareError as error:
        print(f"gpushare job: {error}", file=sys.stderr)
        return 2
    return 0 if record.reported else 1


async def _run(spec: JobSpec, env: Mapping[str, str]) -> AttemptRecord:
    return await Runner(spec, env).run()
