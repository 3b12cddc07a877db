"""A job cannot take the token of its server, and the device helper still finds the job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.job.conftest import SERVER_TOKEN
from tests.waiting import PATIENCE_S

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")

# What is imported is loaded before: the other user may read nothing here.
_HIDES = f"""
import ctypes, os, subprocess, sys
from jupyter_gpushare.job.children import hide_environment
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as after an exec
if sys.argv[1] == "hide":
    hide_environment("SECRET")
script = "cat /proc/$PPID/environ /proc/$PPID/auxv; true"
subprocess.run(["/bin/sh", "-c", script], env={{}})
"""


def test_the_command_finds_no_token_in_the_environment_of_its_runner(start):
    job = start("sh", "-c", "cat /proc/$PPID/environ /proc/$PPID/cmdline; env")
    job.ended()
    assert SERVER_TOKEN not in job.log
    assert "GPUSHARE_LEASE=j0123456789-1" in job.log


@root_only
@pytest.mark.parametrize("does", ["hide", "show"])
def test_another_process_of_the_user_reads_neither_environment_nor_memory(does):
    ran = subprocess.run(
        [sys.executable, "-c", _HIDES, does],
        env=os.environ | {"SECRET": "the-token"},
        capture_output=True,
        text=True,
        check=True,
        errors="replace",
    )
    assert ("the-token" in ran.stdout) == (does == "show")
    assert ran.stderr.count("Permission denied") == (2 if does == "hide" else 0)


@root_only  # reads what is closed to other users
def test_python_still_has_what_is_hidden():
    code = (
        "import os; from jupyter_gpushare.job.children import hide_environment;"
        "hide_environment('SECRET', 'NONE');"
        "print(os.environ['SECRET'], open('/proc/self/environ', 'rb').read().count(b'the-token'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SECRET": "the-token"}, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["the-token", "0"], ran.stderr


_RUNS = f"""
import ctypes, os, sys, time
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
print("ready", flush=True)
time.sleep(60)
"""
_FINDS = f"""
import os, sys, time
from pathlib import Path
from jupyter_gpushare.gpu.leases.processes import Processes
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
processes = Processes(Path("/run/leases"))
deadline, found = time.monotonic() + {PATIENCE_S}, ()
while not found and time.monotonic() < deadline:  # on busy cores a scan ends before every process answers
    found = processes.scan({{"j1-1": {NOBODY}, "j2-1": 1}})["j1-1"]
    time.sleep(0.01)
print([p.pid for p in found])
"""


@root_only
def test_a_helper_without_root_finds_the_runner_that_hides_its_environment():
    command = [sys.executable, "-c", _RUNS, "GPUSHARE_LEASE=j1-1"]
    with subprocess.Popen(
        command,
        env={"GPUSHARE_LEASE": "j1-1", "GPUSHARE_LEASE_DIR": "/elsewhere"},
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        try:
            assert runner.stdout.readline() == "ready\n"
            found = subprocess.run(
                [sys.executable, "-c", _FINDS], capture_output=True, text=True, check=True
            ).stdout
            assert found.strip() == f"[{runner.pid}]"
        finally:
            runner.kill()
