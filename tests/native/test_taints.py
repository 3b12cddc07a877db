"""What prevents a process from being suspended is on record, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.gpu.leases.files import Taint, words_of
from tests.native.calls import in_lease
from tests.native.test_cuda_names import part, symbols
from tests.native.test_hooks import KINDS, compile_shared
from tests.native.test_pools import KEEP
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
        ("cuda.cuCtxEnablePeerAccess(ctypes.c_void_p(int(other._context)), 0)", 8),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), ctypes.byref(Access(1, 0, 3)), size(1))", 0),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), (Access * 2)((1, 0, 3), (1, 1, 3)), size(2))", 8),
        ("cuda.cuMemSetAccess(u64(mapped()), size(2 << 20), ctypes.byref(Access(1, 1, 0)), size(1))", 0),
        ("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 1, 3)), size(1))", 8),
        ("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 1, 0)), size(1))", 0),
        ("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 0, 3)), size(1))", 0),
        ("cuda.cuMemPoolSetAccess(u64(created(0, HOST)), ctypes.byref(Access(1, 1, 3)), size(1))", 0),
        ("cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(1)) - 1", 0),
        ("created(0, DEVICE, MANAGED) and 0", 1),
        ("created(0, 0, MANAGED) and 0", 1),
        ("created(0, HOST) and 0", 0),
        ("default(DEVICE, MANAGED) and 0", 1),
        ("default(HOST, MANAGED, 'cuMemGetMemPool') and 0", 1),
        ("default(DEVICE, PINNED, 'cuMemGetMemPool') and 0", 0),
        ("default(HOST) and 0", 0),
        ("set_pool(MANAGED, created(0, DEVICE, MANAGED))", 1),
        ("set_pool(PINNED, created(0))", 0),
        ("set_pool(MANAGED, created(0)) - 1", 0),
    ],
)
def test_what_prevents_suspension_is_on_record(machine: Simulator, call: str, taint: int) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(i), 40 * GIB) for i in (0, 1)])
    with in_lease(machine, lease) as kernel:
        kernel.run(KEEP)
        kernel.run(
            "other = demo_gpu.open(1); cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))\n"
            "at = alloc(1 << 21)[1]"
        )
        kernel.run(
            "def set_pool(kind, pool):\n"
            "    return cuda.cuMemSetMemPool((ctypes.c_int * 2)(DEVICE, 0), kind, ctypes.c_void_p(pool))"
        )
        assert lease.slots()[kernel.pid].taints == 0
        assert kernel.ask(call) == 0
        assert lease.slots()[kernel.pid].taints == taint


def test_a_device_that_is_alone_has_no_peers(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half, CUDA_VISIBLE_DEVICES=machine.uuid(0)) as kernel:
        assert kernel.ask("cuda.cuMemPoolSetAccess(pool(), ctypes.byref(Access(1, 0, 3)), size(1))") == 0
        assert half.slots()[kernel.pid].taints == 0


#: Finds the driver past the library, as libraries opened with RTLD_DEEPBIND do.
UNSEEN = """
int cuMemGetDefaultMemPool(void **, void *, int);
int unseen_pool(void **out, int type)
{ int location[2] = {1, 0}; return cuMemGetDefaultMemPool(out, location, type); }
"""


@pytest.mark.parametrize(("kind", "taint"), [("PINNED", 0), ("MANAGED", 1)])
def test_an_allocation_from_a_managed_pool_that_no_hook_saw_is_on_record(
    machine: Simulator, half: Lease, kind: str, taint: int
) -> None:
    driver = native.sim_dir() / "libcuda.so.1"
    library = compile_shared(UNSEEN, machine.folder / "unseen.so", "-Wl,--no-as-needed", str(driver))
    with in_lease(machine, half) as kernel:
        kernel.run(KEEP)
        kernel.run(f"library, unseen = ctypes.CDLL({str(library)!r}, os.RTLD_DEEPBIND), ctypes.c_void_p()")
        assert kernel.ask(f"library.unseen_pool(ctypes.byref(unseen), {kind})") == 0
        assert half.slots()[kernel.pid].taints == 0
        assert kernel.ask("from_pool(unseen.value, 1 << 30)[0]") == 0
        slot = half.slots()[kernel.pid]
        assert (slot.taints, slot.used_bytes[0]) == (taint, GIB)


#: A driver whose functions of graphics interfaces answer `code`; the second of two variables is managed.
GRAPHICS = """
int code;
int cuModuleGetGlobal_v2(unsigned long *out, void *bytes, void *module, const char *name)
{ (void)bytes, (void)module; *out = name[0] == 'm' ? 0x2000 : 0x1000; return code; }
int cuPointerGetAttribute(int *out, int attribute, unsigned long at)
{ *out = at == 0x2000; return attribute != 8; }
int cuLibraryGetManaged(void) { return code; }
int cuCtxCreate_v4(void **out) { *out = &code; return code; }
"""

#: Gives to another what memory it already shares, takes it back, or asks.
SHARES_NOTHING_NEW = re.compile(
    r"cuGLInit|cu(GL|WGL|VDPAU)GetDevices?(_v2)?|cu\w+(Unmap|Unregister|Disconnect|MapFlags|GetMapped)\w*"
    r"|cuGLMapBufferObject\w*|cuEGLStream\w+Frame"
)


def graphics() -> list[str]:
    found = symbols(
        "".join(part("nvidia-cuda-runtime", f"cuda{name}.h").read_text() for name in ("GL", "EGL", "VDPAU"))
    )
    found |= {"cuGraphicsMapResources", "cuGraphicsMapResources_ptsz", "cuImportExternalSemaphore"}
    return sorted(name for name in found if not SHARES_NOTHING_NEW.fullmatch(name))


@pytest.fixture
def driver_folder(machine: Simulator) -> Path:
    """Where the driver above lies, compiled."""
    made = {True: "*out = &code; ", False: ""}
    functions = "".join(
        f"int {name}(void **out) {{ (void)out; {made['CtxCreate' in name]}return code; }}\n"
        for name in graphics()
    )
    own = ", ".join(map(str, bytes.fromhex(machine.uuid(0)[4:].replace("-", ""))))
    functions += (
        "int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)\n"
        f"{{ for (int i = 0; i < 16; i++) uuid[i] = (unsigned char[]){{{own}}}[i]; return device; }}\n"
    )
    compile_shared(GRAPHICS + functions, machine.folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    return machine.folder


def taints_of(machine: Simulator, lease: Lease, driver_folder: Path, call: str) -> list[int]:
    """After the call failed, and after it succeeded."""
    taints = []
    with Worker(machine.env(**lease.env(), LD_LIBRARY_PATH=str(driver_folder)), open_gpu=False) as kernel:
        kernel.run("cuda = ctypes.CDLL('libcuda.so.1'); code = ctypes.c_int.in_dll(cuda, 'code')")
        kernel.run(
            "def call(name, *more): return getattr(cuda, name)(ctypes.byref(ctypes.c_uint64()), *more)"
        )
        for code in (999, 0):
            kernel.run(f"code.value = {code}")
            assert kernel.ask(call) == code
            taints.append(lease.slots()[kernel.pid].taints)
    return taints


def test_every_function_that_shares_with_graphics_is_on_record(
    machine: Simulator, half: Lease, driver_folder: Path
) -> None:
    names = graphics()
    assert len(names) > 15
    assert [name for name in names if KINDS[name] != "TYPED"] == []
    for name in names:
        assert taints_of(machine, half, driver_folder, f"call({name!r}, 0, 0, 0, 0)") == [0, 4], name


@pytest.mark.parametrize(
    ("call", "taint"),
    [
        ("call('cuModuleGetGlobal_v2', None, None, b'plain')", 0),
        ("call('cuModuleGetGlobal_v2', None, None, b'managed')", 1),
        ("call('cuLibraryGetManaged', None, None, b'managed')", 1),
        ("call('cuCtxCreate_v4', None, 0, 0)", 0),
        ("call('cuCtxCreate_v4', (ctypes.c_void_p * 3)(None, None, None), 0, 0)", 0),
        ("call('cuCtxCreate_v4', (ctypes.c_void_p * 3)(None, None, 8), 0, 0)", 4),
    ],
)
def test_managed_variables_and_contexts_for_graphics_are_on_record(
    machine: Simulator, half: Lease, driver_folder: Path, call: str, taint: int
) -> None:
    assert taints_of(machine, half, driver_folder, call) == [0, taint]


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
