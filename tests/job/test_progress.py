from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.job.progress import SOCKET_VARIABLE, progress


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "s"))
        end.settimeout(5)
        monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "s"))
        yield end


def test_progress_is_one_line_of_json(receiver: socket.socket) -> None:
    assert progress(3, 10)
    assert json.loads(receiver.recv(1000)) == {"done": 3.0, "total": 10.0}
    assert progress(3)
    assert json.loads(receiver.recv(1000)) == {"done": 3.0, "total": None}


def test_outside_a_job_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    assert not progress(1, 2)


def test_a_runner_that_does_not_read_slows_no_program_down(receiver: socket.socket) -> None:
    assert not all(progress(n) for n in range(100_000))


def test_a_runner_that_is_gone_breaks_nothing(receiver: socket.socket) -> None:
    receiver.close()
    assert not progress(1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1])
def test_nonsense_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        progress(value)
    with pytest.raises(ValueError, match="finite"):
        progress(1, value)


def test_the_name_on_top_is_the_same_and_imports_nothing_heavy(receiver: socket.socket) -> None:
    look = (
        "import jupyter_gpushare as g, sys; g.progress(1, 2)\n"
        "print([name for name in ('msgspec', 'tornado', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert json.loads(receiver.recv(1000)) == {"done": 1.0, "total": 2.0}
    assert done.stdout == "[]\n"
