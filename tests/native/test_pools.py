"""Pools and graphs are charged for the memory that they keep, and trimmed before a denial."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.calls import CALLS, GRAPHS, in_lease, used
from tests.native.test_hooks import EXPORTS, compile_shared
from tests.native.worker import Worker
from tests.simulator import GIB, Fault, Lease, Simulator
from tests.waiting import until

KEEP = """
DEVICE, HOST, HOST_NUMA, DOMAIN, PINNED, MANAGED = 1, 2, 3, 6, 1, 2
def keep_all(): return cuda.cuMemPoolSetAttribute(pool(), 4, ctypes.byref(u64(2**64 - 1)))
def created(device, place=DEVICE, kind=PINNED):
    made, properties = ctypes.c_void_p(), (ctypes.c_int * 22)(kind, 0, place, device)
    assert cuda.cuMemPoolCreate(ctypes.byref(made), properties) == 0
    return made.value
def default(place, kind=PINNED, name="cuMemGetDefaultMemPool"):
    found, location = ctypes.c_void_p(), (ctypes.c_int * 2)(place, 0)
    assert getattr(cuda, name)(ctypes.byref(found), location, kind) == 0
    return found.value
def from_pool(pool, n, stream=None):
    at = u64()
    arguments = ctypes.byref(at), size(n), ctypes.c_void_p(pool), ctypes.c_void_p(stream)
    return cuda.cuMemAllocFromPoolAsync(*arguments), at.value
def alloc_in(stream, n): return made("cuMemAllocAsync", size(n), ctypes.c_void_p(stream))
def free_in(stream, at): return cuda.cuMemFreeAsync(u64(at), ctypes.c_void_p(stream))
def new_stream():
    stream = ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
    return stream.value
def sync(): return cuda.cuCtxSynchronize()
def wait_for(stream): return cuda.cuStreamSynchronize(ctypes.c_void_p(stream))
def keep_busy():  # the default stream
    global words
    words = gpu.allocate("2MiB")
    words.fill()
    words.start_step(3600)
def is_busy(): return cuda.cuStreamQuery(None) == 600
def asked(): return cuda.gpushare_sim_pool_questions()
def trims(): return cuda.gpushare_sim_pool_trims()
"""


def with_pools(machine: Simulator, lease: Lease) -> Worker:
    worker = in_lease(machine, lease)
    worker.run(KEEP)
    return worker


def test_a_pool_that_keeps_freed_memory_is_charged_for_what_it_keeps(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel, in_lease(machine, half) as other:
        kernel.run(KEEP)
        assert kernel.ask("keep_all()") == 0
        at = kernel.ask("alloc_async(30 << 30)[1]")
        assert kernel.ask(f"[free_async({at}), sync()]") == [0, 0]
        assert machine.device_used(0) == used(half, kernel) == 30 * GIB
        assert other.ask("alloc(11 << 30)[0]") == 2  # the rest of the lease, not more
        assert other.ask("alloc(10 << 30)[0]") == 0
        assert machine.device_peak(0) == 40 * GIB


def test_own_pools_are_trimmed_before_an_allocation_is_denied(machine: Simulator, half: Lease) -> None:
    with with_pools(machine, half) as kernel:
        assert kernel.ask("keep_all()") == 0
        for _ in range(3):
            code, at = kernel.ask("alloc_async(30 << 30)")
            assert (code, kernel.ask(f"[free_async({at}), sync()]")) == (0, [0, 0])
            code, at = kernel.ask("alloc(30 << 30)")  # past the pool: its pages have to go
            assert (code, kernel.ask(f"free({at})")) == (0, 0)
        assert half.denied() == 0
        assert machine.device_peak(0) <= 40 * GIB


def test_a_pool_is_charged_on_its_own_device(machine: Simulator) -> None:
    lease = Lease(machine.folder / "both", [(machine.uuid(0), 40 * GIB), (machine.uuid(1), 10 * GIB)])
    with with_pools(machine, lease) as kernel:
        kernel.run("second = created(1)")
        assert kernel.ask("from_pool(second, 11 << 30)[0]") == 2
        code, at = kernel.ask("from_pool(second, 8 << 30)")
        assert (code, used(lease, kernel, 0), used(lease, kernel, 1)) == (0, 0, 8 * GIB)
        # A destroyed pool is charged until its last allocation is freed.
        assert kernel.ask("cuda.cuMemPoolDestroy(ctypes.c_void_p(second))") == 0
        assert used(lease, kernel, 1) == machine.device_used(1) == 8 * GIB
        assert kernel.ask(f"free_async({at})") == 0
        assert used(lease, kernel, 1) == machine.device_used(1) == 0


def test_a_request_that_fits_into_its_pool_is_neither_charged_nor_waits_nor_trims(
    machine: Simulator, half: Lease
) -> None:
    with with_pools(machine, half) as kernel:
        assert kernel.ask("keep_all()") == 0
        at = kernel.ask("alloc_async(30 << 30)[1]")
        kernel.run("keep_busy()")
        for _ in range(3):
            assert kernel.ask(f"free_async({at})") == 0
            code, at = kernel.ask("alloc_async(30 << 30)")
            assert (code, kernel.ask("[trims(), is_busy()]")) == (0, [0, True])
        assert kernel.ask("[alloc_async(9 << 30)[0], alloc_async(1 << 30)[0]]") == [0, 2]
        assert half.denied() == 1
        assert machine.device_peak(0) == used(half, kernel) == 39 * GIB + (2 << 20)


def test_small_requests_share_what_their_pool_has_reserved(machine: Simulator) -> None:
    lease = Lease(machine.folder / "small", [(machine.uuid(0), 2 << 20)])
    with with_pools(machine, lease) as kernel:
        assert kernel.ask("[alloc_async(4096)[0] for _ in range(512)]") == [0] * 512
        assert (kernel.ask("alloc_async(1)[0]"), used(lease, kernel), lease.denied()) == (2, 2 << 20, 1)


def test_an_allocation_in_a_stream_is_denied_without_waiting_for_it(machine: Simulator, half: Lease) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("second = created(0); at = alloc_async(30 << 30)[1]; keep_busy()")
        assert kernel.ask("[free_async(at), from_pool(second, 20 << 30)[0], is_busy()]") == [0, 2, True]
        assert kernel.ask("[alloc(20 << 30)[0], is_busy()]") == [2, True]
        assert machine.device_peak(0) == 30 * GIB + (2 << 20)


def test_after_a_denial_a_program_that_synchronizes_gets_what_it_freed(
    machine: Simulator, half: Lease
) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("keep_all(); second = created(0); at = alloc_async(30 << 30)[1]")
        assert kernel.ask("[free_async(at), from_pool(second, 20 << 30)[0]]") == [0, 2]
        assert kernel.ask("[sync(), from_pool(second, 20 << 30)[0]]") == [0, 0]
        assert used(half, kernel) == machine.device_used(0) == 20 * GIB
        assert machine.device_peak(0) == 30 * GIB


@pytest.mark.parametrize("threshold", ["0", "2**64 - 1"])
@pytest.mark.parametrize("covers", ["sync()", "wait_for(None)"])
def test_a_synchronisation_asks_pools_only_after_a_free(
    machine: Simulator, half: Lease, threshold: str, covers: str
) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("event = made('cuEventCreate', 0)[1]; cuda.cuEventRecord(ctypes.c_void_p(event), None)")
        kernel.run("def all_syncs(): sync(), wait_for(None), cuda.cuEventSynchronize(ctypes.c_void_p(event))")
        assert kernel.ask(f"cuda.cuMemPoolSetAttribute(pool(), 4, ctypes.byref(u64({threshold})))") == 0
        kernel.run("kept, at = alloc_async(1 << 20)[1], alloc_async(3 << 20)[1]; sync(); before = asked()")
        kernel.run("all_syncs()")
        assert kernel.ask("asked() - before") == 0
        assert kernel.ask(f"[free_async(at), {covers}, asked() - before]") == [0, 0, 1]
        kernel.run("all_syncs()")
        assert kernel.ask("asked() - before") == 1
        kept = 2 << 20 if threshold == "0" else 4 << 20
        assert used(half, kernel) == machine.device_used(0) == kept


def test_a_pool_is_asked_until_the_stream_of_its_free_was_synchronized(
    machine: Simulator, half: Lease
) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("one, two = new_stream(), new_stream()")
        for covers in ("one", "None"):  # the default stream waits for the others
            assert kernel.ask("[free_in(one, alloc_in(one, 3 << 30)[1]), wait_for(two)]") == [0, 0]
            assert used(half, kernel) == machine.device_used(0) == 3 * GIB
            assert kernel.ask(f"wait_for({covers})") == 0
            assert used(half, kernel) == machine.device_used(0) == 0
            before, *_codes, after = kernel.ask("[asked(), wait_for(two), wait_for(None), asked()]")
            assert after == before


def test_streams_that_share_a_pool_each_have_what_they_freed(machine: Simulator, half: Lease) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("keep_busy(); streams = [new_stream(), new_stream()]")
        kernel.run("at = [alloc_in(stream, 18 << 30)[1] for stream in streams]")
        assert kernel.ask("[free_in(*each) for each in zip(streams, at)]") == [0, 0]
        assert kernel.ask("[alloc_in(stream, 18 << 30)[0] for stream in streams]") == [0, 0]
        assert kernel.ask("[alloc_in(stream, 4 << 30)[0] for stream in streams]") == [2, 2]
        assert kernel.ask("trims()") == 2  # one for each denial


def test_a_lower_release_threshold_counts_at_the_next_synchronisation(
    machine: Simulator, half: Lease
) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("keep_all(); free_async(alloc_async(3 << 30)[1]); sync()")
        assert used(half, kernel) == 3 * GIB
        assert kernel.ask("[cuda.cuMemPoolSetAttribute(pool(), 4, ctypes.byref(u64(0))), sync()]") == [0, 0]
        assert used(half, kernel) == machine.device_used(0) == 0


def test_the_free_part_of_a_pool_is_promised_once(machine: Simulator, half: Lease) -> None:
    """While one thread's allocation is in the driver, another's finds the pool as it was before."""
    in_thread = """
codes, ready, go = [], threading.Event(), threading.Event()
def allocate():
    cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))
    ready.set()
    go.wait()
    codes.append(alloc_async(30 << 30)[0])
thread = threading.Thread(target=allocate)
thread.start()
ready.wait()
"""
    with with_pools(machine, half) as kernel:
        kernel.run("keep_all(); free_async(alloc_async(30 << 30)[1]); sync()")
        kernel.run(in_thread)
        machine.fault(Fault.HANG_CALL, pid=kernel.pid, value=1000)
        kernel.run("go.set()")
        until(lambda: machine.faults_left() == 0)
        assert kernel.ask("alloc_async(30 << 30)[0]") == 2
        kernel.run("thread.join()")
        assert kernel.ask("codes") == [0]
        assert machine.device_peak(0) <= 40 * GIB
        assert used(half, kernel) == machine.device_used(0)


def test_what_another_stream_freed_does_not_count_as_free(machine: Simulator, half: Lease) -> None:
    """The driver reserves more memory before it makes a stream wait for another."""
    with with_pools(machine, half) as kernel:
        kernel.run("at = alloc_async(30 << 30)[1]; keep_busy(); free_async(at); other = new_stream()")
        assert kernel.ask("[alloc_in(other, 30 << 30)[0], is_busy()]") == [2, True]
        assert kernel.ask("alloc_async(30 << 30)[0]") == 0
        assert machine.device_peak(0) == 30 * GIB + (2 << 20)


def test_what_the_driver_reserves_beyond_the_limit_is_charged_and_trimmed(
    machine: Simulator, half: Lease
) -> None:
    """Two streams with one number here: what one freed seems to be free for the other."""
    pair = """
def number(stream): return (stream * 0x9e3779b97f4a7c15 % 2**64 >> 32) % 32
seen = {}
while True:
    two = new_stream()
    one = seen.setdefault(number(two), two)
    if one != two: break
for policy in (2, 3): assert cuda.cuMemPoolSetAttribute(pool(), policy, ctypes.byref(ctypes.c_int(0))) == 0
"""
    with with_pools(machine, half) as kernel:
        kernel.run("keep_all()")
        kernel.run(pair)
        assert kernel.ask("[free_in(one, alloc_in(one, 30 << 30)[1]), alloc_in(two, 30 << 30)[0]]") == [0, 0]
        assert used(half, kernel) == machine.device_used(0) == 60 * GIB
        assert kernel.ask("alloc(1)[0]") == 2
        assert kernel.ask("wait_for(one)") == 0  # trimmed although the pool keeps
        assert used(half, kernel) == machine.device_used(0) == 30 * GIB
        assert kernel.ask("alloc(10 << 30)[0]") == 0


# ---- pools of other memory ----


@pytest.mark.parametrize("driver", ["580.65.06", "570.86.15"])
def test_pools_of_host_memory_are_not_charged(machine: Simulator, driver: str) -> None:
    older = Simulator(machine.folder, f"1xH100-80GB,context=0GiB,driver={driver}")
    lease = Lease(older.folder / "lease", [(older.uuid(0), 4 * GIB)])
    with with_pools(older, lease) as kernel:
        for pool in ("created(0, HOST)", "created(0, HOST_NUMA)"):
            code, at = kernel.ask(f"from_pool({pool}, 20 << 30)")
            assert (code, used(lease, kernel), older.device_used(0)) == (0, 0, 0)
            assert kernel.ask("from_pool(created(0), 4 << 30)[0]") == 0
            assert kernel.ask(f"[free_async({at}), cuda.cuDevicePrimaryCtxReset_v2(0)]") == [0, 0]
            kernel.run("gpu = demo_gpu.open()")
        assert (lease.denied(), lease.slots()[kernel.pid].taints) == (0, 0)


@pytest.mark.parametrize("name", ["cuMemGetDefaultMemPool", "cuMemGetMemPool"])
@pytest.mark.parametrize("place", ["HOST", "HOST_NUMA"])
def test_the_pools_of_a_host_location_are_not_charged(
    machine: Simulator, half: Lease, name: str, place: str
) -> None:
    with with_pools(machine, half) as kernel:
        code, at = kernel.ask(f"from_pool(default({place}, name={name!r}), 50 << 30)")
        assert (code, used(half, kernel), half.denied()) == (0, 0, 0)
        assert kernel.ask(f"[free_async({at}), sync()]") == [0, 0]


def test_a_pool_of_a_locality_domain_is_charged_on_its_device(machine: Simulator) -> None:
    lease = Lease(machine.folder / "both", [(machine.uuid(0), 40 * GIB), (machine.uuid(1), 10 * GIB)])
    with with_pools(machine, lease) as kernel:
        assert kernel.ask("[from_pool(created(1, DOMAIN), n << 30)[0] for n in (11, 8)]") == [2, 0]
        assert (used(lease, kernel, 0), used(lease, kernel, 1)) == (0, 8 * GIB)


@pytest.mark.parametrize(("place", "device"), [("DEVICE", 1), ("HOST", 0), ("0", 0)])
def test_memory_of_managed_pools_is_charged_by_request(machine: Simulator, place: str, device: int) -> None:
    lease = Lease(machine.folder / "both", [(machine.uuid(0), 10 * GIB), (machine.uuid(1), 10 * GIB)])
    with with_pools(machine, lease) as kernel:
        kernel.run(f"managed_pool = created({device}, {place}, MANAGED)")
        assert kernel.ask("from_pool(managed_pool, 11 << 30)[0]") == 2
        code, at = kernel.ask("from_pool(managed_pool, 8 << 30)")
        assert (code, used(lease, kernel, device), used(lease, kernel, 1 - device)) == (0, 8 * GIB, 0)
        assert machine.device_used(device) == 8 * GIB
        assert (kernel.ask(f"free_async({at})"), used(lease, kernel, device)) == (0, 0)


def test_more_pools_than_the_table_has_are_charged_by_request(machine: Simulator, half: Lease) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("pools = [created(0) for _ in range(140)]")
        assert kernel.ask("[from_pool(pool, 1 << 30)[0] for pool in pools[126:131]]") == [0] * 5
        assert kernel.ask("[from_pool(created(0, HOST), 50 << 30)[0], created(0, HOST, MANAGED) > 0]") == [
            0,
            True,
        ]
        assert (used(half, kernel), half.slots()[kernel.pid].taints) == (5 * GIB, 1)


def test_memory_of_graphs_is_charged_and_trimmed(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run(GRAPHS)
        kernel.run("big, small = executable(50 << 30), executable(1 << 30)")
        assert kernel.ask("cuda.cuGraphLaunch(big, None)") == 0  # its size is not known before
        assert used(half, kernel) == machine.device_used(0) == 50 * GIB
        assert kernel.ask("[cuda.cuGraphLaunch(small, None), alloc(1)[0]]") == [2, 2]
        assert kernel.ask("cuda.cuGraphExecDestroy(big)") == 0
        assert kernel.ask("[cuda.cuGraphLaunch(small, None), alloc(30 << 30)[0]]") == [0, 0]
        assert used(half, kernel) == machine.device_used(0) == 31 * GIB


def test_a_device_reset_gives_everything_back_also_of_a_context_that_no_hook_saw(
    machine: Simulator, half: Lease
) -> None:
    with in_lease(machine, half, open_gpu=False) as kernel:
        kernel.run(KEEP)
        kernel.run("assert cuda.cuInit(0) == 0")
        for _ in range(2):
            assert kernel.ask("cuda.gpushare_sim_retain_unseen(0)") == 0
            assert kernel.ask("keep_all()") == 0
            assert kernel.ask("[alloc(20 << 30)[0], alloc_async(10 << 30)[0]]") == [0, 0]
            assert kernel.ask("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
            assert used(half, kernel) == machine.device_used(0) == 0


def test_a_reset_of_the_primary_context_keeps_the_charge_of_other_contexts(
    machine: Simulator, half: Lease
) -> None:
    with in_lease(machine, half) as kernel:
        assert kernel.ask("alloc(10 << 30)[0]") == 0
        assert kernel.ask("made('cuCtxCreate_v2', 0, 0)[0]") == 0
        assert kernel.ask("alloc(20 << 30)[0]") == 0
        assert kernel.ask("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        assert used(half, kernel) == machine.device_used(0) == 20 * GIB


#: Counts how often the loader is asked for a library.
COUNTING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int opened;
void *dlopen(const char *name, int flags)
{
    opened++;
    return ((void *(*)(const char *, int))dlvsym(RTLD_NEXT, "dlopen", OLDEST))(name, flags);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a version of glibc's dlopen")
def test_a_function_that_the_driver_lacks_is_looked_up_once(machine: Simulator, half: Lease) -> None:
    """cuStreamGetDevice is of CUDA 12.8; the lookup would cost every allocation a microsecond."""
    assert "cuStreamGetDevice" not in {name for name, *_ in EXPORTS}
    counter = compile_shared(COUNTING, machine.folder / "counter.so", '-DOLDEST="GLIBC_2.2.5"')
    preload = {"LD_PRELOAD": f"{counter} {native.preload_path()}"}
    with Worker(machine.env(**half.env() | preload)) as kernel:
        kernel.run(CALLS)
        kernel.run("opened = ctypes.c_int.in_dll(ctypes.CDLL(None), 'opened')")
        kernel.run("free_async(alloc_async(4096)[1])")
        before = kernel.ask("opened.value")
        kernel.run("for _ in range(100): free_async(alloc_async(4096)[1])")
        assert kernel.ask("opened.value") == before > 0


def test_the_end_of_a_context_gives_back_what_its_pool_released(machine: Simulator, half: Lease) -> None:
    with with_pools(machine, half) as kernel:
        kernel.run("code, own = made('cuCtxCreate_v2', 0, 0); at = alloc_async(30 << 30)[1]")
        assert used(half, kernel) == 30 * GIB
        assert kernel.ask("cuda.cuCtxDestroy_v2(ctypes.c_void_p(own))") == 0
        assert machine.device_used(0) == used(half, kernel) == 0


#: A driver whose pools are asked and trimmed only while they exist; the end of one takes a while.
ENDING = """
#include <stddef.h>
#include <unistd.h>
static _Atomic int ending, dead_asks;
typedef unsigned long long u64;
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *out, int n) { return *out = n; }
int cuDeviceGetCount(int *out) { *out = 1; return 0; }
int cuDeviceGetUuid_v2(unsigned char *out, int n) { for (int i = 0; i < 16; i++) out[i] = 0x11; return n; }
int cuCtxGetCurrent(void **out) { *out = &cuInit; return 0; }
int cuCtxGetDevice(int *out) { return *out = 0; }
int cuMemAlloc_v2(u64 *out, size_t bytes) { *out = 1 << 21; return !bytes; }
int cuMemPoolCreate(void **out, const void *properties) { *out = &cuMemAlloc_v2; return !properties; }
int cuMemPoolGetAttribute(void *pool, int attribute, u64 *out)
{ dead_asks += ending; *out = 1 << 21; return !pool || !attribute; }
int cuMemPoolTrimTo(void *pool, size_t keep) { dead_asks += ending; return !pool || keep; }
int cuMemPoolDestroy(void *pool) { ending = 1; usleep(300000); ending = 0; return !pool; }
int cuCtxSynchronize(void) { return 0; }
int dead(void) { return dead_asks; }
"""


def test_a_pool_that_is_being_destroyed_is_given_to_the_driver_by_no_other_thread(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,context=0")
    compile_shared(ENDING, tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    lease = Lease(tmp_path / "lease", [("GPU-11111111-1111-1111-1111-111111111111", GIB)])
    with in_lease(machine, lease, open_gpu=False, LD_LIBRARY_PATH=str(tmp_path)) as kernel:
        kernel.run(KEEP)
        kernel.run("""
import threading
cuda.cuInit(0)
kept = created(0)
thread = threading.Thread(target=lambda: cuda.cuMemPoolDestroy(ctypes.c_void_p(kept)))
thread.start()
time.sleep(0.1)
codes = [alloc(4 << 30)[0], sync()]
thread.join()
""")
        assert kernel.ask("[codes, cuda.dead()]") == [[2, 0], 0]
