"""A call that waits while its lease is suspended is counted, and nothing else is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jupyter_gpushare.native import build
from tests.native.calls import in_lease
from tests.native.conftest import Checkpoint
from tests.native.programs import compiled, run
from tests.simulator import GIB, Lease, Phase, Simulator
from tests.waiting import until


def suspend(driver: Checkpoint, lease: Lease, pid: int, phase: Phase = Phase.SUSPENDED) -> None:
    """As the helper does it."""
    lease.write(phase)
    driver.suspend(pid)


def resume(driver: Checkpoint, lease: Lease, pid: int) -> None:
    driver.resume(pid)
    lease.write(Phase.RUNNING)


def calls(lease: Lease, pid: int) -> int:
    """How many calls a process has entered."""
    return lease.slots()[pid].calls


@pytest.mark.parametrize(
    "call",
    [
        "gpu.call('cuCtxSynchronize')",
        "b.start_step(0)",
        "b.fill()",
        "gpu.call('cuMemFree', b.address)",
        "gpu.allocate(8)",
        "cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(8), u64(b.address), size(8))",
        "cuda.cuMemsetD8_v2(u64(b.address), 0, size(8))",
        "cuda.cuStreamSynchronize(None)",
        "demo_gpu.open()",
        "reserve(2 << 20)",
        "create(2 << 20)",
    ],
)
def test_a_call_is_counted_at_its_entry_while_it_waits(
    machine: Simulator, half: Lease, driver: Checkpoint, call: str
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1GiB'); b.fill()")
        decided = calls(half, kernel.pid)
        suspend(driver, half, kernel.pid)
        assert calls(half, kernel.pid) == decided
        kernel.start(call)
        until(lambda: calls(half, kernel.pid) > decided)
        assert kernel.is_waiting(0.02)
        resume(driver, half, kernel.pid)
        kernel.answer()


#: Those that the driver lets through: they end a process whose state is in host memory.
POLLS = [
    "gpu.call('cuCtxSynchronize')",
    "cuda.cuStreamSynchronize(None)",
    "cuda.cuStreamQuery(None)",
    "cuda.cuEventSynchronize(event)",
    "cuda.cuEventQuery(event)",
    "cuda.cuEventElapsedTime_v2(ctypes.byref(ctypes.c_float()), event, event)",
]


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.SUSPENDED])
@pytest.mark.parametrize("call", POLLS)
def test_a_call_that_the_driver_lets_through_waits_in_the_library(
    machine: Simulator, half: Lease, driver: Checkpoint, call: str, phase: Phase
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("event = ctypes.c_void_p(made('cuEventCreate', 0)[1]); cuda.cuEventRecord(event, None)")
        kernel.run(call)
        before = half.slots()[kernel.pid]
        suspend(driver, half, kernel.pid, phase)
        kernel.start(call)
        until(lambda: half.slots()[kernel.pid] != before)
        # It counts again while it waits, in the same counter.
        seen = half.slots()[kernel.pid]
        until(lambda: half.slots()[kernel.pid] != seen)
        assert kernel.is_waiting(0.02)
        after = half.slots()[kernel.pid]
        is_query = "Query" in call or "Elapsed" in call
        assert (after.queries > before.queries, after.calls > before.calls) == (is_query, not is_query)
        resume(driver, half, kernel.pid)
        kernel.answer()


@pytest.mark.parametrize("call", POLLS)
def test_a_restore_beside_a_session_holds_only_its_allocations(
    machine: Simulator, half: Lease, call: str
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("event = ctypes.c_void_p(made('cuEventCreate', 0)[1]); cuda.cuEventRecord(event, None)")
        kernel.run("b = gpu.allocate('1GiB')")
        half.write(Phase.PAUSED)
        kernel.run(call)
        kernel.run("b.fill(); demo_gpu.train([b], 1, 0)")
        kernel.start("alloc(8)[0]")
        assert kernel.is_waiting(0.05)
        half.write(Phase.RUNNING)
        assert kernel.answer() == 0


def test_a_call_waits_for_files_that_were_created_again(machine: Simulator, half: Lease) -> None:
    """The helper does so where they were removed; the page that is mapped would say SUSPENDED for ever."""
    with in_lease(machine, half) as kernel:
        kernel.run("gpu.call('cuCtxSynchronize')")
        half.write(Phase.SUSPENDED)
        kernel.start("gpu.call('cuCtxSynchronize')")
        assert kernel.is_waiting(0.02)
        for file in ("limit", "account"):
            (half.folder / file).unlink()
        assert kernel.is_waiting(0.1)
        again = Lease(half.folder, [(machine.uuid(0), 40 * GIB)])
        kernel.answer()
        assert calls(again, kernel.pid) > 0


@pytest.mark.parametrize(
    "query",
    [
        "cuda.cuStreamQuery(None)",
        "cuda.cuEventQuery(None)",
        "cuda.cuStreamIsCapturing(None, ctypes.byref(ctypes.c_int()))",
        "cuda.cuPointerGetAttribute(ctypes.byref(u64()), 2, u64(1))",
        "cuda.cuMemGetAddressRange_v2(None, None, u64(1))",
        "cuda.cuCtxGetFlags(ctypes.byref(ctypes.c_uint()))",
        "cuda.cuCtxGetStreamPriorityRange(None, None)",
        "cuda.cuEventElapsedTime_v2(None, None, None)",
        "cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(ctypes.c_int()))",
        "cuda.cuMemPoolGetAttribute(None, 4, None)",
    ],
)
def test_queries_have_a_counter_of_their_own(machine: Simulator, half: Lease, query: str) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("cuda.cuCtxSynchronize()")
        before = half.slots()[kernel.pid]
        kernel.run(query)
        after = half.slots()[kernel.pid]
        assert (after.work, after.calls, after.queries) == (before.work, before.calls, before.queries + 1)


@pytest.mark.parametrize(
    ("call", "is_work"),
    [
        ("b.fill()", True),
        ("cuda.cuMemsetD8_v2(u64(b.address), 0, size(8))", True),
        ("gpu.allocate(8)", True),
        ("gpu.call('cuCtxSynchronize')", True),
        ("create(2 << 20)", True),
        ("gpu.call('cuMemFree', b.address)", False),
        ("reserve(2 << 20)", False),
        ("cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))", False),
        ("made('cuEventCreate', 0)", False),
        ("cuda.cuModuleUnload(None)", False),
    ],
)
def test_only_launches_copies_allocations_and_synchronisation_are_work(
    machine: Simulator, half: Lease, call: str, is_work: bool
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1GiB')")
        before = half.slots()[kernel.pid]
        kernel.run(call)
        after = half.slots()[kernel.pid]
        assert after.calls > before.calls
        assert (after.work > before.work) is is_work


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUSPENDED])
def test_a_suspended_session_reads_its_free_memory_without_waiting(
    machine: Simulator, half: Lease, driver: Checkpoint, phase: Phase
) -> None:
    """Also where the driver has locked it before it read that it is to be suspended."""
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1GiB')")
        half.write(phase)
        driver.suspend(kernel.pid)
        before = half.slots()[kernel.pid]
        kernel.run("free, total = size(), size()")
        assert kernel.ask("cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))") == 0
        assert kernel.ask("[free.value, total.value]") == [39 * GIB, 40 * GIB]
        assert half.slots()[kernel.pid] == before


def test_what_does_not_touch_the_gpu_is_not_counted(
    machine: Simulator, half: Lease, driver: Checkpoint
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1GiB')")
        before = half.slots()[kernel.pid]
        driver.suspend(kernel.pid)
        kernel.run("time.sleep(0.05); sum(i * i for i in range(100000))")
        kernel.start("sys.stdin.readline() and None")  # input()
        kernel.start("an answer")
        kernel.answer()
        kernel.run("import subprocess; subprocess.run(['/bin/true'], check=True)")
        kernel.run("demo_gpu.device_count(); cuda.cuDriverGetVersion(ctypes.byref(ctypes.c_int()))")
        assert half.slots() == {kernel.pid: before}


def test_a_background_thread_that_touches_the_gpu_is_seen(
    machine: Simulator, half: Lease, driver: Checkpoint
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1GiB'); b.fill(); go = threading.Event(); seen = []")
        kernel.run("t = threading.Thread(target=lambda: (go.wait(), seen.append(b.is_intact()))); t.start()")
        driver.suspend(kernel.pid)
        decided = calls(half, kernel.pid)
        kernel.run("go.set()")
        until(lambda: calls(half, kernel.pid) > decided)
        driver.resume(kernel.pid)
        kernel.run("t.join()")
        assert kernel.ask("seen") == [True]


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.SUSPENDED, Phase.PAUSED])
def test_a_new_process_of_a_sleeping_lease_waits_and_is_seen(
    machine: Simulator, half: Lease, phase: Phase
) -> None:
    half.write(phase)
    with in_lease(machine, half, open_gpu=False) as terminal:
        terminal.start("gpu = demo_gpu.open()")
        until(lambda: terminal.pid in half.slots() and calls(half, terminal.pid) > 0)
        assert terminal.is_waiting(0.05)
        assert not [e for e in machine.ledger() if e.event == "context"]
        # A reader that compares the counters only now also sees that a call waits.
        seen = calls(half, terminal.pid)
        until(lambda: calls(half, terminal.pid) > seen)
        half.write(Phase.RUNNING)
        terminal.answer()
        assert terminal.ask("gpu.memory()") == [40 * GIB, 40 * GIB]


@pytest.mark.parametrize(
    "call", ["alloc(8)[0]", "alloc_async(8)[0]", "create(2 << 20)[0]", "made('cuCtxCreate_v2', 0, 0)[0]"]
)
def test_allocations_of_a_process_outside_the_lock_wait_too(
    machine: Simulator, half: Lease, call: str
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("alloc(8)")
        half.write(Phase.SUSPENDED)
        used = machine.device_used(0)
        kernel.start(call)
        assert kernel.is_waiting(0.05)
        assert machine.device_used(0) == used
        half.write(Phase.RUNNING)
        assert kernel.answer() == 0


def test_what_waits_for_a_lease_that_ends_is_denied(machine: Simulator, half: Lease) -> None:
    half.write(Phase.SUSPENDED)
    with in_lease(machine, half, open_gpu=False) as kernel:
        kernel.run("cuda.cuInit(0)")
        kernel.start("made('cuDevicePrimaryCtxRetain', 0)[0]")
        assert kernel.is_waiting(0.03)
        half.write(Phase.REVOKED)
        assert kernel.answer() == 2


def test_a_child_process_counts_for_itself(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("gpu.call('cuCtxSynchronize')")
        before = calls(half, kernel.pid)
        child = "import os; from jupyter_gpushare import demo_gpu; demo_gpu.open(); print(os.getpid())"
        kernel.run("import subprocess")
        done = kernel.ask(f"subprocess.check_output([sys.executable, '-c', {child!r}], text=True)")
        slots = half.slots()
        assert slots[int(done)].calls > 0
        assert slots[kernel.pid].calls == before


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled race."""
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{build.NATIVE}"]
    return compiled(tmp_path_factory.mktemp("race") / "race", *flags, Path(__file__).parent / "race.c")


def run_race(
    program: Path, machine: Simulator, lease: Lease, env: dict[str, str], rounds: int, patience_ms: int
) -> tuple[int, str]:
    """(exit code, output) of the observer."""
    shared = machine.folder / "shared"
    shared.write_bytes(bytes(64))
    numbers = [str(rounds), str(patience_ms)]
    with subprocess.Popen([str(program), "victim", str(shared)], env=env) as victim:
        try:
            words = [shared, lease.folder / "account", str(victim.pid), *numbers]
            observer = run(program, "observer", *words, env=machine.env())
        finally:
            victim.kill()
    return observer.returncode, observer.stdout


def test_no_wake_up_is_lost_while_the_lock_is_taken(machine: Simulator, half: Lease, race: Path) -> None:
    code, output = run_race(race, machine, half, machine.env(**half.env()), 10_000, 20_000)
    assert code == 0, output
    # Both orders happened: calls that were caught by the lock, and calls that were before it.
    assert 0 < int(output) < 10_000


def test_the_race_notices_a_lost_wake_up(machine: Simulator, half: Lease, race: Path) -> None:
    """The same without the library: nothing is counted, so the first caught call is lost."""
    code, output = run_race(race, machine, half, machine.env(), 1, 300)
    assert (code, output) == (1, "round 1: the wake-up was lost\n")


def test_a_cell_runs_again_soon_after_its_lease_woke(
    machine: Simulator, half: Lease, driver: Checkpoint
) -> None:
    """Fifty naps in a row, the cell always wanting the GPU: data intact every time."""
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('2GiB'); b.fill(seed=7)")
        for _ in range(50):
            suspend(driver, half, kernel.pid)
            assert machine.device_used(0) == 0
            kernel.start("demo_gpu.train([b], 1, 0)")
            resume(driver, half, kernel.pid)
            kernel.answer()
        assert kernel.ask("(b.steps, b.is_intact())") == [50, True]
