"""A clock that jumps: an hour takes milliseconds, and nothing races."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

START_AT = 1_000.0
# A test that is not over after this time never ends.
TOO_LONG_S = 50_000.0
# The first pause between two checks of `until`.
STEP_S = 0.05


class _Impatient(selectors.DefaultSelector):
    """A selector that never waits: when the event loop would sleep, its clock advances."""

    now = START_AT

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self.now += max(0.0, timeout)
        if self.now > START_AT + TOO_LONG_S:
            raise RuntimeError("this story never ends")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._impatient = _Impatient()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now

    def run_in_executor(self, _executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run the function at once: virtual time has no threads."""
        done = self.create_future()
        done.set_result(function(*arguments))
        return done


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end on a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def until(
    condition: Callable[[], Any],
    within_s: float = 600.0,
    step_s: float = STEP_S,
    max_step_s: float = 10 * STEP_S,
) -> None:
    """Return when ``condition`` holds; fail after the given virtual seconds.

    The steps grow with the time that has passed, from ``step_s`` at 50 s to ``max_step_s``: a
    change may be noticed so many seconds late.  A test that measures a time after a long wait sets
    ``max_step_s``.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        passed_s = loop.time() - began
        assert passed_s < within_s, "the condition never came true"
        await asyncio.sleep(min(max_step_s, step_s * max(1.0, passed_s / 50.0)))
