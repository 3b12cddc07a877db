"""The preload library keeps all processes of a lease together within its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.worker import Worker, WorkerError
from tests.simulator import ACCOUNT_BYTES, GIB, MIB, PAGE_BYTES, Lease, Phase, Simulator

#: Raw driver calls for `Worker.run`: each answers the driver's code, or (code, handle).
CALLS = """
cuda = ctypes.CDLL("libcuda.so.1")
u64, size = ctypes.c_uint64, ctypes.c_size_t
class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                ("id", ctypes.c_int), ("none", ctypes.c_void_p), ("flags", ctypes.c_uint64)]
class Access(ctypes.Structure):
    _fields_ = [("where", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]
class Array(ctypes.Structure):
    _fields_ = [("width", size), ("height", size), ("format", ctypes.c_int), ("channels", ctypes.c_uint)]
def made(name, *arguments):
    out = u64()
    return [getattr(cuda, name)(ctypes.byref(out), *arguments), out.value]
def alloc(n): return made("cuMemAlloc_v2", size(n))
def pitch(width, height):
    return made("cuMemAllocPitch_v2", ctypes.byref(size()), size(width), size(height), ctypes.c_uint(4))
def managed(n): return made("cuMemAllocManaged", size(n), ctypes.c_uint(1))
def alloc_async(n, suffix=""): return made("cuMemAllocAsync" + suffix, size(n), None)
def pool(device=0):
    out = ctypes.c_void_p()
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(out), device) == 0
    return out
def alloc_pool(n, suffix=""): return made("cuMemAllocFromPoolAsync" + suffix, size(n), pool(), None)
def create(n, device=0): return made("cuMemCreate", size(n), ctypes.byref(Prop(1, 0, 1, device)), u64(0))
def reserve(n): return made("cuMemAddressReserve", size(n), size(0), u64(0), u64(0))
def map(at, n, handle): return cuda.cuMemMap(u64(at), size(n), size(0), u64(handle), u64(0))
def mapped(n=2 << 20, device=0):
    at = reserve(n)[1]
    assert map(at, n, create(n, device)[1]) == 0
    return at
def unmap(at, n): return cuda.cuMemUnmap(u64(at), size(n))
def release(handle): return cuda.cuMemRelease(u64(handle))
def retain(at): return made("cuMemRetainAllocationHandle", ctypes.c_void_p(at))
def free(at): return cuda.cuMemFree_v2(u64(at))
def free_async(at, suffix=""): return getattr(cuda, "cuMemFreeAsync" + suffix)(u64(at), None)
def array(width, height): return made("cuArrayCreate_v2", ctypes.byref(Array(width, height, 32, 4)))
def free_array(at): return cuda.cuArrayDestroy(ctypes.c_void_p(at))
"""


def in_lease(machine: Simulator, lease: Lease, *, open_gpu: bool = True, **more: str) -> Worker:
    """A process of the lease, with the calls above."""
    worker = Worker(machine.env(**lease.env(), **more), open_gpu=open_gpu)
    worker.run(CALLS)
    return worker


def test_only_the_share_is_seen(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('10GiB')")
        assert kernel.ask("gpu.memory()") == [30 * GIB, 40 * GIB]
        assert kernel.ask("made('cuDeviceTotalMem_v2', 0)") == [0, 40 * GIB]
        kernel.run("import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)")
        for version in ("", ", n.nvmlMemory_v2"):
            kernel.run(f"m = n.nvmlDeviceGetMemoryInfo(h{version})")
            assert kernel.ask("[m.total, m.used, m.free]") == [40 * GIB, 10 * GIB, 30 * GIB]
        # Another device is shown as it is, but nothing of it can be had.
        kernel.run("m = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(1))")
        assert kernel.ask("m.total") == 80 * GIB
        with pytest.raises(WorkerError, match="Out of GPU memory"):
            kernel.run("demo_gpu.open(1).allocate('1MiB')")


def test_free_is_never_more_than_the_driver_has(machine: Simulator, half: Lease) -> None:
    with Worker(machine.env()) as neighbour, in_lease(machine, half) as kernel:
        neighbour.run("b = gpu.allocate('70GiB')")
        assert kernel.ask("gpu.memory()") == [10 * GIB, 40 * GIB]


def test_contexts_are_charged_as_the_helper_says(machine: Simulator, half: Lease) -> None:
    half.context_bytes = 2 * GIB
    half.write(Phase.RUNNING)
    with in_lease(machine, half) as kernel:
        assert kernel.ask("gpu.memory()") == [38 * GIB, 40 * GIB]
        assert kernel.ask("alloc(38 << 30)[0]") == 0
        assert kernel.ask("alloc(1)[0]") == 2


def test_two_kernels_share_one_limit(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as one, in_lease(machine, half) as two:
        one.run("b = gpu.allocate('30GiB')")
        with pytest.raises(
            WorkerError, match=r"asked for 20.0 GiB, 10.0 GiB of 40.0 GiB are free in your share of this GPU"
        ):
            two.run("gpu.allocate('20GiB')")
        two.run("b = gpu.allocate('10GiB')")
        assert machine.device_peak(0) == 40 * GIB
        assert half.denied() == 1
        one.run("b.free()")
        two.run("c = gpu.allocate('30GiB')")
    assert machine.device_peak(0) == 40 * GIB


@pytest.mark.parametrize(
    ("take", "give"),
    [
        ("alloc(4 << 30)", "free({0})"),
        ("alloc_async(4 << 30)", "free_async({0})"),
        ("alloc_async(4 << 30, '_ptsz')", "free_async({0}, '_ptsz')"),
        ("alloc_pool(4 << 30)", "free({0})"),
        ("alloc_pool(4 << 30, '_ptsz')", "free_async({0})"),
        ("pitch(1 << 20, 1 << 12)", "free({0})"),
        ("managed(4 << 30)", "free({0})"),
        ("create(4 << 30)", "release({0})"),
        ("array(1 << 14, 1 << 14)", "free_array({0})"),
    ],
)
def test_every_way_to_allocate_is_limited_and_given_back(
    machine: Simulator, half: Lease, take: str, give: str
) -> None:
    with in_lease(machine, half) as kernel:
        answers = [kernel.ask(take) for _ in range(10)]
        assert [code for code, _ in answers] == [0] * 10
        assert machine.device_used(0) == 40 * GIB
        assert kernel.ask(take)[0] == 2
        for _, handle in answers:
            assert kernel.ask(give.format(handle)) == 0
        assert machine.device_used(0) == 0
        assert set(half.slots()[kernel.pid].used_bytes) == {0}
        assert kernel.ask("alloc(40 << 30)[0]") == 0


def test_physical_memory_is_charged_until_released_and_unmapped(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("n = 20 << 30; at = reserve(2 * n)[1]; first, second = create(n)[1], create(n)[1]")
        assert (
            kernel.ask("[map(at, n, first), map(at + n, n, second), release(first), release(second)]")
            == [0] * 4
        )
        assert kernel.ask("create(2 << 20)[0]") == 2
        assert kernel.ask("unmap(at, n)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 20 * GIB
        assert kernel.ask("create(n)[0]") == 0
        kernel.run("code, again = retain(at + n)")
        assert kernel.ask("[code, unmap(at + n, n)]") == [0, 0]
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 40 * GIB
        assert kernel.ask("release(again)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 20 * GIB


def test_what_the_driver_refuses_is_given_back(machine: Simulator, half: Lease) -> None:
    with Worker(machine.env()) as neighbour, in_lease(machine, half) as kernel:
        neighbour.run("b = gpu.allocate('79GiB')")
        for take in ("alloc(2 << 30)", "alloc_async(2 << 30)", "create(2 << 30)", "managed(2 << 30)"):
            assert kernel.ask(take)[0] == 2
        assert kernel.ask("free(4096)") == 1
        assert set(half.slots()[kernel.pid].used_bytes) == {0}
        assert half.slots()[kernel.pid].taints == 0
        assert half.denied() == 0


def test_small_allocations_are_charged_as_the_device_loses_them(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("many = [alloc(1000 * i)[1] for i in range(1, 200)] + [alloc(3 << 20)[1]]")
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) > 0
        assert kernel.ask("sum(free(at) for at in many)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 0


def test_the_end_of_a_context_gives_its_memory_back(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("kept = create(2 << 30)[1]; alloc(3 << 30)")
        assert kernel.ask("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 2 * GIB
        kernel.run("code, own = made('cuCtxCreate_v2', 0, 0); alloc(1 << 30)")
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 3 * GIB
        assert kernel.ask("cuda.cuCtxDestroy_v2(ctypes.c_void_p(own))") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 2 * GIB


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
    cuda.cuCtxSetCurrent(gpu._context)
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


def test_a_holder_killed_inside_the_account_blocks_nobody(machine: Simulator, half: Lease) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=machine.env(**half.env()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pid, free, total = map(int, done.stdout.split())
    assert (free, total) == (10 * GIB, 40 * GIB)
    assert list(half.slots()) == [pid]


@pytest.mark.parametrize(
    "broken", ["no page", "no account", "short page", "wrong magic", "link", "no folder"]
)
def test_without_valid_files_every_allocation_is_denied(machine: Simulator, half: Lease, broken: str) -> None:
    limit, account = half.folder / "limit", half.folder / "account"
    env = machine.env(**half.env())
    if broken == "no page":
        limit.unlink()
    elif broken == "no account":
        account.unlink()
    elif broken == "short page":
        limit.write_bytes(limit.read_bytes()[: PAGE_BYTES - 1])
    elif broken == "wrong magic":
        limit.write_bytes(b"\0" * PAGE_BYTES)
    elif broken == "link":
        limit.rename(half.folder / "elsewhere")
        limit.symlink_to(half.folder / "elsewhere")
    else:
        del env["GPUSHARE_LEASE_DIR"]
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(CALLS)
        kernel.run("cuda.cuInit(0)")
        # Without a context there is nothing to allocate on; where one is to be had, it is refused too.
        refused = kernel.ask("made('cuDevicePrimaryCtxRetain', 0)[0] or made('cuCtxCreate_v2', 0, 0)[0]")
        code = refused or kernel.ask("alloc(1)[0]")
        assert code == 2
        assert kernel.ask("create(2 << 20)[0]") == 2
        kernel.process.stdin.close()  # type: ignore[union-attr]
        said = kernel.stderr()
    assert said.count("gpushare: GPU memory cannot be allocated") == 1
    assert machine.device_peak(0) == 0


def test_a_revoked_lease_is_denied_at_once(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        assert kernel.ask("alloc(1 << 30)[0]") == 0
        half.write(Phase.REVOKED)
        assert kernel.ask("alloc(1)[0]") == 2
        assert kernel.ask("made('cuDevicePrimaryCtxRetain', 0)[0]") == 2
        assert kernel.ask("made('cuCtxCreate_v2', 0, 0)[0]") == 2


def test_a_lowered_limit_denies_more_but_takes_nothing(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("at = alloc(30 << 30)[1]")
        half.limits = [(machine.uuid(0), 20 * GIB)]
        half.write(Phase.RUNNING)
        assert kernel.ask("alloc(1)[0]") == 2
        assert kernel.ask("gpu.memory()") == [0, 20 * GIB]
        assert kernel.ask("free(at)") == 0
        assert kernel.ask("alloc(20 << 30)[0]") == 0


def test_devices_are_told_apart_by_uuid_not_by_number(machine: Simulator) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(1), 10 * GIB), (machine.uuid(0), 20 * GIB)])
    with in_lease(machine, lease, CUDA_VISIBLE_DEVICES=f"{machine.uuid(1)},{machine.uuid(0)}") as kernel:
        kernel.run("other = demo_gpu.open(1)")
        assert kernel.ask("[gpu.memory()[1], other.memory()[1]]") == [10 * GIB, 20 * GIB]
        kernel.run("gpu.allocate('10GiB'); other.allocate('20GiB')")
        assert (machine.device_used(1), machine.device_used(0)) == (10 * GIB, 20 * GIB)
        for which in ("gpu", "other"):
            with pytest.raises(WorkerError):
                kernel.run(f"{which}.allocate(1)")


@pytest.mark.parametrize(
    ("call", "taint"),
    [
        ("managed(4096)[0]", 1),
        ("cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(at))", 2),
        (
            "cuda.cuMemExportToShareableHandle(bytes(8), u64(create(2 << 20)[1]), 1, u64(0))",
            4,
        ),
        ("cuda.cuCtxEnablePeerAccess(other._context, 0)", 8),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), ctypes.byref(Access(1, 0, 3)), size(1))", 0),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), (Access * 2)((1, 0, 3), (1, 1, 3)), size(2))", 8),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), ctypes.byref(Access(1, 1, 0)), size(1))", 0),
        ("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 1, 3)), size(1))", 8),
        ("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 1, 0)), size(1))", 0),
        ("cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(1)) - 1", 0),
    ],
)
def test_what_prevents_suspension_is_on_record(machine: Simulator, call: str, taint: int) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(i), 40 * GIB) for i in (0, 1)])
    with in_lease(machine, lease) as kernel:
        kernel.run("other = demo_gpu.open(1); cuda.cuCtxSetCurrent(gpu._context); at = alloc(1 << 21)[1]")
        assert lease.slots()[kernel.pid].taints == 0
        assert kernel.ask(call) == 0
        assert lease.slots()[kernel.pid].taints == taint


def test_a_device_that_is_alone_has_no_peers(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half, CUDA_VISIBLE_DEVICES=machine.uuid(0)) as kernel:
        assert kernel.ask("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 0, 3)), size(1))") == 0
        assert half.slots()[kernel.pid].taints == 0


def test_outside_a_lease_the_library_is_not_there(machine: Simulator) -> None:
    env = machine.env(LD_PRELOAD=str(native.preload_path()))
    with Worker(env) as kernel:
        kernel.run(CALLS)
        assert kernel.ask("gpu.memory()") == [80 * GIB, 80 * GIB]
        assert kernel.ask("[alloc(70 << 30)[0], create(10 << 30)[0], alloc(1)[0]]") == [0, 0, 2]


def test_a_process_without_a_gpu_is_left_alone(half: Lease) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")} | half.env()
    done = subprocess.run(
        ["/bin/echo", "hello"], env=env, capture_output=True, text=True, timeout=20, check=True
    )
    assert (done.stdout, done.stderr) == ("hello\n", "")
    assert half.slots() == {}


def test_more_processes_than_slots_are_denied_but_still_counted(machine: Simulator, half: Lease) -> None:
    """The account is full of living processes: fail closed, and no wake-up lost."""
    account = bytearray(ACCOUNT_BYTES)
    (half.folder / "account").write_bytes(account)
    with in_lease(machine, half) as first:
        first.run("alloc(1 << 20)")
        me = half.slots()[first.pid]
        data = bytearray((half.folder / "account").read_bytes())
        own = next(
            i for i in range(256) if data[80 + 160 * i : 84 + 160 * i] == first.pid.to_bytes(4, "little")
        )
        slot = bytes(data[80 + 160 * own : 80 + 160 * (own + 1)])
        with (half.folder / "account").open("r+b") as file:
            for i in range(256):
                if i != own:
                    file.seek(80 + 160 * i)
                    file.write(slot)
        with in_lease(machine, half) as late:
            before = (half.folder / "account").read_bytes()
            assert late.ask("alloc(1)[0]") == 2
            assert late.ask("cuda.cuCtxSynchronize()") == 0
            after = (half.folder / "account").read_bytes()
            assert before != after
            assert late.pid not in half.slots()
        assert me.pid in half.slots()


def test_the_folder_of_the_libraries_is_named_or_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert native.preload_path().is_file()
    monkeypatch.setattr(native, "_HERE", tmp_path)
    with pytest.raises(Exception, match=r"not built.*jupyter_gpushare.native.build"):
        native.preload_path()
    blank = tmp_path / "with blank"
    (blank / "lib" / "sim").mkdir(parents=True)
    for name in (native.PRELOAD_NAME, *(f"sim/{n}" for n in native.SIMULATED_NAMES)):
        (blank / "lib" / name).touch()
    monkeypatch.setattr(native, "_HERE", blank)
    assert native.lib_dir() == blank / "lib"
    with pytest.raises(Exception, match="dynamic linker"):
        native.sim_dir()
