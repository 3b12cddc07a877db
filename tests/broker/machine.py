"""The machine of a `Site`: devices, leases with their processes, running programs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Overuse, Phase, ProcessSample, SetLimit

GB = 10**9
MODELS = {"H100-80GB": 80 * GB}  # with their memory in bytes
RESERVE_BYTES = 2 * GB
GROUPS = {"ada": ("vision",), "bo": ("nlp",), "cy": ("vision", "nlp"), "eve": (), "root": ()}

_NOTHING = SetLimit(lease="", uid=-1, limits={})


@dataclass
class Held:
    """A lease as the device helper knows it, with its processes."""

    handle: str
    uid: int
    limits: dict[str, int]
    guaranteed: dict[str, int] = field(default_factory=dict)
    phase: Phase = Phase.RUNNING
    alive: bool = False
    used: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    wanted: bool = False
    stalled: bool = False
    active_at: float = 0.0
    suspendable: bool = True
    runner_ended: bool = False
    command_ended: bool = False  # of a job: only its runner lives, if anything
    damaged: bool = False
    unread_since: float = 0.0
    unattended: bool = False
    over: tuple[Overuse, ...] = ()
    left: dict[int, int] = field(default_factory=dict)  # bytes of dead processes, by the pid that keeps them
    processes: tuple[ProcessSample, ...] = ()
    stops: bool = False
    unconfirmed: bool = False
    asked: SetLimit = _NOTHING  # last
    share_reason: str = ""
    measured_share: float = -1.0
    rate: float = 100.0  # calls of the library per second that its command completes
    work: float = 0.0
    work_at: float = 0.0
    ended_as_guest: bool = False

    def advance(self, now: float) -> None:
        """Add the work of the command since the last call."""
        if self.phase is Phase.RUNNING and self.alive and not self.command_ended:
            self.work += self.rate * (now - self.work_at)
        self.work_at = now

    def place_on(self, devices: Sequence[str]) -> None:
        """Move the suspended lease to these devices, one for one."""
        places = dict(zip(self.limits, devices, strict=True))
        self.limits = {places[uuid]: count for uuid, count in self.limits.items()}
        self.guaranteed = {places[uuid]: count for uuid, count in self.guaranteed.items()}
        self.saved = {places[uuid]: count for uuid, count in self.saved.items()}


@dataclass
class Program:
    """The behaviour of a job's command."""

    work_s: float = 20.0
    exit_code: int = 0
    memory: float = 0.5  # of its limit
    dies_of_loss: bool = False  # when its GPU memory was lost
    heeds_sigterm: bool = True
    records_s: float = 0.0  # its runner takes so long to write down how it ended
    vanishes_after_s: float | None = None  # killed from outside
    lingers_s: float = 0.0  # its memory is still on the device so long after its end


@dataclass(eq=False)
class Run:
    """One living attempt of a job."""

    job: wire.JobSpec
    user: str
    told_to_stop: bool = False
    command_killed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False  # its processes are gone; their memory may linger
    task: asyncio.Task[None] | None = None
