"""Suspending a process: its memory leaves the device, its calls wait, nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.native.conftest import Checkpoint, checkpoint_in
from tests.native.worker import Worker
from tests.simulator import GIB, Fault, Simulator
from tests.waiting import PATIENCE_S

OUT_OF_MEMORY, ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED = 2, 401, 600, 801
RUNNING, LOCKED, CHECKPOINTED = range(3)


def ledger_is_sound(machine: Simulator, devices: int = 2) -> None:
    """Recompute every sum of the ledger from its lines alone."""
    held: dict[tuple[int, int], int] = {}
    parked: dict[tuple[int, int], int] = {}
    for line in machine.ledger():
        key = (line.pid, line.device)
        match line.event:
            case "alloc" | "context":
                held[key] = held.get(key, 0) + line.bytes
            case "free" | "context_end":
                held[key] -= line.bytes
            case "checkpoint":
                if line.device >= 0:
                    parked[key] = held.pop(key)
                    assert parked[key] == line.bytes
            case "move":
                parked[key] = parked.pop((line.pid, line.from_device))
                held[key] = parked[key]
            case "restore":
                if line.device >= 0:
                    held[key] = parked.pop(key)
                    assert held[key] == line.bytes
            case "exit":
                held = {k: v for k, v in held.items() if k[0] != line.pid}
                parked = {k: v for k, v in parked.items() if k[0] != line.pid}
        assert all(value >= 0 for value in held.values())
        for device in range(devices):
            total = sum(value for (_, at), value in held.items() if at == device)
            assert total <= machine.device_total(device)
            if line.device == device:
                assert line.device_used == total


def test_a_suspended_process_leaves_the_device_and_comes_back_intact(
    machine: Simulator, driver: Checkpoint
) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('6GiB'); b.fill(seed=1); demo_gpu.train([b], 3, 0.001)")
        driver.suspend(kernel.pid)
        assert machine.device_used(0) == 0
        assert machine.host_memory() == (512 * GIB, 506 * GIB)
        assert machine.process_state(kernel.pid) == CHECKPOINTED
        kernel.start("demo_gpu.train([b], 1, 0.001) or b.steps == 4 and b.is_intact()")
        assert kernel.is_waiting()
        driver.resume(kernel.pid)
        assert kernel.answer() is True
        assert machine.device_used(0) == 6 * GIB
    ledger_is_sound(machine)


@pytest.mark.parametrize(
    "call",
    [
        "gpu.allocate(8)",
        "gpu.call('cuMemFree', b.address)",
        "b.checksum()",
        "b.start_step(0)",
        "b.fill()",
        "demo_gpu.open(1)",
    ],
)
def test_calls_that_touch_the_gpu_wait(machine: Simulator, driver: Checkpoint, call: str) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1GiB'); b.fill()")
        driver.suspend(kernel.pid)
        kernel.start(call)
        assert kernel.is_waiting(0.05)
        driver.resume(kernel.pid)
        kernel.answer()


def test_a_thread_without_a_context_is_refused_and_does_not_wait(
    machine: Simulator, driver: Checkpoint
) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("""
import threading
cuda = ctypes.CDLL("libcuda.so.1")
codes = []
def allocate():
    codes.append(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4096)))
gpu.allocate("1MiB")
thread = threading.Thread(target=allocate)
""")
        assert driver.lock(kernel.pid) == 0
        assert kernel.ask("[thread.start(), thread.join(5.0), codes][-1]") == [201]
        assert driver.unlock(kernel.pid) == 0


def test_lock_waits_for_running_work_and_gives_up_in_time(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill()")
        kernel.run("b.start_step(3)")  # submitted, no call waits for it
        assert driver.lock(kernel.pid, timeout_ms=50) == NOT_READY
        assert machine.process_state(kernel.pid) == RUNNING
        assert driver.lock(kernel.pid, timeout_ms=30000) == 0
        assert driver.unlock(kernel.pid) == 0
        kernel.run("gpu.call('cuCtxSynchronize')")
        assert kernel.ask("b.is_intact()")


def test_lock_does_not_wait_for_cpu_work(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        kernel.start("sys.stdin.readline() and None")
        assert driver.lock(kernel.pid, timeout_ms=1000) == 0
        assert driver.unlock(kernel.pid) == 0
        kernel.start("ignored")
        kernel.answer()


def test_a_call_in_progress_makes_lock_time_out(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB')")
        machine.fault(Fault.HANG_CALL, pid=kernel.pid, value=120_000)
        kernel.start("gpu.allocate(8)")  # of those that wait while the process is locked
        while driver.lock(kernel.pid, timeout_ms=20) == 0:  # until the call has been entered
            assert driver.unlock(kernel.pid) == 0
        machine.clear_faults()
        kernel.answer()
        assert driver.lock(kernel.pid) == 0


def test_the_order_of_calls_is_enforced(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        pid = kernel.pid
        assert driver.checkpoint(pid) == ILLEGAL_STATE
        assert driver.restore(pid) == ILLEGAL_STATE
        assert driver.unlock(pid) == ILLEGAL_STATE
        assert driver.lock(pid) == 0
        assert driver.lock(pid) == ILLEGAL_STATE
        assert driver.checkpoint(pid) == 0
        assert driver.unlock(pid) == ILLEGAL_STATE
        assert driver.restore(pid) == 0
        assert driver.unlock(pid) == 0
        assert driver.lock(1) == 1  # no CUDA there


def test_faults_leave_the_process_where_it_was(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        pid = kernel.pid
        kernel.run("b = gpu.allocate('2GiB'); b.fill()")
        machine.fault(Fault.LOCK_TIMEOUT, pid=pid, count=2)
        assert [driver.lock(pid), driver.lock(pid), driver.lock(pid)] == [NOT_READY, NOT_READY, 0]
        machine.fault(Fault.CHECKPOINT_FAILS_UNHARMED, pid=pid)
        assert driver.checkpoint(pid) == 999
        assert (machine.process_state(pid), machine.device_used(0)) == (LOCKED, 2 * GIB)
        assert driver.checkpoint(pid) == 0
        machine.fault(Fault.RESTORE_FAILS, pid=pid)
        assert driver.restore(pid) == 999
        assert machine.process_state(pid) == CHECKPOINTED
        assert driver.restore(pid) == 0
        machine.fault(Fault.UNLOCK_FAILS, pid=pid)
        assert driver.unlock(pid) == 999
        assert driver.unlock(pid) == 0
        assert kernel.ask("b.is_intact()")
    ledger_is_sound(machine)


def test_restore_can_move_to_another_device(machine: Simulator, driver: Checkpoint) -> None:
    first, second = machine.uuid(0), machine.uuid(1)
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('6GiB'); b.fill(); demo_gpu.train([b], 2, 0)")
        driver.suspend(kernel.pid)
        assert driver.restore(kernel.pid, ((first, second), (second, first))) == 0
        assert driver.unlock(kernel.pid) == 0
        assert (machine.device_used(0), machine.device_used(1)) == (0, 6 * GIB)
        assert kernel.ask("b.is_intact()")
        kernel.run("c = gpu.allocate('1GiB')")
        assert (machine.device_used(0), machine.device_used(1)) == (0, 7 * GIB)
    (moved,) = (each for each in machine.ledger() if each.event == "move")
    assert (moved.from_device, moved.device, moved.bytes) == (0, 1, 6 * GIB)
    ledger_is_sound(machine)


def test_copies_take_their_time_and_both_sides_are_charged_meanwhile(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,host=64GiB,context=0GiB,free-delay=0,copy=1GB/s")
    for driver in checkpoint_in(machine.env()):
        with Worker(machine.env()) as kernel:
            kernel.run("b = gpu.allocate('2GiB'); b.fill()")
            assert driver.lock(kernel.pid) == 0
            driver.worker.start(f"cuda.cuCheckpointProcessCheckpoint({kernel.pid}, None)")
            assert driver.worker.is_waiting(0.1)
            assert machine.device_used(0) == 2 * GIB
            assert machine.host_memory()[1] == 62 * GIB
            assert driver.worker.answer() == 0
            assert machine.device_used(0) == 0
            assert driver.restore(kernel.pid) == 0
            assert driver.unlock(kernel.pid) == 0
            assert kernel.ask("b.is_intact()")


@pytest.mark.parametrize("then", ["undone", "done"])
@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore"])
def test_the_death_of_the_suspending_process_loses_nothing(tmp_path: Path, step: str, then: str) -> None:
    spec = "1xH100-80GB,host=64GiB,context=0GiB,free-delay=0,copy=4GB/s"
    machine = Simulator(tmp_path, f"{spec},caller-dies={then}")
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('2GiB'); b.fill()")
        for doomed in checkpoint_in(machine.env()):
            if step == "lock":
                kernel.run("b.start_step(3)")
                doomed.worker.start(f"cuda.cuCheckpointProcessLock({kernel.pid}, None)")
            else:
                assert doomed.lock(kernel.pid) == 0
                if step == "restore":
                    assert doomed.checkpoint(kernel.pid) == 0
                name = f"cuCheckpointProcess{step.capitalize()}"
                doomed.worker.start(f"cuda.{name}({kernel.pid}, None)")
            assert doomed.worker.is_waiting(0.1)
            doomed.worker.process.send_signal(signal.SIGKILL)
            doomed.worker.process.wait(PATIENCE_S)
        for driver in checkpoint_in(machine.env()):
            before = {"lock": RUNNING, "checkpoint": LOCKED, "restore": CHECKPOINTED}[step]
            after = CHECKPOINTED if step == "checkpoint" else LOCKED
            # Asked about at once: the driver answers when nothing is half-way any more.
            assert driver.call("cuCheckpointProcessGetState", kernel.pid, "ctypes.byref(ctypes.c_int())") == 0
            assert machine.process_state(kernel.pid) == (before if then == "undone" else after)
            if machine.process_state(kernel.pid) == CHECKPOINTED:
                assert (machine.device_used(0), machine.host_memory()[1]) == (0, 62 * GIB)
                assert driver.restore(kernel.pid) == 0
            assert (machine.device_used(0), machine.host_memory()[1]) == (2 * GIB, 64 * GIB)
            if machine.process_state(kernel.pid) == LOCKED:
                assert driver.unlock(kernel.pid) == 0
            if step == "lock":
                kernel.run("gpu.call('cuCtxSynchronize')")
            assert kernel.ask("b.is_intact()")


@pytest.mark.parametrize(("then", "code"), [("hangs", None), ("999", 999), ("400", 400)])
@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_a_suspending_process_that_dies_may_leave_the_driver_out_of_step(
    tmp_path: Path, step: str, then: str, code: int | None
) -> None:
    """checkpoint-restore/criu pull request 2547 (2024-12); what the driver does then is not documented."""
    spec = "1xH100-80GB,host=64GiB,context=0GiB,free-delay=0,copy=4GB/s"
    machine = Simulator(tmp_path, f"{spec},caller-dies={then}")
    with Worker(machine.env()) as kernel, Worker(machine.env()) as other:
        kernel.run("b = gpu.allocate('2GiB')")
        for doomed in checkpoint_in(machine.env()):
            assert doomed.lock(kernel.pid) == 0
            if step == "restore":
                assert doomed.checkpoint(kernel.pid) == 0
            doomed.worker.start(f"cuda.cuCheckpointProcess{step.capitalize()}({kernel.pid}, None)")
            assert doomed.worker.is_waiting(0.1)
            doomed.worker.process.send_signal(signal.SIGKILL)
            doomed.worker.process.wait(PATIENCE_S)
        for driver in checkpoint_in(machine.env()):
            driver.suspend(other.pid)
            driver.resume(other.pid)  # no other process is concerned
            assert (machine.device_used(0), machine.host_memory()[1]) == (2 * GIB, 62 * GIB)
            if code is None:
                driver.worker.start(f"cuda.cuCheckpointProcessUnlock({kernel.pid}, None)")
                assert driver.worker.is_waiting(0.5)
            else:
                state = driver.call("cuCheckpointProcessGetState", kernel.pid, "ctypes.byref(ctypes.c_int())")
                assert [state, driver.unlock(kernel.pid), driver.restore(kernel.pid)] == [code] * 3
        kernel.start("gpu.allocate(8)")
        assert kernel.is_waiting()
    assert machine.device_used(0) == 0
    assert machine.host_memory()[1] == 64 * GIB


def test_a_killed_suspended_process_frees_host_memory(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('6GiB')")
        driver.suspend(kernel.pid)
        kernel.kill()
    assert machine.host_memory() == (512 * GIB, 512 * GIB)
