"""A program that ends with the process that started it. `tests/faults/test_parents.py` has those of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpushare import parent
from tests.waiting import until

# Says whether it knows its parent, and makes a file once that has ended.
RELEASED = """
import os, sys, time
from jupyter_gpushare import parent
starter = parent.release()
print(starter == os.getppid(), flush=True)
while os.getppid() == starter:
    time.sleep(0.01)
open(sys.argv[1], "w").close()
"""
STARTS = """
import subprocess, sys
from jupyter_gpushare.parent import bound
subprocess.run(bound(sys.argv[2:], int(sys.argv[1])))
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_program_does_not_begin_after_its_parent_has_ended(tmp_path: Path) -> None:
    command = parent.bound(["touch", str(tmp_path / "begun")])
    assert command[3] == str(os.getpid())
    command[3] = str(os.getppid())  # that of a process which has not started it
    assert run(command).returncode == 1
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_gets_the_signal_when_its_parent_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    got, up = tmp_path / "got", tmp_path / "up"
    child = f"trap 'echo > {got}; exit' TERM; echo > {up}; while :; do sleep 0.1; done"
    with subprocess.Popen([sys.executable, "-c", STARTS, str(number.value), "sh", "-c", child]) as starter:
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        until(up.exists, "the program runs")
        pid = int(children.read_text())
        starter.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the program ends")
    assert got.exists() == (number == signal.SIGTERM)


def test_a_process_that_is_released_outlives_its_parent_and_knows_it(tmp_path: Path) -> None:
    lived = tmp_path / "lived"
    command = [sys.executable, "-c", STARTS, "9", sys.executable, "-c", RELEASED, str(lived)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"True\n"
        starter.kill()
    until(lived.exists, "it goes on")


def test_a_process_that_is_not_bound_has_nothing_to_be_released_from() -> None:
    assert parent.release() is None


def test_a_program_gets_the_signals_as_if_it_were_started_without_python() -> None:
    show = ["sh", "-c", "grep SigIgn /proc/self/status"]
    assert run(parent.bound(show)).stdout == run(show).stdout


@pytest.mark.parametrize(("program", "status"), [("/no/such/program", 127), ("/", 126)])
def test_a_program_that_cannot_be_run_is_named(program: str, status: int) -> None:
    done = run(parent.bound([program]))
    assert done.returncode == status
    assert done.stderr.startswith(f"{program} cannot be run: ")
    assert done.stderr.count("\n") == 1
