"""A process that uses CUDA has the new limit of its lease without a restart, on the simulated driver."""

from __future__ import annotations

from tests.gpu.machine import GIB, Machine

OUT_OF_MEMORY = "2"  # CUDA_ERROR_OUT_OF_MEMORY


def test_a_running_process_allocates_more_after_its_lease_grew(machine: Machine) -> None:
    worker = machine.session("ada", 4 * GIB, mib=2048)
    assert worker.do("alloc 4096") == OUT_OF_MEMORY
    machine.lease("ada", 16 * GIB)
    assert worker.do("alloc 4096") == "0"
    assert worker.do("check") == "ok"


def test_a_running_process_is_held_to_the_smaller_limit_and_keeps_what_it_has(machine: Machine) -> None:
    worker = machine.session("ada", 16 * GIB, mib=2048)
    machine.lease("ada", 4 * GIB)
    assert worker.do("alloc 4096") == OUT_OF_MEMORY
    assert worker.do("alloc 1024") == "0"
    assert worker.do("check") == "ok"
