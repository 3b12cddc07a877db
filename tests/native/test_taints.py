"""What prevents a process from being suspended is on record, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.gpu.leases.files import Taint, words_of
from tests.native.calls import in_lease
from tests.native.test_hooks import compile_shared
from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Simulator


@pytest.mark.parametrize(
    ("call", "taint"),
    [
        ("managed(4096)[0]", 1),
        ("cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(at))", 2),
        (
            "cuda.cuMemExportToShareableHandle(bytes(8), u64(create(2 << 20)[1]), 1, u64(0))",
            4,
        ),
        ("cuda.cuMemGetHandleForAddressRange(bytes(8), u64(at), size(1 << 21), 1, u64(0))", 4),
        ("create(2 << 20, handles=8)[0]", 32),
        ("create(2 << 20, handles=1)[0]", 0),
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


#: In place of NVIDIA's: PyTorch's library links it, and is loaded into a scope of its own.
CUPTI = """
int gpushare_sim_trace(void);
int cuptiSubscribe(void **out, void *callback, void *data)
{ *out = data; return callback == data ? gpushare_sim_trace() : 2; }
int cuptiActivityEnable(int kind) { return kind == 3 ? gpushare_sim_trace() : 7; }
"""
FRAMEWORK = """
int cuptiSubscribe(void **, void *, void *), cuptiActivityEnable(int);
int start(long data) { void *out; return cuptiSubscribe(&out, (void *)1, (void *)data); }
int trace(int kind) { return cuptiActivityEnable(kind); }
"""


@pytest.fixture
def framework(tmp_path: Path) -> str:
    """What loads a library that uses CUPTI, as ``import torch`` does."""
    cuda = native.sim_dir() / "libcuda.so.1"
    cupti = tmp_path / "libcupti.so.12"
    linked = "-Wl,--no-as-needed"
    compile_shared(CUPTI, cupti, "-Wl,-soname,libcupti.so.12", linked, str(cuda))
    needs = (linked, str(cupti), f"-Wl,-rpath,{tmp_path}")
    library = compile_shared(FRAMEWORK, tmp_path / "libframework.so", *needs)
    return f"framework = ctypes.CDLL({str(library)!r}, os.RTLD_LOCAL | os.RTLD_NOW)"


@pytest.mark.parametrize(
    ("call", "code", "taint"),
    [
        ("framework.start(ctypes.c_long(1))", 0, 16),
        ("framework.trace(3)", 0, 16),
        ("ctypes.CDLL('libcupti.so.12').cuptiActivityEnable(3)", 0, 16),
        ("framework.start(ctypes.c_long(2))", 2, 0),
        ("framework.trace(4)", 7, 0),
    ],
)
def test_a_process_that_cupti_traces_is_on_record_and_one_that_loads_it_is_not(
    machine: Simulator, half: Lease, framework: str, call: str, code: int, taint: int
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run(framework)
        assert half.slots()[kernel.pid].taints == 0
        before = half.slots()[kernel.pid].calls
        assert kernel.ask(call) == code
        assert half.slots()[kernel.pid].taints == taint
        assert half.slots()[kernel.pid].calls == before + 1


def test_without_a_lease_cupti_is_called_as_without_the_library(machine: Simulator, framework: str) -> None:
    with Worker(machine.env(LD_PRELOAD=str(native.preload_path()))) as kernel:
        kernel.run(framework)
        assert kernel.ask("[framework.start(ctypes.c_long(n)) for n in (1, 2)]") == [0, 2]


def test_cupti_that_is_not_loaded_is_not_initialized(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        assert kernel.ask("ctypes.CDLL(None).cuptiActivityEnable(3)") == 15
        assert half.slots()[kernel.pid].taints == 0


def test_every_taint_has_words() -> None:
    assert all(words_of([taint]) for taint in Taint)
    assert words_of([Taint.TRACED]) == "tracing with CUPTI (torch.profiler)"
