"""Pools and graphs are charged for the memory that they keep, and trimmed before a denial."""

from __future__ import annotations

import platform

import pytest

from jupyter_gpushare import native
from tests.native.calls import CALLS, in_lease, used
from tests.native.test_hooks import EXPORTS, compile_shared
from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Simulator

KEEP = """
pool = ctypes.c_void_p()
def keep_all():
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
    return cuda.cuMemPoolSetAttribute(pool, 4, ctypes.byref(u64(2**64 - 1)))
def created(device):
    made, properties = ctypes.c_void_p(), (ctypes.c_int * 22)(1, 0, 1, device)
    assert cuda.cuMemPoolCreate(ctypes.byref(made), properties) == 0
    return made.value
def from_pool(pool, n):
    at = u64()
    code = cuda.cuMemAllocFromPoolAsync(ctypes.byref(at), size(n), ctypes.c_void_p(pool), None)
    return code, at.value
def sync(): return cuda.cuCtxSynchronize()
"""


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
    with in_lease(machine, half) as kernel:
        kernel.run(KEEP)
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
    with in_lease(machine, lease) as kernel:
        kernel.run(KEEP)
        kernel.run("second = created(1)")
        assert kernel.ask("from_pool(second, 11 << 30)[0]") == 2
        code, at = kernel.ask("from_pool(second, 8 << 30)")
        assert (code, used(lease, kernel, 0), used(lease, kernel, 1)) == (0, 0, 8 * GIB)
        # A destroyed pool is charged until its last allocation is freed.
        assert kernel.ask("cuda.cuMemPoolDestroy(ctypes.c_void_p(second))") == 0
        assert used(lease, kernel, 1) == machine.device_used(1) == 8 * GIB
        assert kernel.ask(f"free_async({at})") == 0
        assert used(lease, kernel, 1) == machine.device_used(1) == 0


def test_memory_of_graphs_is_charged_and_trimmed(machine: Simulator, half: Lease) -> None:
    graph = """
class Node(ctypes.Structure):
    _fields_ = [("head", ctypes.c_int * 22), ("access", ctypes.c_void_p), ("count", ctypes.c_size_t),
                ("bytes", ctypes.c_size_t), ("at", ctypes.c_uint64)]
def executable(n):
    graph, node, made = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    parameters = Node((ctypes.c_int * 22)(1, 0, 1, 0), None, 0, n, 0)
    assert cuda.cuGraphCreate(ctypes.byref(graph), 0) == 0
    out = ctypes.byref(node)
    assert cuda.cuGraphAddMemAllocNode(out, graph, None, size(0), ctypes.byref(parameters)) == 0
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, u64(0)) == 0
    return made
"""
    with in_lease(machine, half) as kernel:
        kernel.run(graph)
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
