"""Every function of hooks.h is met by the preload library, and passed on untouched."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.native import build
from tests.native.programs import compiled, run
from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Simulator

NATIVE = build.NATIVE
HOOKS = re.findall(
    r"\bHOOK\((\w+), (\w+)(?:, \d+)?\)", (NATIVE / "preload" / "hooks.h").read_text().partition("*/")[2]
)
KINDS = {name: kind for kind, name in HOOKS}
SPARES = 1024  # GPUSHARE_SPARES of preload_stubs.h
EXPORTS = re.findall(
    r"^EXPORT(?:_STREAM)?\((\w+), (\w+), (\d+)(?:, (\w+))?\)",
    (NATIVE / "simulator" / "sim_exports.h").read_text(),
    re.M,
)

#: A driver that has every hooked function: each answers its place in hooks.h, if it was passed
#: 1 to 10 and 1.0 to 8.0.  Its cuGetProcAddress answers the symbols' addresses, or, asked for
#: version 99999 or with flag 4, those of variants that have no symbol.
EVERY_FUNCTION = """
#include <stdint.h>
#include <string.h>
#define PARAMETERS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, \\
    double k, double l, double m, double n, double o, double p, double q, double r
#define INTACT (a == 1 && b == 2 && c == 3 && d == 4 && e == 5 && f == 6 && g == 7 && h == 8 && i == 9 && \\
    j == 10 && k == 1 && l == 2 && m == 3 && n == 4 && o == 5 && p == 6 && q == 7 && r == 8)
enum {
#define HOOK(kind, name, ...) INDEX_##name,
#include "preload/hooks.h"
#undef HOOK
    COUNT
};
#define cuGetProcAddress cuGetProcAddress_stub
#define cuGetProcAddress_v2 cuGetProcAddress_v2_stub
#define HOOK(kind, name, ...) \\
    __attribute__((visibility("default"))) int name(PARAMETERS) { return INTACT ? INDEX_##name : -1; } \\
    static int newer_##name(PARAMETERS) { return INTACT ? 10000 + INDEX_##name : -1; }
#include "preload/hooks.h"
#undef HOOK
static const struct { const char *name; void *function, *newer; } table[] = {
#define HOOK(kind, name, ...) {#name, (void *)name, (void *)newer_##name},
#include "preload/hooks.h"
#undef HOOK
};
#undef cuGetProcAddress
#undef cuGetProcAddress_v2
__attribute__((visibility("default")))
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    (void)status;
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(table[i].name, symbol)) {
            *function = version == 99999 || flags & 4 ? table[i].newer : table[i].function;
            if (flags >= 8) /* one more variant, which nothing calls */
                *function = (char *)*function + flags;
            return 0;
        }
    return 500;
}
__attribute__((visibility("default")))
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, 0);
}
"""


def compile_shared(source: str, output: Path, *flags: str) -> Path:
    """A shared library out of a text."""
    output.with_suffix(".c").write_text(source)
    shared = ["-std=gnu11", "-fPIC", "-shared", f"-I{NATIVE}"]
    return compiled(output, *shared, *flags, output.with_suffix(".c"))


@pytest.fixture(scope="module")
def strange_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the driver above lies, compiled."""
    folder = tmp_path_factory.mktemp("driver")
    compile_shared(EVERY_FUNCTION, folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic")
    return folder


@pytest.fixture
def strange_driver(half: Lease, machine: Simulator, strange_folder: Path) -> Worker:
    """A process of a lease with the libcuda.so.1 above."""
    env = machine.env(**half.env(), LD_LIBRARY_PATH=str(strange_folder))
    worker = Worker(env, open_gpu=False)
    worker.run("""
cuda = ctypes.CDLL("libcuda.so.1")
arguments = [ctypes.c_long(i) for i in range(1, 11)] + [ctypes.c_double(i) for i in range(1, 9)]
def call(name): return getattr(cuda, name)(*arguments)
def asked(name, version, flags=0):
    out = ctypes.c_void_p()
    flags = ctypes.c_uint64(flags)
    assert cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(out), version, flags, None) == 0
    return out.value
def call_asked(name, version): return ctypes.CFUNCTYPE(ctypes.c_int)(asked(name, version))(*arguments)
""")
    return worker


def test_hooks_are_listed_once() -> None:
    assert len(HOOKS) == len(KINDS) > 600
    assert set(KINDS.values()) == {"TYPED", "WORK", "HOST", "CALL", "QUERY", "GATE", "REFUSE"}
    _comment, _, lines = (NATIVE / "preload" / "hooks.h").read_text().partition("*/")
    assert lines.count("HOOK(") == len(HOOKS)


def test_every_jumping_hook_passes_its_arguments_to_its_own_function(strange_driver: Worker) -> None:
    jumping = [name for name, kind in KINDS.items() if kind not in ("TYPED", "REFUSE")]
    places = {name: index for index, name in enumerate(KINDS)}
    with strange_driver as kernel:
        for _ in range(2):  # the first call looks the function up, the second jumps straight
            answers = kernel.ask(f"{{name: call(name) for name in {jumping!r}}}")
            assert answers == {name: places[name] for name in jumping}


def test_every_jumping_hook_counts_once(strange_driver: Worker, half: Lease) -> None:
    working = [name for name, kind in KINDS.items() if kind in ("WORK", "HOST")]
    waiting = [name for name, kind in KINDS.items() if kind in ("CALL", "GATE")]
    asking = [name for name, kind in KINDS.items() if kind == "QUERY"]
    expected = {"work": 0, "calls": 0, "queries": 0}
    with strange_driver as kernel:
        for _ in range(2):
            for names, counters in ((working, "work calls"), (waiting, "calls"), (asking, "queries")):
                kernel.run(f"for name in {names!r}: call(name)")
                for counter in counters.split():
                    expected[counter] += len(names)
                slot = half.slots()[kernel.pid]
                assert {counter: getattr(slot, counter) for counter in expected} == expected


def test_every_written_out_hook_counts_once_too(strange_driver: Worker, half: Lease) -> None:
    """Also when the driver refuses, as this one does.  Routing and sizes do not count as calls."""
    silent = {"cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "cuDeviceTotalMem_v2", "cuMemGetInfo_v2"}
    typed = [n for n, kind in KINDS.items() if kind == "TYPED" and n not in silent and n.startswith("cu")]
    assert len(typed) > 30
    with strange_driver as kernel:
        kernel.run("class Handle(ctypes.Structure): _fields_ = [('bytes', ctypes.c_char * 64)]")
        kernel.run("call('cuMemcpy')")
        for count, name in enumerate(typed, start=2):
            zeros = "0, Handle(), 0" if "cuIpcOpen" in name else ", ".join("00000000")
            assert kernel.ask(f"cuda.{name}({zeros})") != 0
            slot = half.slots()[kernel.pid]
            assert slot.calls + slot.queries == count, name


def test_functions_with_32_bit_sizes_are_refused_to_a_lease(strange_driver: Worker) -> None:
    with strange_driver as kernel:
        refused = [name for name, kind in KINDS.items() if kind == "REFUSE"]
        assert "cuMemAlloc" in refused
        assert kernel.ask(f"[call(name) for name in {refused!r}]") == [2] * len(refused)


def test_variants_without_a_symbol_are_counted_too(strange_driver: Worker, half: Lease) -> None:
    """A driver newer than this library, or one that answers other addresses than its symbols."""
    names = ["cuMemcpy", "cuLaunchKernel", "cuStreamQuery", "cuGreenCtxCreate", "cuMemcpy"]
    places = {name: index for index, name in enumerate(KINDS)}
    with strange_driver as kernel:
        for name in names:
            for _ in range(2):
                assert kernel.ask(f"call_asked({name!r}, 99999)") == 10000 + places[name]
        slot = half.slots()[kernel.pid]
        assert (slot.calls, slot.queries) == (8, 2)
        assert kernel.ask("asked('cuMemcpy', 99999) == asked('cuMemcpy', 99999)")
        assert kernel.ask("asked('cuMemcpy', 12000) != asked('cuMemcpy', 99999)")


@pytest.mark.parametrize(
    ("name", "version", "per_thread", "hook"),
    [
        ("cuGetProcAddress", 11030, False, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, False, "cuGetProcAddress_v2"),
        ("cuCtxDestroy", 3020, False, "cuCtxDestroy"),
        ("cuCtxDestroy", 13000, False, "cuCtxDestroy_v2"),
        ("cuIpcOpenMemHandle", 10020, False, "cuIpcOpenMemHandle"),
        ("cuIpcOpenMemHandle", 11080, False, "cuIpcOpenMemHandle_v2"),
        ("cuMemAllocAsync", 11080, False, "cuMemAllocAsync"),
        ("cuMemAllocAsync", 11080, True, "cuMemAllocAsync_ptsz"),
        ("cuMemFreeAsync", 13000, True, "cuMemFreeAsync_ptsz"),
    ],
)
def test_of_a_strange_variant_the_hook_is_that_of_the_version_and_stream_asked_for(
    strange_driver: Worker, name: str, version: int, per_thread: bool, hook: str
) -> None:
    """What takes an account is written out: another version's would take other arguments."""
    with strange_driver as kernel:
        kernel.run(f"ours = getattr(ctypes.CDLL({str(native.preload_path())!r}), {hook!r})")
        flags = 6 if per_thread else 4
        assert kernel.ask(f"asked({name!r}, {version}, {flags}) == ctypes.cast(ours, ctypes.c_void_p).value")


def test_more_strange_variants_than_spare_hooks_still_work(strange_driver: Worker, half: Lease) -> None:
    """Which is said once; and for every function that hooks.h names there is one."""
    typed = {re.sub(r"_v\d$", "", name) for name, kind in KINDS.items() if kind == "TYPED"}
    counted = [
        name for name, kind in KINDS.items() if kind in ("WORK", "CALL", "QUERY") and name not in typed
    ]
    places = {name: index for index, name in enumerate(KINDS)}
    assert 500 < len(counted) < SPARES
    with strange_driver as kernel:
        answers = kernel.ask(f"{{name: call_asked(name, 99999) for name in {counted!r}}}")
        assert answers == {name: 10000 + places[name] for name in counted}
        kernel.run(f"for name in {counted!r}: call_asked(name, 99999)")
        slot = half.slots()[kernel.pid]
        assert slot.calls + slot.queries == 2 * len(counted)
        more = f"[asked('cuMemcpy', 99999, 8 * (1 + i)) for i in range({SPARES})]"
        assert len(set(kernel.ask(more))) == SPARES
        kernel.start("os._exit(0)")
        assert kernel.stderr().count("all 1024 spare hooks are taken") == 1


@pytest.fixture
def addresses(machine: Simulator, half: Lease) -> Worker:
    """A process of a lease that tells addresses."""
    worker = Worker(machine.env(**half.env()), open_gpu=False)
    worker.run(f"""
cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")
ours = ctypes.CDLL({str(native.preload_path())!r})
def address(library, name): return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
def in_front(library, name):
    return hasattr(ours, name) and address(library, name) == address(ours, name)
def asked(key):
    name, version, flags = key.split()
    out = ctypes.c_void_p()
    flags = ctypes.c_uint64(int(flags))
    code = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(out), int(version), flags, None)
    return out.value if code == 0 else code
""")
    return worker


def test_dlsym_answers_the_hook_where_the_driver_has_the_function(addresses: Worker) -> None:
    symbols = {symbol + suffix for _, symbol, _, suffix in EXPORTS} | {symbol for _, symbol, _, _ in EXPORTS}
    with addresses as kernel:
        met = set(kernel.ask(f"[name for name in {sorted(symbols)!r} if in_front(cuda, name)]"))
        assert met == symbols & set(KINDS)
        assert kernel.ask("in_front(nvml, 'nvmlDeviceGetMemoryInfo')")
        assert kernel.ask("in_front(nvml, 'nvmlDeviceGetMemoryInfo_v2')")
        assert not kernel.ask("hasattr(cuda, 'cuGraphUpload')")  # the simulated driver has none


def test_cu_get_proc_address_answers_the_hook_of_the_right_variant(addresses: Worker) -> None:
    """Where two symbols of the driver are one function, the hook of either will do."""
    asked = {
        f"{base} {since} {flags}": symbol + (suffix if flags == 2 else "")
        for base, symbol, since, suffix in EXPORTS
        for flags in (0, 1, 2)
    }
    with addresses as kernel:
        wrong = kernel.ask(f"""[
            key for key, symbol in {asked!r}.items()
            if asked(key) not in [address(ours if symbol in {set(KINDS)!r} else cuda, symbol),
                                  address(ours if symbol in {set(KINDS)!r} else cuda, symbol.split("_pt")[0])]
        ]""")
        assert wrong == []
        assert kernel.ask("asked('cuGraphUpload 13000 0')") == 500
        assert kernel.ask("asked('cuMemAlloc 2000 0')") == 500


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump: apt-get install binutils")
def test_dlsym_ends_in_a_jump() -> None:
    """A call to glibc's dlsym would name this library as the one that asks, for ever."""
    shown = run(
        "objdump", "-d", "--no-show-raw-insn", "--disassemble=dlsym", native.preload_path(), check=True
    ).stdout
    body = [
        line.split(":", 1)[1].split("#")[0].strip()
        for line in shown.splitlines()
        if re.match(r" +[0-9a-f]+:", line)
    ]
    assert body, shown
    jump = r"jmp +\*0x[0-9a-f]+\(%rip\)" if platform.machine() == "x86_64" else r"br\tx\d+|br +x\d+"
    assert re.fullmatch(jump, body[-1]), body
    # What it calls is only our own look into the table.
    calls = [line for line in body if re.match(r"(call|bl)\b", line)]
    assert len(calls) == 1, body


def test_dlsym_still_knows_its_caller(machine: Simulator, half: Lease) -> None:
    """A library that looks for the next one of its name must not find itself."""
    source = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <sys/types.h>
    static int depth;
    pid_t getppid(void)
    {
        pid_t (*next)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "getppid");
        return depth++ ? -1 : next();
    }
    """
    wrapper = compile_shared(source, machine.folder / "libwrapper.so")
    env = half.env()
    env["LD_PRELOAD"] += f":{wrapper}"
    with Worker(machine.env(**env)) as kernel:
        assert kernel.ask("ctypes.CDLL(None).getppid()") == os.getpid()
        assert kernel.ask("gpu.memory()[1]") == 40 * GIB


def test_a_library_opened_with_dlmopen_passes_the_library_by(machine: Simulator, half: Lease) -> None:
    """A known hole (docs/isolation.md): LD_PRELOAD does not reach into another namespace (dlmopen(3))."""
    with Worker(machine.env(**half.env()), open_gpu=False) as kernel:
        kernel.run("""
libc, new_namespace, void = ctypes.CDLL(None), ctypes.c_long(-1), ctypes.c_void_p
libc.dlmopen.restype = libc.dlsym.restype = void
another = void(libc.dlmopen(new_namespace, b"libcuda.so.1", os.RTLD_NOW))
def call(name, *arguments): return ctypes.CFUNCTYPE(ctypes.c_int)(libc.dlsym(another, name))(*arguments)
context, at = void(), ctypes.c_uint64()
assert call(b"cuInit", 0) == 0
assert call(b"cuDevicePrimaryCtxRetain", ctypes.byref(context), 0) == 0
assert call(b"cuCtxSetCurrent", context) == 0
""")
        assert kernel.ask(f"call(b'cuMemAlloc_v2', ctypes.byref(at), ctypes.c_size_t({60 * GIB}))") == 0
        assert machine.device_used(0) == 60 * GIB
        assert half.slots() == {}  # so the lease is not put to sleep: its library is not loaded


def test_a_program_linked_against_the_driver_is_limited_too(machine: Simulator, half: Lease) -> None:
    source = machine.folder / "linked.c"
    source.write_text("""
    #include <stddef.h>
    #include <stdint.h>
    #include <stdio.h>
    int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int);
    int cuCtxSetCurrent(void *), cuMemAlloc_v2(uint64_t *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
    int main(void)
    {
        int device;
        void *context;
        uint64_t at;
        size_t room, total;
        if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) ||
            cuCtxSetCurrent(context) || cuMemGetInfo_v2(&room, &total))
            return 1;
        int first = cuMemAlloc_v2(&at, (size_t)40 << 30);
        printf("%zu %d %d", total, first, cuMemAlloc_v2(&at, 1));
        return 0;
    }
    """)
    program = compiled(machine.folder / "linked", source, native.sim_dir() / "libcuda.so.1")
    done = run(program, env=machine.env(**half.env()), check=True)
    assert done.stdout == f"{40 * GIB} 0 2"
    outside = machine.env(LD_PRELOAD=str(native.preload_path()))
    done = run(program, env=outside, check=True)
    assert done.stdout == f"{80 * GIB} 0 0"
