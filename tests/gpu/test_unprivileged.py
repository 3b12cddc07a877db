"""The helper and the processes of a lease as one ordinary user: nothing here needs root."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.gpu.verbs import Level
from tests.gpu.machine import GIB, PATIENCE_S, WORKER, Machine, Refused, machine_in, until

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")

#: What is imported and loaded before is not found any more afterwards: the test's user may read nothing here.
BECOME_NOBODY = f"""
import ctypes, os
for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
    ctypes.CDLL(name)
import encodings.ascii, encodings.idna, encodings.latin_1, jupyter_gpushare.gpu.helper
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as after an exec, /proc/PID is its own
"""


@pytest.fixture
def theirs() -> Iterator[Machine]:
    """A machine whose helper runs as an ordinary user."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-nobody-"))
    folder.chmod(0o755)
    os.chown(folder, NOBODY, NOBODY)
    try:
        for machine in machine_in(folder, spec="1xH100-80GB,host=512GiB,cgroup"):
            machine.offered = (Level.WHOLE_GPU, Level.PRELOAD, Level.HINTS)
            machine.keep_verdicts()
            for path in (machine.state_dir, *machine.state_dir.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            machine.start("--watchdog", "stop", before=BECOME_NOBODY, examine=True)
            yield machine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_limits_sleep_and_the_watchdog_work_without_root(theirs: Machine) -> None:
    made = theirs.ask("set_limit", lease="ada", uid=NOBODY, limits={theirs.uuids()[0]: 8 * GIB})
    assert Path(made["directory"], "account").stat().st_uid == NOBODY
    theirs.knows("ada", made["directory"])
    code = f"{BECOME_NOBODY}\nexec(compile(SOURCE, 'worker', 'exec'))"
    command = [sys.executable, "-c", code.replace("SOURCE", repr(WORKER.read_text()))]
    worker = theirs.worker("ada", command=command, mib=64)
    assert Path(f"/proc/{worker.pid}").stat().st_uid == NOBODY
    assert worker.do(f"alloc {9 * 1024}") == "2"
    moved = theirs.ask("suspend", lease="ada", calls=theirs.settled("ada"))
    assert moved["done"], moved
    assert theirs.ask("resume", lease="ada")["done"]
    assert worker.do("check") == "ok"
    evader = theirs.worker("ada", command=command, preload=False, wait=False)
    evader.tell(f"alloc {12 * 1024}")
    assert evader.process.wait(PATIENCE_S) == -15
    # Another user's file cannot be made, and is not pretended.
    with pytest.raises(Refused) as refused:
        theirs.ask("set_limit", lease="bo", uid=0, limits={theirs.uuids()[0]: GIB})
    assert refused.value.kind == "not_allowed"
    until(lambda: theirs.of("ada")["level"] == "preload", "its level")
