"""The simulated driver's memory pools and switches: each test names the source, or that there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.calls import CALLS, GRAPHS
from tests.native.conftest import checkpoint_in
from tests.native.programs import run
from tests.native.test_truth import PLAIN, machine_with, source
from tests.native.worker import Worker
from tests.simulator import GIB, Lease

# ---- pools ----

POOL = """
cuda = ctypes.CDLL("libcuda.so.1")
pool = ctypes.c_void_p()
assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
def get(attribute):
    value = ctypes.c_uint64()
    assert cuda.cuMemPoolGetAttribute(pool, attribute, ctypes.byref(value)) == 0
    return value.value >> 30
def threshold(n): return cuda.cuMemPoolSetAttribute(pool, 4, ctypes.byref(ctypes.c_uint64(n)))
def alloc(n):
    at = ctypes.c_uint64()
    assert cuda.cuMemAllocAsync(ctypes.byref(at), ctypes.c_size_t(n << 30), None) == 0
    return at
def free(at): return cuda.cuMemFreeAsync(at, None)
"""


@source("cuda.h 13.5, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: released at the next synchronisation")
@pytest.mark.parametrize(("threshold", "kept"), [(0, 0), (2 * GIB, 2), (2**64 - 1, 6)])
def test_a_pool_keeps_freed_memory_up_to_its_threshold(tmp_path: Path, threshold: int, kept: int) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(POOL)
        kernel.run(f"assert threshold({threshold}) == 0; at = alloc(6); assert free(at) == 0")
        assert kernel.ask("[get(5), get(7)]") == [6, 0]  # reserved, used
        assert machine.device_used(0) == 6 * GIB
        kernel.run("gpu.call('cuCtxSynchronize')")
        assert kernel.ask("[get(5), get(6), get(8)]") == [kept, 6, 6]
        assert machine.device_used(0) == kept * GIB
        kernel.run("at = alloc(1)")
        assert machine.device_used(0) == max(kept, 1) * GIB


@source("CUDA Driver API reference 13.0, cuMemPoolTrimTo")
def test_trimming_a_pool_gives_back_what_is_not_in_use(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(POOL)
        kernel.run("threshold(2**64 - 1); one, two = alloc(1), alloc(5); free(two)")
        assert kernel.ask("[cuda.cuMemPoolTrimTo(pool, ctypes.c_size_t(0)), get(5)]") == [
            0,
            6,
        ]  # not seen complete
        kernel.run("gpu.call('cuCtxSynchronize')")
        for keep, reserved in ((8, 6), (3, 3), (0, 1)):
            assert kernel.ask(f"cuda.cuMemPoolTrimTo(pool, ctypes.c_size_t({keep} << 30))") == 0
            assert (kernel.ask("get(5)"), machine.device_used(0)) == (reserved, reserved * GIB)


@source("CUDA Programming Guide 13.0, 4.3.4.4.3: reused by waiting where the device has no more")
@pytest.mark.parametrize(("policies", "reserved"), [((1, 1), 3), ((0, 1), 6), ((0, 0), 6)])
def test_what_another_stream_freed_is_reused_when_it_is_finished_or_nothing_else_is_left(
    tmp_path: Path, policies: tuple[int, int], reserved: int
) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(POOL)
        for attribute, value in zip((2, 3), policies, strict=True):
            value_at = f"ctypes.byref(ctypes.c_int({value}))"
            assert kernel.ask(f"cuda.cuMemPoolSetAttribute(pool, {attribute}, {value_at})") == 0
        kernel.run("stream = ctypes.c_void_p(); cuda.cuStreamCreate(ctypes.byref(stream), 0)")
        kernel.run("free(alloc(3)); free(alloc(3))")  # of its own stream always
        assert kernel.ask("get(5)") == 3
        at = "ctypes.byref(ctypes.c_uint64())"
        assert kernel.ask(f"cuda.cuMemAllocAsync({at}, ctypes.c_size_t(3 << 30), stream)") == 0
        assert (kernel.ask("get(5)"), machine.device_used(0)) == (reserved, reserved * GIB)
        kernel.run("threshold(2**64 - 1); free(alloc(30))")
        code = kernel.ask(f"cuda.cuMemAllocAsync({at}, ctypes.c_size_t(50 << 30), stream)")
        assert code == (2 if policies == (0, 0) else 0)


PLACES = """
def place(kind, allocation, call="cuMemGetDefaultMemPool", pool=None):
    location, found = (ctypes.c_int * 2)(kind, 0), ctypes.c_void_p()
    if call == "cuMemPoolCreate":
        properties = (ctypes.c_int * 22)(allocation, 0, kind, 0)
        return cuda.cuMemPoolCreate(ctypes.byref(found), properties), found
    if call == "cuMemSetMemPool":
        return cuda.cuMemSetMemPool(location, allocation, pool), pool
    return getattr(cuda, call)(ctypes.byref(found), location, allocation), found
def facts(pool):
    values = [ctypes.c_int() for _ in range(3)]
    codes = [cuda.cuMemPoolGetAttribute(pool, n, ctypes.byref(v)) for n, v in zip((9, 11, 12), values)]
    return [v.value for v in values] if codes == [0, 0, 0] else codes
def alloc_from(pool, n):
    at = ctypes.c_uint64()
    return [cuda.cuMemAllocFromPoolAsync(ctypes.byref(at), ctypes.c_size_t(n << 30), pool, None), at]
"""


@source("cuda.h 13.5, cuMemPoolCreate, cuMemGetDefaultMemPool, cuMemSetMemPool")
def test_each_place_has_a_default_pool_and_a_current_one(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(POOL + PLACES)
        for kind, allocation in ((1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2)):
            kernel.run(f"code, first = place({kind}, {allocation})")
            assert kernel.ask("[code, facts(first)]") == [0, [allocation, 0, kind]]
            kernel.run(f"code, made = place({kind}, {allocation}, 'cuMemPoolCreate')")
            assert kernel.ask("[code, facts(made), made.value != first.value]") == [
                0,
                [allocation, 0, kind],
                True,
            ]
            assert kernel.ask(f"place({kind}, {allocation}, 'cuMemSetMemPool', made)[0]") == 0
            current = f"place({kind}, {allocation}, 'cuMemGetMemPool')[1].value"
            assert kernel.ask(f"{current} == made.value")
            assert kernel.ask(f"[cuda.cuMemPoolDestroy(made), {current} == first.value]") == [0, True]
            assert kernel.ask("cuda.cuMemPoolDestroy(first)") == 1
        for kind, allocation in ((0, 1), (4, 1), (5, 1), (6, 2), (1, 0), (1, 3)):
            assert kernel.ask(f"place({kind}, {allocation})[0]") == 1
            assert kernel.ask(f"place({kind}, {allocation}, 'cuMemPoolCreate')[0]") == 1
        assert kernel.ask("place(1, 2, 'cuMemSetMemPool', pool)[0]") == 1  # of another type


@source("cuda.h 12.9 has no managed pools and no attributes of places; libcu++ 3.2: host pools since 12.6")
def test_a_driver_before_cuda_13_has_pools_of_hosts_and_does_not_name_places(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "driver=570.86.15")
    with Worker(machine.env()) as kernel:
        kernel.run(POOL + PLACES)
        assert kernel.ask("[place(2, 1, 'cuMemPoolCreate')[0], place(1, 2, 'cuMemPoolCreate')[0]]") == [0, 1]
        assert kernel.ask("facts(pool)") == [1, 1, 1]


@source("cuda.h 13.5, CU_MEM_LOCATION_TYPE_HOST: no memory of a device")
def test_a_pool_of_a_host_takes_no_memory_of_a_device(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(POOL + PLACES)
        kernel.run("code, at = alloc_from(place(2, 1)[1], 200)")
        assert (kernel.ask("code"), machine.device_used(0)) == (0, 0)
        kernel.run("kind = ctypes.c_uint(); cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, at)")
        assert kernel.ask("[kind.value, cuda.cuMemFreeAsync(at, None), cuda.cuCtxSynchronize()]") == [1, 0, 0]


@source("README of NVIDIA/cuda-checkpoint, 2025-08: no UVM; that a pool alone hinders is not documented")
@pytest.mark.parametrize(("allocation", "hindered"), [(1, False), (2, True)])
def test_a_process_with_a_managed_pool_is_not_checkpointed(
    tmp_path: Path, allocation: int, hindered: bool
) -> None:
    machine = machine_with(tmp_path)
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(machine.env()) as kernel:
            kernel.run(POOL + PLACES)
            assert kernel.ask(f"place(1, {allocation}, 'cuMemPoolCreate')[0]") == 0
            assert checkpoint.lock(kernel.pid) == 0
            assert (checkpoint.checkpoint(kernel.pid) != 0) is hindered


GRAPH = """
made = executable(3 << 30)
def get(attribute):
    value = ctypes.c_uint64()
    assert cuda.cuDeviceGetGraphMemAttribute(0, attribute, ctypes.byref(value)) == 0
    return value.value >> 30
"""


@source("CUDA C++ Programming Guide 13.0, Graph Memory Nodes; cuda.h 13.5, CUgraphMem_attribute")
def test_memory_of_a_graph_stays_reserved_until_the_device_is_trimmed(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(CALLS + GRAPHS + GRAPH)
        assert machine.device_used(0) == 0  # backed by its launch
        assert kernel.ask("[cuda.cuGraphLaunch(made, None), get(0), get(2)]") == [0, 3, 3]  # used, reserved
        assert kernel.ask("[cuda.cuGraphExecDestroy(made), cuda.cuCtxSynchronize()]") == [0, 0]
        assert (kernel.ask("[get(0), get(2)]"), machine.device_used(0)) == ([0, 3], 3 * GIB)
        assert kernel.ask("cuda.cuDeviceGraphMemTrim(0)") == 0
        assert (kernel.ask("get(2)"), machine.device_used(0)) == (0, 0)


NODES = """
from jupyter_gpushare.gpu.driver.probe import PTX
cuda = ctypes.CDLL("libcuda.so.1")
made, graph, node, module, function, context = (ctypes.c_void_p() for _ in range(6))
at, words = ctypes.c_uint64(), (ctypes.c_uint64 * 4)()
set_node = (ctypes.c_uint64 * 5)()  # CUDA_MEMSET_NODE_PARAMS
kernel_node = (ctypes.c_uint64 * 9)()  # CUDA_KERNEL_NODE_PARAMS_v2
def ok(code): assert code == 0, code
ok(cuda.cuCtxGetCurrent(ctypes.byref(context)))
ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(32)))
ok(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
ok(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"gpushare_probe"))
ok(cuda.cuGraphCreate(ctypes.byref(graph), 0))
none, one = ctypes.c_size_t(0), ctypes.c_size_t(1)
set_node[:] = [at.value, 0, 7 | 4 << 32, 8, 1]  # 8 elements of 4 bytes
def add_set(): return cuda.cuGraphAddMemsetNode(ctypes.byref(node), graph, None, none, set_node, context)
given = [ctypes.c_uint64(value) for value in (at.value, 1, 3)]  # one word, seed 3
arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in given))
ones = 1 | 1 << 32  # two members of the grid or the block
kernel_node[:] = [function.value, ones, ones, ones, 0, ctypes.addressof(arguments), 0, 0, 0]
ok(add_set())
ok(cuda.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, ctypes.byref(node), one, kernel_node))
ok(cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_uint64(0)))
def read():
    ok(cuda.cuMemcpyDtoH_v2(words, at, ctypes.c_size_t(32)))
    return list(words)
"""
SET, FILLED = 0x700000007, 0x700000003


@source("cuda.h 13.5: cuGraphAddKernelNode copies the parameters; cuGraphInstantiate, cuGraphLaunch")
def test_a_graph_runs_its_nodes_at_each_launch_as_they_were_when_it_was_instantiated(tmp_path: Path) -> None:
    with Worker(machine_with(tmp_path).env()) as kernel:
        kernel.run(NODES)
        assert kernel.ask("read()") == [0] * 4  # adding and instantiating run nothing
        kernel.run("given[2].value = 9; ok(cuda.cuGraphLaunch(made, None))")
        assert kernel.ask("read()") == [FILLED, SET, SET, SET]
        kernel.run(
            "ok(cuda.cuMemsetD8_v2(at, 0, ctypes.c_size_t(32))); set_node[2] = 8 | 4 << 32; ok(add_set())"
        )
        kernel.run("ok(cuda.cuGraphDestroy(graph)); ok(cuda.cuGraphLaunch(made, None))")
        assert kernel.ask("read()") == [FILLED, SET, SET, SET]
        assert kernel.ask("cuda.cuGraphExecDestroy(made)") == 0


MANAGED = """
cuda = ctypes.CDLL("libcuda.so.1")
module, at, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
image = b".version 6.0 .visible .global .attribute(.managed) .align 4 .u32 shared_by_all;"
def find(name): return cuda.cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module, name)
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
"""


@source("CUDA C++ Programming Guide 11.8, Unified Memory Programming: as memory of cudaMallocManaged")
def test_a_managed_variable_of_a_module_keeps_its_process_from_being_checkpointed(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(machine.env()) as kernel:
            kernel.run(MANAGED)
            assert kernel.ask("[find(b'other'), find(b'shared_by_all'), size.value]") == [500, 0, 4]
            # From the host, as `x = 5` does.
            kernel.run("ctypes.c_uint32.from_address(at.value).value = 5")
            assert checkpoint.lock(kernel.pid) == 0
            assert checkpoint.checkpoint(kernel.pid) == 801


# ---- what is only inferred ----


@source("not documented: cuGetProcAddress may answer other addresses than the symbols have")
def test_entry_points_apart_from_their_symbols_are_counted_and_limited_too(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "entry-points=apart")
    lease = Lease(tmp_path / "lease", [(machine.uuid(0), 4 * GIB)])
    asked = """
cuda = ctypes.CDLL("libcuda.so.1")
def entry(name, kind=ctypes.CFUNCTYPE(ctypes.c_int)):
    out = ctypes.c_void_p()
    assert cuda.cuGetProcAddress_v2(name, ctypes.byref(out), 13000, ctypes.c_uint64(0), None) == 0
    return out.value
def call(name, *arguments): return ctypes.CFUNCTYPE(ctypes.c_int)(entry(name))(*arguments)
def symbol(name): return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
"""
    with Worker(machine.env()) as outside:
        outside.run(asked)
        assert outside.ask("entry(b'cuMemAlloc') != symbol('cuMemAlloc_v2')")
    with Worker(machine.env(**lease.env())) as kernel:
        kernel.run(asked)
        before = lease.slots()[kernel.pid]
        size = "ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t"
        assert kernel.ask(f"[call(b'cuMemAlloc', {size}(n << 30)) for n in (3, 3, 1)]") == [0, 2, 0]
        assert kernel.ask("[call(b'cuCtxSynchronize'), call(b'cuStreamQuery', None)]") == [0, 0]
        after = lease.slots()[kernel.pid]
        assert (after.work - before.work, after.queries - before.queries) == (4, 1)


@source("not documented: which queries wait while a process is locked")
@pytest.mark.parametrize(("queries", "waits"), [("answer", False), ("wait", True)])
def test_queries_may_wait_while_the_process_is_locked(tmp_path: Path, queries: str, waits: bool) -> None:
    machine = machine_with(tmp_path, f"queries={queries}")
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(machine.env()) as kernel:
            kernel.run("cuda = ctypes.CDLL('libcuda.so.1')")
            assert checkpoint.lock(kernel.pid) == 0
            kernel.start("cuda.cuStreamIsCapturing(None, ctypes.byref(ctypes.c_int()))")
            assert kernel.is_waiting(0.3) is waits
            assert checkpoint.unlock(kernel.pid) == 0
            assert kernel.answer() == 0


@pytest.mark.parametrize(
    "option",
    ["lost=maybe", "bytes=", "checkpoint", "free-delay=1h", "driver=r570", "unusable=80GB", "pools=keep"],
)
def test_an_unknown_option_is_refused(tmp_path: Path, option: str) -> None:
    env = {
        "GPUSHARE_SIMULATE": f"{PLAIN},{option}",
        "GPUSHARE_SIM_STATE": str(tmp_path / "state"),
        "LD_LIBRARY_PATH": str(native.sim_dir()),
    }
    code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    done = run(sys.executable, "-c", code, env=env, check=True)
    assert done.stdout == "100\n"
    assert "GPUSHARE_SIMULATE is wrong at" in done.stderr
