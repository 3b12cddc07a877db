"""Driver calls that may never return, limited in time and in number.

A driver call cannot be interrupted, so the caller abandons a call that takes too long.
Each `BoundedWorker` runs its calls one after the other in one thread.  When a call
exceeds its time limit, the caller gets a `DeviceError` (``TIMED_OUT``) and the worker is
*stuck*: until the call has returned, every further call fails at once, without a new
thread.  A hung device costs one thread, and delays no call to another device (another worker).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jupyter_gpushare.errors import DeviceError

# Not a code of any driver: NVML and CUDA use 0 and above.
TIMED_OUT = -1

_Value = TypeVar("_Value")


class BoundedWorker:
    """Runs driver calls one at a time, each with a time limit; while one hangs, others fail at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = threading.Lock()
        self._jobs = queue.SimpleQueue[Call[Any]]()
        self._stuck: Call[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def stuck_in(self) -> str:
        """The name of the hanging call, or an empty string."""
        stuck = self._stuck
        return stuck.name if stuck is not None and not stuck.done.is_set() else ""

    def begin(self, name: str, call: Callable[[], _Value], wait_s: float = 0.0) -> Call[_Value]:
        """Start a call and return it; if another call still runs, wait for it at most ``wait_s``.

        Raises:
            DeviceError: an earlier call hangs or still runs (code ``TIMED_OUT``).
        """
        if self.stuck_in:
            raise DeviceError(name, TIMED_OUT, f"{self.stuck_in} has not returned")
        if not self._busy.acquire(timeout=wait_s):
            raise DeviceError(name, TIMED_OUT, f"{self._name} is busy")
        job = Call(name, call)
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"driver-{self._name}", daemon=True)
            self._thread.start()
        return job

    def abandon(self, job: Call[_Value], after_s: float) -> DeviceError:
        """Give up a call and return its error; until it returns, every other call fails at once."""
        self._stuck = job
        return DeviceError(job.name, TIMED_OUT, f"no answer within {after_s:g} s")

    def call(
        self, name: str, call: Callable[[], _Value], timeout_s: float, wait_s: float | None = None
    ) -> _Value:
        """Return what ``call`` returns; if an earlier call still runs, wait for it at most ``wait_s``.

        Raises:
            DeviceError: it took too long, or an earlier call hangs (code ``TIMED_OUT``).
            Exception: whatever ``call`` raised.
        """
        deadline = time.monotonic() + timeout_s
        job = self.begin(name, call, timeout_s if wait_s is None else wait_s)
        if not job.done.wait(max(0.0, deadline - time.monotonic())):
            raise self.abandon(job, timeout_s)
        return job.result()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            # Before `done` is set, because a caller that sees it may begin the next call.
            self._busy.release()
            job.done.set()
            del job


class Call(Generic[_Value]):
    """One call of a worker: ``done`` is set when it has returned."""

    __slots__ = ("_call", "_error", "_value", "began_at", "done", "name")

    def __init__(self, name: str, call: Callable[[], _Value]) -> None:
        self.name = name
        self.began_at = time.monotonic()
        self.done = threading.Event()
        self._call = call
        self._value: _Value | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call; `result` later raises what it raised."""
        try:
            self._value = self._call()
        except BaseException as error:  # handed to the caller, whatever it is
            self._error = error

    def result(self) -> _Value:
        """Return the value of a call that is done.

        Raises:
            BaseException: what the call raised.
        """
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
