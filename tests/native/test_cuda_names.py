"""Real CUDA's functions, in its header and as its runtime asks for them, and who stands in front of them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.test_hooks import KINDS, NATIVE, compile_shared
from tests.simulator import Lease, Simulator

RUNTIMES = ["nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"]

#: Nothing of these launches work or manages what lies on the device: nobody waits in them for a
#: process that is asleep.  Display interfaces (GL, EGL, VDPAU) are none that a notebook server has.
NEEDS_NONE = re.compile(
    "|".join([
        r"cu\w*Get(?!ProcAddress)\w*", r"cu\w+Query", r"cuInit", r"cuDevice(ComputeCapability|TotalMem)",
        r"cu\w+(CanAccessPeer|IsCapturing|IsLoaded|EnumerateKernels|EnumerateFunctions)", r"cuOccupancy\w+",
        r"cuEventElapsedTime\w*", r"cuLogs\w+", r"cuCoredump\w+", r"cuProfiler\w+", r"cuCheckpoint\w+",
        # The host's own: graphs until they are made executable, compilers, encoders, counts of references.
        r"cuGraph(?!Launch|Upload|Instantiate|ExecUpdate|ExecDestroy|AddMemAllocNode|ics(Map|Unmap)Res)\w+",
        r"cuLink\w+", r"cuTensorMap\w+", r"cuUserObject\w+", r"cuDev(Sm)?Resource\w+", r"cuCtxFromGreenCtx",
        # Settings of launches to come.
        r"cuParam\w+", r"cuTexRef\w+", r"cuSurfRef\w+", r"cuFuncSet(?!Attribute)\w+", r"cuKernelSet\w+",
        r"cuCtxSet(CacheConfig|SharedMemConfig|Flags)", r"cuThreadExchangeStreamCaptureMode",
        r"cuStream(CopyAttributes|SetAttribute|UpdateCaptureDependencies\w*)", r"cuPointerSetAttribute",
        r"cuDevice(SetMemPool|SetGraphMemAttribute|\w*egisterAsyncNotification)", r"cuMemSetMemPool",
        # Of what was refused or noted when it was made.
        r"cuMemFree", r"cuDestroyExternal\w+", r"cuImportExternalSemaphore", r"cuFlushGPUDirectRDMAWrites",
        r"cu(GL|EGL|VDPAU)\w+",
    ])
)  # fmt: skip

#: Answers every name with a function that does nothing, and writes down what was asked by whom.
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
def test_every_function_of_cuda_is_hooked_or_needs_none(package: str) -> None:
    found = symbols(part(package, r"cuda\.h").read_text(errors="replace"))
    assert len(found) > 400
    # cuda.h has these only as functions of its own, around the other ones.
    missing = found - KINDS.keys() - {"cuGetProcAddress_ptsz", "cuGetProcAddress_v2_ptsz"}
    assert sorted(symbol for symbol in missing if not NEEDS_NONE.fullmatch(plain(symbol))) == []


def test_nothing_is_hooked_that_is_said_to_need_none() -> None:
    named = {plain(symbol) for symbol in KINDS}
    both = {name for name in named if NEEDS_NONE.fullmatch(name)}
    # These manage what lies on the device, or report on it, by names like those of queries; or
    # only an older variant of theirs needs none.
    assert both == {
        "cuDeviceTotalMem", "cuEventQuery", "cuFuncGetAttribute", "cuIpcGetEventHandle", "cuIpcGetMemHandle",
        "cuKernelGetFunction", "cuLibraryGetGlobal", "cuLibraryGetKernel", "cuLibraryGetManaged",
        "cuLibraryGetModule", "cuMemFree", "cuMemGetInfo", "cuModuleGetFunction", "cuModuleGetGlobal",
        "cuStreamQuery",
    }  # fmt: skip


def test_written_out_hooks_know_every_version_of_their_function() -> None:
    """From CUDA 3.2 on: those before had sizes of 32 bits."""
    typedefs = part("nvidia-cuda-runtime", r"cudaTypedefs\.h").read_text()
    since: dict[str, set[int]] = {}
    for name, version in re.findall(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(?:_ptsz|_ptds)?\)", typedefs):
        since.setdefault(name, set()).add(int(version))
    ours: dict[str, set[int]] = {}
    table = re.findall(r'\{"(cu\w+)", (\d+),\s+HOOK_\w+,\s+HOOK_\w+\}', (NATIVE / "preload.c").read_text())
    for name, version in table:
        ours.setdefault(name, set()).add(int(version))
    written_out = {plain(name) for name, kind in KINDS.items() if kind == "TYPED" and name.startswith("cu")}
    assert ours.keys() == written_out
    whole = {"cuCtxDestroy", "cuArrayDestroy"}  # take no sizes
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
    done = subprocess.run(
        [sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    asked = re.findall(r"^asked (\w*) (.*)$", done.stderr, re.M)
    assert {caller for _, caller in asked} == {str(native.preload_path())}
    names = {name for name, _ in asked} - {""}
    assert len(names) > 250
    hooked = {plain(symbol) for symbol in KINDS}
    assert sorted(name for name in names - hooked if not NEEDS_NONE.fullmatch(name)) == []
