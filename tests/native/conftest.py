from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Simulator

if sys.platform != "linux":
    pytest.skip("the libraries are for Linux", allow_module_level=True)


@pytest.fixture
def machine(tmp_path: Path) -> Simulator:
    """Return a machine with two GPUs of 80 GiB and no context memory, so that sums are round."""
    return Simulator(tmp_path, "2xH100-80GB,host=512GiB,context=0GiB,free-delay=0")


@pytest.fixture
def half(machine: Simulator) -> Lease:
    """Return a lease of half of the first GPU."""
    return Lease(machine.folder / "lease", [(machine.uuid(0), 40 * GIB)])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint calls of the device helper, made from a separate process."""

    worker: Worker

    def call(self, name: str, pid: int, argument: str = "None") -> int:
        """Call a checkpoint function; return the driver's code."""
        return int(self.worker.ask(f"cuda.{name}({pid}, {argument})"))

    def lock(self, pid: int, timeout_ms: int = 5000) -> int:
        return self.call("cuCheckpointProcessLock", pid, f"(ctypes.c_uint * 16)({timeout_ms})")

    def checkpoint(self, pid: int) -> int:
        return self.call("cuCheckpointProcessCheckpoint", pid)

    def restore(self, pid: int, pairs: tuple[tuple[str, str], ...] = ()) -> int:
        return int(self.worker.ask(f"restore({pid}, {list(pairs)!r})"))

    def unlock(self, pid: int) -> int:
        return self.call("cuCheckpointProcessUnlock", pid)

    def suspend(self, pid: int) -> None:
        assert self.lock(pid) == 0
        assert self.checkpoint(pid) == 0

    def resume(self, pid: int) -> None:
        assert self.restore(pid) == 0
        assert self.unlock(pid) == 0


_HELPER = """
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
class Restore(ctypes.Structure):
    _fields_ = [("pairs", ctypes.c_void_p), ("count", ctypes.c_uint), ("zero", ctypes.c_char * 52)]
def raw(uuid):
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
def restore(pid, pairs):
    table = ctypes.create_string_buffer(b"".join(raw(old) + raw(new) for old, new in pairs) + b"\\0")
    return cuda.cuCheckpointProcessRestore(pid, ctypes.byref(Restore(ctypes.addressof(table), len(pairs))))
"""


def checkpoint_in(env: dict[str, str]) -> Iterator[Checkpoint]:
    """Yield a process that moves others, until the test ends."""
    with Worker(env, open_gpu=False) as worker:
        worker.run(_HELPER)
        yield Checkpoint(worker)


@pytest.fixture
def driver(machine: Simulator) -> Iterator[Checkpoint]:
    """Yield a process that suspends and resumes processes on `machine`."""
    yield from checkpoint_in(machine.env())


def shared_library(path: Path) -> ctypes.CDLL:
    """Load a library into this process without exporting its symbols."""
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
