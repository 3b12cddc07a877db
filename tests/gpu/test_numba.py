"""A framework as people install it, in a lease: numba, which asks the driver for memory by itself."""

from __future__ import annotations

import sys

from tests.gpu.machine import GIB, Machine, Worker

#: Answers each line with what it evaluates to; cells of a notebook, so to speak.
NUMBA = """
import sys
import numpy
from numba import cuda
memory = cuda.current_context().get_memory_info
kept = []
def keep(array):
    kept.append(array)
    return len(kept)
def refused(size):
    try:
        cuda.device_array(size, dtype=numpy.uint8)
    except Exception as error:
        return str(error)
print("ready 0", flush=True)
for line in sys.stdin:
    print("did", eval(line), flush=True)
"""


def kernel(machine: Machine, lease: str) -> Worker:
    return machine.worker(lease, command=[sys.executable, "-c", NUMBA])


def test_numba_sees_the_fraction_and_is_refused_more(machine: Machine) -> None:
    machine.lease("ada", 2 * GIB)
    worker = kernel(machine, "ada")
    assert worker.do("memory().total") == str(2 * GIB)
    assert worker.do("keep(cuda.device_array(1 << 30, dtype=numpy.uint8))") == "1"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in worker.do("refused(2 << 30)")
    assert worker.do("refused(1 << 20)") == "None"


def test_arrays_of_numba_outlive_a_suspension(machine: Machine) -> None:
    machine.lease("ada", 2 * GIB)
    worker = kernel(machine, "ada")
    assert worker.do("keep(cuda.to_device(numpy.arange(1_000_000)))") == "1"
    held = machine.sim.device_used(0)
    watch = machine.watch()
    assert machine.ask("suspend", lease="ada", calls=machine.settled("ada"))["done"]
    assert machine.sim.device_used(0) < held
    worker.tell("kept[0].copy_to_host().sum()")
    assert watch.event("wanted", "ada")
    assert machine.ask("resume", lease="ada")["done"]
    assert worker.answer() == f"did {sum(range(1_000_000))}"
