"""Calls into the driver that may never return, bounded in time and in number.

A driver call cannot be interrupted: a caller that must go on leaves it behind.
Each `Lane` runs its calls one after the other in a thread of its own.  When a
call takes longer than its bound the caller gets a `DeviceError` (``TIMED_OUT``)
and the lane stays *stuck*: it refuses every further call at once, without a new
thread, until the call has returned.  So a hung device costs one thread, and a
call to another device (another lane) does not notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import DeviceError

# Not a number of any driver: NVML and CUDA use 0 and above.
TIMED_OUT = -1

_Value = TypeVar("_Value")


class Lane:
    """Runs driver calls one at a time, each with a bound; refuses at once while one hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._wake = threading.Condition()
        self._job: _Job | None = None
        self._stuck: _Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def stuck_in(self) -> str:
        """The call that hangs here, or an empty string."""
        stuck = self._stuck
        return stuck.name if stuck is not None and not stuck.done.is_set() else ""

    def call(self, name: str, call: Callable[[], _Value], timeout_s: float) -> _Value:
        """What ``call`` returns.

        Raises:
            DeviceError: with code ``TIMED_OUT`` when it took too long, or when an
                earlier call still hangs.
            Exception: whatever ``call`` raised.
        """
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise DeviceError(name, TIMED_OUT, f"{self._name} is busy")
        try:
            if self.stuck_in:
                raise DeviceError(name, TIMED_OUT, f"{self.stuck_in} has not returned")
            job = _Job(name, call)
            with self._wake:
                self._job = job
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=f"lane-{self._name}", daemon=True)
                    self._thread.start()
                self._wake.notify()
            if not job.done.wait(max(0.0, deadline - time.monotonic())):
                self._stuck = job
                raise DeviceError(name, TIMED_OUT, f"no answer within {timeout_s:g} s")
        finally:
            self._turn.release()
        if job.error is not None:
            raise job.error
        return job.value  # type: ignore[return-value]

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._job is None:
                    self._wake.wait()
                job, self._job = self._job, None
            job.run()
            del job


class _Job:
    __slots__ = ("call", "done", "error", "name", "value")

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name = name
        self.call = call
        self.value: object = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:  # handed to the caller, whatever it is
            self.error = error
        self.done.set()
