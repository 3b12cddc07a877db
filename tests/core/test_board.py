"""`Board`: taking a decision back leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.model import Lease
from tests.core.build import GIB, NOW, build, cluster, train


def numbers(board: Board) -> dict[str, Any]:
    rooms = {
        uuid: (
            room.free,
            room.coming,
            room.soon,
            room.claimed,
            room.asleep,
            sorted(room.holders),
        )
        for uuid, room in board.rooms.items()
    }
    jobs = {name: sorted(jobs) for name, jobs in board.standing.jobs.items()}
    return {"rooms": rooms, "jobs": jobs, "host": board.host_free}


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize(
    "lease", [build("nb", 500, "0", used_bytes=GIB), train("job", 500, "0", used_bytes=GIB)]
)
def test_who_need_not_leave_after_all_is_back_as_if_never_asked(lease: Lease, parked: bool) -> None:
    board = Board.of(cluster(lease, train("other", 250, "0")), NOW)
    before = numbers(board)
    board.leave(lease, parked=parked)
    assert numbers(board) != before
    board.stay(lease, parked=parked)
    assert numbers(board) == before
