"""A child process that runs what a test sends it, one statement at a time, as a kernel does.

    with Worker(machine.env()) as kernel:
        kernel.run("buffer = gpu.allocate('1GiB')")
        assert kernel.ask("gpu.memory()") == [...]
        kernel.start("buffer.checksum()")        # does not wait
        kernel.answer(timeout_s=5)

The child has imported `os`, `sys`, `time`, `threading`, `ctypes` and `demo_gpu`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

from tests.waiting import PATIENCE_S

_CHILD = """
import ctypes, json, os, sys, threading, time
from jupyter_gpushare import demo_gpu
scope = dict(globals())
for line in sys.stdin:
    source = json.loads(line)
    try:
        try:
            value = eval(compile(source, "cell", "eval"), scope)
        except SyntaxError:
            exec(compile(source, "cell", "exec"), scope)
            value = None
        answer = {"value": value}
        text = json.dumps(answer, default=repr)
    except BaseException as error:
        code = getattr(error, "code", None)
        text = json.dumps({"error": type(error).__name__, "text": str(error), "code": code})
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
"""


class WorkerError(Exception):
    """The code in the child raised; the error has the exception's name, text and driver code."""

    def __init__(self, kind: str, text: str, code: int | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.code = code


class Worker:
    """One child, which ends with the ``with`` block."""

    def __init__(self, env: dict[str, str], *, open_gpu: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            bufsize=0,
        )
        self._pending = b""
        self.pid = self.process.pid
        if open_gpu:
            self.run("gpu = demo_gpu.open()")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, source: str) -> None:
        """Send code to run and do not wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source).encode() + b"\n")

    def answer(self, timeout_s: float = 30) -> Any:
        """Return the result of the oldest code that has no answer yet.

        Raises:
            TimeoutError: the code still runs.
            WorkerError: the code raised.
        """
        assert self.process.stdout is not None
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
            if not ready:
                raise TimeoutError
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(f"the worker ended: {self.stderr()}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"], reply["text"], reply["code"])
        return reply["value"]

    def ask(self, source: str, timeout_s: float = 30) -> Any:
        """Return the value of an expression, through JSON."""
        self.start(source)
        return self.answer(timeout_s)

    def run(self, source: str, timeout_s: float = 30) -> None:
        """Run statements."""
        self.ask(source, timeout_s)

    def is_waiting(self, for_s: float = 0.15) -> bool:
        """Return whether the started code still runs after this time."""
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], for_s)[0]

    def stderr(self) -> str:
        """Return the child's stderr, after its end."""
        assert self.process.stderr is not None
        self.process.wait(PATIENCE_S)
        return self.process.stderr.read().decode()

    def kill(self) -> None:
        """Kill the child if it still lives, and collect it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
