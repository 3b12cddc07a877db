"""The helper and the processes of a lease as one ordinary user: nothing here needs root."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.protocol.helper import Level
from tests.gpu.machine import GIB, PATIENCE_S, WORKER, Machine, Refused, Worker, machine_in, until

USER_ID = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other tests run without it")

#: What is imported and loaded before is not found any more afterwards: the test's user may read nothing here.
BECOME_ORDINARY = f"""
import ctypes, os
for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
    ctypes.CDLL(name)
import encodings.ascii, encodings.idna, encodings.latin_1, jupyter_gpushare.gpu.service.helper
os.setgroups([]); os.setresgid({USER_ID}, {USER_ID}, {USER_ID}); os.setresuid({USER_ID}, {USER_ID}, {USER_ID})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as after an exec, /proc/PID is its own
"""


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with a helper that runs as an ordinary user; the test says which users may checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-nobody-"))
    folder.chmod(0o755)
    os.chown(folder, USER_ID, USER_ID)
    try:
        for machine in machine_in(folder, spec=f"1xH100-80GB,host=512GiB,cgroup,checkpoint={request.param}"):
            machine.offered = (Level.WHOLE_GPU, Level.PRELOAD, Level.HINTS)
            machine.keep_verdicts()
            for path in (machine.state_dir, *machine.state_dir.rglob("*")):
                os.chown(path, USER_ID, USER_ID)
            machine.start("--watchdog", "stop", before=BECOME_ORDINARY, examine=True)
            yield machine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command() -> list[str]:
    """A worker that becomes the ordinary user."""
    code = f"{BECOME_ORDINARY}\nexec(compile(SOURCE, 'worker', 'exec'))"
    return [sys.executable, "-c", code.replace("SOURCE", repr(WORKER.read_text()))]


def start_worker(theirs: Machine) -> Worker:
    """A process of the lease ``ada``, of the same ordinary user."""
    made = theirs.ask("set_limit", lease="ada", uid=USER_ID, limits={theirs.uuids()[0]: 8 * GIB})
    assert Path(made["directory"], "account").stat().st_uid == USER_ID
    theirs.knows("ada", made["directory"])
    worker = theirs.worker("ada", command=command(), mib=64)
    assert Path(f"/proc/{worker.pid}").stat().st_uid == USER_ID
    return worker


@pytest.mark.parametrize("theirs", ["any-uid"], indirect=True)
def test_limits_sleep_and_the_watchdog_work_without_root(theirs: Machine) -> None:
    worker = start_worker(theirs)
    assert "checkpoint=any-uid" in theirs.log.read_text()  # what the simulated driver allows
    assert worker.do(f"alloc {9 * 1024}") == "2"
    moved = theirs.ask("suspend", lease="ada", calls=theirs.settled("ada"))
    assert moved["done"], moved
    theirs.resume("ada", worker)
    evader = theirs.worker("ada", command=command(), preload=False, wait=False)
    evader.tell(f"alloc {12 * 1024}")
    assert evader.process.wait(PATIENCE_S) == -15
    # Another user's file cannot be created, and the helper says so.
    with pytest.raises(Refused) as refused:
        theirs.ask("set_limit", lease="bo", uid=0, limits={theirs.uuids()[0]: GIB})
    assert refused.value.kind == "not_allowed"
    until(lambda: theirs.of("ada")["level"] == "preload", "its level")


@pytest.mark.parametrize("theirs", ["root"], indirect=True)
def test_where_the_driver_wants_root_a_lock_is_refused_with_that_reason(theirs: Machine) -> None:
    """Error 304: NVIDIA/cuda-checkpoint issues 6, 25 and 41."""
    worker = start_worker(theirs)
    moved = theirs.ask("suspend", lease="ada")
    assert (moved["done"], moved["refused"]) == (False, "not_suspendable")
    assert "304" in moved["reason"]
    assert "the helper needs root" in moved["reason"]
    assert theirs.of("ada")["phase"] == "running"
    assert worker.do("check") == "ok"
    assert worker.do("alloc 64") == "0"
