"""Processes of one lease share one account: races, ends, forks and execs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.native.calls import in_lease
from tests.native.programs import run
from tests.native.test_sanitizers import UUID, compile_preload_into
from tests.simulator import GIB, MIB, Lease, Phase, Simulator

RACE = """
import random, threading
def race(seed, seconds):
    # Ends after so many refusals or so long: what counts is that all of them push at once.
    rng, held, refused, until = random.Random(seed), [], 0, time.monotonic() + seconds
    while refused < 200 and time.monotonic() < until:
        if held and rng.random() < 0.3:
            assert free(held.pop(rng.randrange(len(held)))) == 0
        n = rng.choice([4096, 1 << 20, 3 << 20, 2 << 30, 5 << 30])
        code, at = alloc(n) if rng.random() < 0.7 else alloc_async(n)
        if code == 0:
            held.append(at)
        else:
            assert code == 2
            refused += 1
    return refused
"""


def test_racing_processes_never_pass_the_limit_together(machine: Simulator, half: Lease) -> None:
    kernels = [in_lease(machine, half) for _ in range(6)]
    try:
        for seed, kernel in enumerate(kernels):
            kernel.run(RACE)
            kernel.start(f"race({seed}, 2)")
        assert sum(kernel.answer(30) for kernel in kernels) > 0
        assert sum(slot.used_bytes[0] for slot in half.slots().values()) == machine.device_used(0)
        # Fill what is left: the peak is exactly the limit.
        while kernels[0].ask("alloc(2 << 20)[0]") == 0 and machine.device_used(0) < 40 * GIB - 512 * MIB:
            kernels[0].run("[alloc(256 << 20) for _ in range(8)]")
        while kernels[0].ask("[alloc(2 << 20)[0] for _ in range(256)][-1]") == 0:
            pass
        assert machine.device_used(0) == machine.device_peak(0) == 40 * GIB
    finally:
        for kernel in kernels:
            kernel.kill()


def test_threads_of_one_process_keep_the_account_straight(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("""
def churn(seed):
    import random
    rng, held = random.Random(seed), []
    cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))
    for _ in range(400):
        code, at = alloc(rng.choice([100, 1 << 20, 5 << 20, 1 << 30]))
        if code == 0: held.append(at)
        if held and rng.random() < 0.6: assert free(held.pop()) == 0
    for at in held: assert free(at) == 0
threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
for t in threads: t.start()
for t in threads: t.join()
""")
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 0


def test_a_killed_holder_is_swept(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        with in_lease(machine, half) as doomed:
            doomed.run("alloc(30 << 30)")
            assert kernel.ask("alloc(20 << 30)[0]") == 2
        assert kernel.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
        assert kernel.ask("alloc(40 << 30)[0]") == 0
        assert set(half.slots()) == {kernel.pid}


def test_a_holder_killed_inside_the_account_blocks_no_process(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        for seed in range(5):
            with in_lease(machine, half) as doomed:
                doomed.run(RACE)
                doomed.start(f"race({seed}, 30)")
                kernel.run(RACE)
                kernel.run(f"race({seed + 100}, 0.05)")
        kernel.run("cuda.cuDevicePrimaryCtxReset_v2(0); gpu = demo_gpu.open()")
        assert kernel.ask("gpu.memory()") == [40 * GIB, 40 * GIB]


def test_a_forked_child_has_its_own_slot(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("""
alloc(10 << 30)
def in_child(work):
    pid = os.fork()
    if not pid:
        try: os._exit(work())
        finally: os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
        # The driver refuses a child of a process that uses CUDA; its account must not mind.
        assert kernel.ask("in_child(lambda: alloc(1 << 30)[0])") == 3
        assert kernel.ask("in_child(lambda: sys.exit(0))") in (0, 99)
        assert half.slots()[kernel.pid].used_bytes[0] == 10 * GIB
        assert kernel.ask("gpu.memory()") == [30 * GIB, 40 * GIB]
        with in_lease(machine, half, open_gpu=False) as parent:
            parent.run("""
def child():
    gpu = demo_gpu.open()
    code = alloc(30 << 30)[0] or (alloc(1 << 30)[0] != 2)
    return int(code)
pid = os.fork()
if not pid:
    os._exit(child())
""")
            assert parent.ask("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
        assert kernel.ask("alloc(30 << 30)[0]") == 0


def test_a_child_s_memory_is_its_own_and_swept_with_it(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half, open_gpu=False) as parent:
        assert parent.ask("cuda.cuCtxSynchronize()") == 3  # counted: the parent has a slot, but no driver
        parent.run("""
ready = os.pipe()
child = os.fork()
if not child:
    demo_gpu.open().allocate("30GiB")
    os.write(ready[1], b"!")
    time.sleep(60)
    os._exit(0)
os.read(ready[0], 1)
""")
        child = parent.ask("child")
        assert half.slots()[child].used_bytes[0] == 30 * GIB
        assert half.slots()[child].calls > 0
        assert half.slots()[parent.pid].used_bytes[0] == 0
        parent.run("os.kill(child, 9); os.waitpid(child, 0); gpu = demo_gpu.open()")
        assert parent.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
        assert set(half.slots()) == {parent.pid}


def test_after_exec_the_old_memory_is_not_charged(machine: Simulator, half: Lease) -> None:
    program = f"""
import ctypes, os, sys
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
gpu.allocate("30GiB")
if len(sys.argv) < 2:
    os.execv(sys.executable, [sys.executable, {str(machine.folder / "program")!r}, "again"])
print(os.getpid(), *gpu.memory())
"""
    (machine.folder / "program").write_text(program)
    done = run(sys.executable, "-c", program, env=machine.env(**half.env()))
    assert done.returncode == 0, done.stderr
    pid, free, total = map(int, done.stdout.split())
    assert (free, total) == (10 * GIB, 40 * GIB)
    assert list(half.slots()) == [pid]


def test_a_thread_in_its_first_call_while_the_files_are_replaced_counts_in_the_new_ones(
    tmp_path: Path,
) -> None:
    proc, pipe = tmp_path / "proc", tmp_path / "pipe"
    proc.mkdir()
    program = compile_preload_into(tmp_path / "replaced", "replaced.c", [f'-DPROC_FOLDER="{proc}"'])
    lease = Lease(tmp_path / "lease", [(UUID, GIB)])
    limit, account = lease.folder / "limit", lease.folder / "account"
    for file in (limit, account):
        shutil.copy(file, f"{file}.new")
    lease.write(Phase.SUSPENDED)
    env = {"GPUSHARE_LEASE": "test", "GPUSHARE_LEASE_DIR": str(lease.folder), "GPUSHARE_MEMORY_LIMIT": "1"}
    done = run(program, limit, account, pipe, env=env)
    assert (done.returncode, done.stderr) == (0, "")
