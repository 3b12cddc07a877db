"""Driver calls that may never return, bounded in time and in number.

A driver call cannot be interrupted, so a caller that must go on abandons it.
Each `BoundedWorker` runs its calls one after the other in one thread.  When a call
takes longer than its bound, the caller gets a `DeviceError` (``TIMED_OUT``) and the
worker is *stuck*: it refuses every further call at once, without a new thread,
until the call has returned.  A hung device costs one thread, and calls to other
devices (other workers) are not delayed.
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
    """Runs driver calls one at a time, each with a bound; refuses at once while one hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = threading.Lock()
        self._jobs = queue.SimpleQueue[Call[Any]]()
        self._stuck: Call[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def stuck_in(self) -> str:
        """The name of the call that hangs here, or an empty string."""
        stuck = self._stuck
        return stuck.name if stuck is not None and not stuck.done.is_set() else ""

    def begin(self, name: str, call: Callable[[], _Value], wait_s: float = 0.0) -> Call[_Value]:
        """The started call, at once, or after at most ``wait_s`` when another is still running.

        Raises:
            DeviceError: with code ``TIMED_OUT``: an earlier call hangs or still runs.
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
        """The error for a call that took too long; until it returns, every other one is refused at once."""
        self._stuck = job
        return DeviceError(job.name, TIMED_OUT, f"no answer within {after_s:g} s")

    def call(
        self, name: str, call: Callable[[], _Value], timeout_s: float, wait_s: float | None = None
    ) -> _Value:
        """What ``call`` returns; an earlier one that still runs is waited for (at most ``wait_s``).

        Raises:
            DeviceError: with code ``TIMED_OUT`` when it took too long, or when an
                earlier call still hangs.
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
            # Released before `done` is set: a caller that sees the call done may begin the next.
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
        """Make the call; what it raises is kept for `result`."""
        try:
            self._value = self._call()
        except BaseException as error:  # handed to the caller, whatever it is
            self._error = error

    def result(self) -> _Value:
        """What a call that is done returned.

        Raises:
            BaseException: what the call raised.
        """
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
