"""A machine in virtual time for tests of turns: devices, programs that launch kernels, and the library.

Devices divide their time equally between the processes with work, as the driver does.  The library
holds launches out of turn, bounds what is in flight, and proves that a process is done `PROOF_S` after
its last kernel.  Nothing here sleeps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from jupyter_gpushare.gpu.turns.ring import Contender, Turn, TurnRing
from jupyter_gpushare.gpu.turns.turns import CONTESTED_POLL_S, DRAINING_POLL_S, REST_S

PROOF_S = 0.001
QUEUE_S = 1.0  # work that the driver queues without turns: about a thousand launches


@dataclass
class Program:
    """One process that launches kernels of one length in a pattern."""

    kernel_s: float
    wants: Callable[[float], bool] = lambda at: True  # whether it launches at a moment
    todo: float = inf  # kernels that it may launch
    proves: bool = True  # the library's thread answers
    queue: deque[float] = field(default_factory=deque)
    done: int = 0
    served_s: float = 0.0
    free_at: float = 0.0  # when it last had work on the device
    launched_at: float = 0.0
    waits: bool = False

    def launch(self, at: float, turn: Turn, ahead_s: Callable[[], float]) -> None:
        """Launch what fits; ``ahead_s`` is called for the maximum in flight only while turns are taken."""
        wants = self.wants(at)
        self.waits = wants and turn is Turn.HELD
        if not wants or turn is Turn.HELD:
            return
        maximum_s = QUEUE_S if turn is Turn.NONE else ahead_s()
        in_flight_s = sum(self.queue)
        while (
            self.todo
            and in_flight_s < maximum_s
            and (not self.queue or in_flight_s + self.kernel_s <= maximum_s)
        ):
            self.todo -= 1
            self.queue.append(self.kernel_s)
            in_flight_s += self.kernel_s
            self.launched_at = at

    def run(self, at: float, served_s: float) -> float:
        """Compute for at most this time; return the time used."""
        left = served_s
        while self.queue and left > 0:
            part = min(left, self.queue[0])
            self.queue[0] -= part
            left -= part
            if self.queue[0] <= 1e-12:
                self.queue.popleft()
                self.done += 1
        self.served_s += served_s - left
        if not self.queue:
            self.free_at = at
        return served_s - left

    def is_busy(self, at: float) -> bool:
        if not self.proves:
            return self.launched_at > 0 and at - self.launched_at < REST_S
        return bool(self.queue) or (self.done > 0 and at - self.free_at < PROOF_S)


@dataclass
class Lease:
    """A lease with its programs on some devices."""

    share: float
    programs: list[Program]
    devices: tuple[str, ...] = ("GPU-0",)
    strict: bool = False
    asleep: bool = False
    turns: int = 0
    waited_s: float = 0.0  # the longest wait for a turn
    waits_since: float | None = None

    @property
    def served_s(self) -> float:
        return sum(program.served_s for program in self.programs)

    @property
    def done(self) -> int:
        return sum(program.done for program in self.programs)


class TurnMachine:
    """Runs leases on devices, in steps of ``tick_s``."""

    def __init__(self, leases: dict[str, Lease], tick_s: float = 0.001, seed: int = 1) -> None:
        self.leases = leases
        self.ring = TurnRing()
        self.at = 0.0
        self.tick_s = tick_s
        self.busy_s = 0.0  # of all devices together
        self.turn: dict[str, Turn] = {}
        self._random = random.Random(seed)
        self._look_at = 0.0

    def run(self, until: Callable[[], bool] | float) -> None:
        end = until if isinstance(until, float) else None
        while not (self.at >= end if end is not None else until()):
            self.tick()

    def tick(self) -> None:
        if self.at >= self._look_at:
            self._look()
            # The helper's thread sometimes wakes late.
            pause_s = DRAINING_POLL_S if self.ring.is_draining else CONTESTED_POLL_S
            self._look_at = self.at + (0.005 if self._random.random() > 0.99 else pause_s)
        for name, lease in self.leases.items():
            if not lease.asleep:
                turn = self.turn.get(name, Turn.NONE)
                for program in lease.programs:
                    program.launch(self.at, turn, partial(self.ring.ahead_s, name))
            self._measure_wait(lease)
        self._serve()
        self.at += self.tick_s

    def _serve(self) -> None:
        devices = {device for lease in self.leases.values() for device in lease.devices}
        for device in devices:
            left_s = self.tick_s
            # The others get the rest of the tick that one leaves.
            for _ in range(3):
                users = [
                    p
                    for lease in self.leases.values()
                    if device in lease.devices
                    for p in lease.programs
                    if p.queue
                ]
                if not users or left_s < 1e-9:
                    break
                used_s = sum(p.run(self.at + self.tick_s, left_s / len(users)) for p in users)
                left_s -= used_s
            self.busy_s += self.tick_s - left_s

    def _look(self) -> None:
        seen = {
            name: Contender(
                devices=lease.devices,
                share=lease.share,
                strict=lease.strict,
                busy=sum(program.is_busy(self.at) for program in lease.programs),
                waits=any(program.waits for program in lease.programs),
            )
            for name, lease in self.leases.items()
            if not lease.asleep
        }
        before, self.turn = self.turn, self.ring.step(self.at, seen)
        for device in {device for lease in self.leases.values() for device in lease.devices}:
            open_ = [n for n, t in self.turn.items() if t is Turn.OPEN and device in self.leases[n].devices]
            assert len(open_) <= 1, f"turns of {open_} at once on {device}"
        for name, turn in self.turn.items():
            self.leases[name].turns += turn is Turn.OPEN and before.get(name) is not Turn.OPEN

    def _measure_wait(self, lease: Lease) -> None:
        if not any(p.waits for p in lease.programs) or any(p.queue for p in lease.programs):
            lease.waits_since = None
            return
        lease.waits_since = self.at if lease.waits_since is None else lease.waits_since
        lease.waited_s = max(lease.waited_s, self.at - lease.waits_since)


class Trainer(Program):
    """A process that repeatedly launches a number of kernels, waits for them, and pauses."""

    def __init__(self, kernel_s: float, kernels: int, pause_s: float) -> None:
        super().__init__(kernel_s, lambda at: self.todo > 0, todo=kernels)
        self._kernels, self._pause_s = kernels, pause_s
        self._pauses_until: float | None = None

    def launch(self, at: float, turn: Turn, ahead_s: Callable[[], float]) -> None:
        if not self.todo and not self.queue:
            if self._pauses_until is None:
                self._pauses_until = at + self._pause_s
            elif at >= self._pauses_until:
                self.todo, self._pauses_until = self._kernels, None
        super().launch(at, turn, ahead_s)
