"""Every function of real CUDA, in its header and as its runtime asks for them, has a hook."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.programs import run
from tests.native.test_hooks import KINDS, NATIVE, compile_shared
from tests.simulator import Lease, Simulator

RUNTIMES = ["nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"]

#: What these answer is settled at cuInit, or needs no device: they never wait.
HARMLESS = re.compile(
    r"cuInit|cuDriverGetVersion|cuGetError\w+|cuGetExportTable|cuCtxGet(Current|Device|ApiVersion)"
    r"|cuDevice(ComputeCapability|CanAccessPeer|TotalMem)|cuDeviceGet(?!GraphMem|MemPool|DefaultMemPool)\w*"
)

#: Answers every name with a function that does nothing, and records each name with its caller.
LISTENING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static int nothing(void) { return 801; }
static int version(int *out) { *out = VERSION; return 0; }
static int answer(const char *symbol, void **function, void *caller)
{
    Dl_info from = {0};
    dladdr(caller, &from);
    fprintf(stderr, "asked %s %s\\n", symbol, from.dli_fname);
    *function = !strcmp(symbol, "cuDriverGetVersion") ? (void *)version : (void *)nothing;
    return 0;
}
__attribute__((visibility("default")))
int cuGetProcAddress(const char *symbol, void **function, int since, uint64_t flags)
{
    (void)since, (void)flags;
    return answer(symbol, function, __builtin_return_address(0));
}
__attribute__((visibility("default")))
int cuGetProcAddress_v2(const char *symbol, void **function, int since, uint64_t flags, int *status)
{
    if (status)
        *status = 0;
    (void)since, (void)flags;
    return answer(symbol, function, __builtin_return_address(0));
}
__attribute__((visibility("default"))) int cuDriverGetVersion(int *out) { return version(out); }
"""


def part(package: str, name: str) -> Path:
    """A file of NVIDIA's package, by its name."""
    found = [file for file in metadata.files(package) or () if re.fullmatch(name, file.name)]
    assert found, f"{package} has no {name}"
    return Path(str(found[0].locate()))


def symbols(header: str) -> set[str]:
    """The symbols behind a header's names, with those for streams of a thread's own."""
    routed = re.findall(r"#\s*define\s+(cu\w+)\s+__CUDA_API_(PTSZ|PTDS)\((cu\w+)\)", header)
    renamed = re.findall(r"#\s*define\s+(cu\w+)\s+(cu\w+)", header)
    names = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header))
    names |= {symbol for _, symbol in renamed} | {symbol for _, _, symbol in routed}
    return names | {f"{symbol}_{suffix.lower()}" for _, suffix, symbol in routed}


def plain(symbol: str) -> str:
    """Without what tells variants apart."""
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", symbol)


@pytest.mark.parametrize("package", RUNTIMES)
def test_every_function_of_cuda_is_counted_unless_it_is_harmless(package: str) -> None:
    found = symbols(part(package, r"cuda\.h").read_text(errors="replace"))
    assert len(found) > 400
    # cuda.h has these only as functions of its own, around the other ones.
    missing = found - KINDS.keys() - {"cuGetProcAddress_ptsz", "cuGetProcAddress_v2_ptsz"}
    assert sorted(symbol for symbol in missing if not HARMLESS.fullmatch(plain(symbol))) == []


def test_no_harmless_function_is_counted() -> None:
    # One is hooked for the devices that it shows, one for its size, and neither counts.
    assert [name for name in KINDS if HARMLESS.fullmatch(plain(name))] == ["cuInit", "cuDeviceTotalMem_v2"]


def test_every_launch_and_copy_is_work() -> None:
    # What is written out counts as work by itself (test_wake.py).
    moves = re.compile(r"cu(Memcpy|Memset|Launch|GraphLaunch|MemPrefetch)")
    kinds = {name: kind for name, kind in KINDS.items() if moves.match(name)}
    assert len(kinds) > 100
    assert {name: kind for name, kind in kinds.items() if kind not in ("WORK", "TYPED")} == {}


def test_written_out_hooks_know_every_version_of_their_function() -> None:
    """From CUDA 3.2 on: those before had sizes of 32 bits."""
    headers = (r"cudaTypedefs\.h", r"cudaGLTypedefs\.h", r"cudaEGLTypedefs\.h", r"cudaVDPAUTypedefs\.h")
    typedefs = "".join(part("nvidia-cuda-runtime", header).read_text() for header in headers)
    since: dict[str, set[int]] = {}
    for name, version in re.findall(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(?:_ptsz|_ptds)?\)", typedefs):
        since.setdefault(name, set()).add(int(version))
    ours: dict[str, set[int]] = {}
    table = re.findall(r"HOOK\(TYPED, (cu\w+), (\d+)\)", (NATIVE / "preload" / "hooks.h").read_text())
    for name, version in table:
        ours.setdefault(plain(name), set()).add(int(version))
    typed = {plain(name) for name, kind in KINDS.items() if kind == "TYPED"}
    written_out = {name for name in typed if re.match("cu(?!pti)", name)}
    assert ours.keys() == written_out
    # These take no sizes.
    whole = {
        "cuInit",
        "cuCtxDestroy",
        "cuArrayDestroy",
        "cuCtxDetach",
        "cuStreamDestroy",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuGLCtxCreate",
        "cuVDPAUCtxCreate",
    }
    whole |= {
        name
        for name in ours
        if re.match(r"cuGraphics|cuGLRegister|cuModuleLoad|cuModuleGetFunction|cuCtxSetLimit", name)
    }
    known = {name: {v for v in since[name] if v >= 3020 or name in whole} for name in ours}
    assert ours == known


@pytest.mark.parametrize("package", RUNTIMES)
def test_the_cuda_runtime_asks_the_library_for_all_its_functions(
    machine: Simulator, half: Lease, package: str
) -> None:
    runtime = part(package, r"libcudart\.so\.\d+")
    version = int(metadata.version(package).split(".")[0]) * 1000 + 50
    compile_shared(
        LISTENING, machine.folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", f"-DVERSION={version}"
    )
    env = machine.env(**half.env(), LD_LIBRARY_PATH=str(machine.folder))
    source = f"import ctypes; ctypes.CDLL({str(runtime)!r}).cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))"
    done = run(sys.executable, "-c", source, env=env, check=True)
    asked = re.findall(r"^asked (\w*) (.*)$", done.stderr, re.M)
    assert {caller for _, caller in asked} == {str(native.preload_path())}
    names = {name for name, _ in asked} - {""}
    assert len(names) > 250
    hooked = {plain(symbol) for symbol in KINDS}
    assert sorted(name for name in names - hooked if not HARMLESS.fullmatch(name)) == []
