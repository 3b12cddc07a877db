"""Keeping room for a job that was overtaken for long.

What does not fit blocks nobody, until it has waited for ``skip_wait_s`` (or
`order.is_starved`): then nobody behind it gets the devices where least is
missing for it.  One job of a project at a time: when it has started, the next
has its turn.
"""

from __future__ import annotations

from jupyter_gpushare.core import order
from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, Lease
from jupyter_gpushare.core.placement import Layout, demand
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.room import Room, free_soon


class Keeping:
    """For whom room is kept in a round."""

    def __init__(self, board: Board, layout: Layout) -> None:
        self._board = board
        self._layout = layout
        self._projects: set[str] = set()  # in which room is kept for one

    def is_due(self, job: Lease, now: float) -> bool:
        """Whether ``job`` has waited for so long that it is not overtaken any more."""
        wait_s = self._board.settings.skip_wait_s
        overtaken = wait_s is not None and now >= job.waits_since_at + wait_s
        return overtaken or order.is_starved(job, now, self._board.settings)

    def keep(self, job: Lease) -> bool:
        """Keep what ``job`` will need from those behind it; False: there is nothing to keep."""
        if job.project in self._projects:
            return False
        rooms = self._board.rooms_of(job) if job.devices else self._least_taken(job)
        if rooms is None:
            return False
        self._projects.add(job.project)
        need = held_by(job) if job.devices else demand(job, rooms[0].device)
        self._board.pledge(job, [room.device.uuid for room in rooms], need)
        return True

    def _least_taken(self, job: Lease) -> list[Room] | None:
        """The devices that ``job`` could have soonest if nobody new came: where least is missing."""
        best: tuple[tuple[int, str], list[Room]] | None = None
        for tier in self._layout.tiers(job):
            for group in tier:
                able = [room for room in group if without_sessions(room) >= demand(job, room.device)]
                able.sort(key=lambda room: (-room.soon, room.device.uuid))
                if not self._layout.is_wider(job):
                    able = able[: job.device_count]
                rooms = self._layout.choose(job, able, free_soon)
                if rooms is not None:
                    missing = sum(max(0, demand(job, room.device) - room.soon) for room in rooms)
                    found = (missing, rooms[0].device.uuid), rooms
                    best = found if best is None else min(best, found, key=lambda x: x[0])
        return best and best[1]


def without_sessions(room: Room) -> int:
    """What jobs can have of a device when all other jobs have left it."""
    return WHOLE_GPU - sum(held_by(x) for x in room.holders.values() if x.kind is Kind.BUILD) - room.asleep
