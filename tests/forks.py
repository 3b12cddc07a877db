"""Start processes without the time for imports: fork them from a process that has imported the modules.

A fork has the environment, the folder, the session, the output and the signals that
`subprocess.Popen` would give it, and saves half a second of imports.  Its /proc/PID/cmdline and
/proc/PID/environ are those of its parent.  Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# The dynamic linker reads these variables once, when its process starts.
_OF_THE_LINKER = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_MESSAGE_BYTES = 1 << 20


class Forked:
    """A process that a `Forks` started, with the interface of `subprocess.Popen`."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            remaining_s = None if until is None else until - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            self._forks.wait(remaining_s)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that runs the code ``prepare`` once, and forks itself for each `start`."""

    def __init__(self, prepare: str, env: Mapping[str, str]) -> None:
        self._linked = {name: env.get(name) for name in _OF_THE_LINKER}
        self._channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            command = [sys.executable, "-P", __file__, str(remote.fileno()), prepare]
            self._process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, pass_fds=[remote.fileno()]
            )
        self._channel.setblocking(False)
        self._ended: dict[int, int] = {}
        self._pids: list[int] = []
        self._lock = threading.RLock()

    def can_start(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork loads the same libraries as a new process with this environment."""
        return {name: env.get(name) for name in _OF_THE_LINKER} == self._linked

    def start(
        self,
        code: str,
        argv: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        cwd: Path | str = ".",
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
    ) -> Forked:
        """Run ``code`` with the arguments ``argv`` in a new process, and return the process."""
        request = {"code": code, "argv": list(argv), "env": dict(env), "cwd": str(Path(cwd).absolute())}
        files = [file.fileno() if file else number for number, file in ((1, stdout), (2, stderr))]
        with self._lock:
            self._channel.setblocking(True)
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            self._channel.setblocking(False)
            while not self._pids:
                self.wait(None)
                self._read()
            return Forked(self, self._pids.pop())

    def ended(self, pid: int) -> int | None:
        """Return the exit status of a fork, or None while it runs; a signal has a negative number."""
        with self._lock:
            self._read()
            return self._ended.pop(pid, None)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a fork has started or ended, for at most ``timeout_s`` seconds."""
        select.select([self._channel], [], [], timeout_s)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while message := self._channel.recv(_MESSAGE_BYTES):
                event = json.loads(message)
                if "status" in event:
                    self._ended[event["pid"]] = event["status"]
                else:
                    self._pids.append(event["pid"])
            raise AssertionError(f"the process that forks has ended: {self._process.wait()}")

    def close(self) -> None:
        """End the process and its living forks."""
        self._channel.close()
        self._process.wait()


@contextlib.contextmanager
def forks(prepare: str, env: Mapping[str, str]) -> Iterator[Forks]:
    """Yield a `Forks` whose processes end with the context."""
    made = Forks(prepare, env)
    try:
        yield made
    finally:
        made.close()


def _serve(channel: socket.socket) -> None:
    """Fork for each message until the other side closes; report each fork that ends."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    while True:
        ready = select.select([channel, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(channel, living)
        if channel not in ready:
            continue
        message, files, _flags, _address = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
        if not message:
            break
        pid = os.fork()
        if not pid:
            for each in (woken, wakes):
                os.close(each)
            channel.close()
            _become(json.loads(message), files)
        for each in files:
            os.close(each)
        living.add(pid)
        channel.send(json.dumps({"pid": pid}).encode())
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _report_ends(channel: socket.socket, living: set[int]) -> None:
    for pid in list(living):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            living.remove(pid)
            channel.send(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Turn this fork into the process that ``request`` describes; run it to its end."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = ["-c", *request["argv"]]
        exec(compile(request["code"], "<fork>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    exec(sys.argv[2])  # the imports for the tests of one folder
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
