"""A process that shows which driver functions wait; it runs one command per line (see `driver_facts`).

open       the primary context of the device                   -> "open CODE"
prepare    a thread for each function, in the context, that
           calls it once while the process runs                -> "prepare CODE"
names      the functions that answered 0 then                  -> "names NAME,..."
failed     the other functions, which are not tested           -> "failed NAME:CODE,..." or "failed -"
blocked S  call each again, each in its thread; after S
           seconds, the waiting ones and their system calls    -> "blocked {JSON}"
call NAME  call one of them in the main thread                 -> "call CODE"
addresses  the answers of cuGetProcAddress for hooks.h         -> "addresses {JSON}"
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_gpushare import native
from jupyter_gpushare.gpu.driver.probe import KERNEL, PTX
from tests.gpu_real.commands import serve

# The maximum seconds of a function while the process runs.
PROOF_S = 5.0
# Versions that programs pass to cuGetProcAddress: each CUDA version with new variants of functions.
VERSIONS = (
    *(2000, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050, 8000, 9000, 9020, 10000, 10010, 10020),
    *(11000, 11010, 11020, 11030, 11040, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050),
    *(12060, 12080, 12090, 13000, 13010, 13020, 13030, 13040, 13050),
)
PER_THREAD = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM; 1: the legacy stream

cuda = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()
block = ctypes.c_uint64()
stream, event, other_event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
module, function = ctypes.c_void_p(), ctypes.c_void_p()


def open_() -> int:
    return int(
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )


def functions() -> dict[str, Callable[[], Any]]:
    """Return functions of this driver, with arguments that are valid while the process runs."""
    out, size, word = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
    at, single = ctypes.c_void_p(), ctypes.c_float()
    few, host = ctypes.c_size_t(4096), ctypes.create_string_buffer(4096)
    words = [ctypes.c_uint64(value) for value in (block.value, 1, 7)]
    given = (ctypes.c_void_p * len(words))(*(ctypes.addressof(each) for each in words))
    pointer = ctypes.byref
    known: dict[str, Callable[[], Any]] = {
        "cuCtxSynchronize": lambda: cuda.cuCtxSynchronize(),
        "cuMemAlloc_v2": lambda: cuda.cuMemAlloc_v2(pointer(ctypes.c_uint64()), few),
        "cuLaunchKernel": lambda: cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, given, None),
        "cuMemcpyDtoH_v2": lambda: cuda.cuMemcpyDtoH_v2(host, block, few),
        "cuMemsetD8_v2": lambda: cuda.cuMemsetD8_v2(block, ctypes.c_ubyte(1), few),
        "cuStreamSynchronize": lambda: cuda.cuStreamSynchronize(stream),
        "cuStreamQuery": lambda: cuda.cuStreamQuery(stream),
        "cuEventSynchronize": lambda: cuda.cuEventSynchronize(event),
        "cuEventQuery": lambda: cuda.cuEventQuery(event),
        "cuEventElapsedTime": lambda: cuda.cuEventElapsedTime(pointer(single), event, other_event),
        "cuEventElapsedTime_v2": lambda: cuda.cuEventElapsedTime_v2(pointer(single), event, other_event),
        "cuStreamIsCapturing": lambda: cuda.cuStreamIsCapturing(stream, pointer(word)),
        "cuStreamGetCaptureInfo_v2": lambda: cuda.cuStreamGetCaptureInfo_v2(
            stream, pointer(word), None, None, None, None
        ),
        "cuStreamGetCtx": lambda: cuda.cuStreamGetCtx(stream, pointer(at)),
        "cuPointerGetAttribute": lambda: cuda.cuPointerGetAttribute(pointer(word), 2, block),
        "cuMemGetAddressRange_v2": lambda: cuda.cuMemGetAddressRange_v2(pointer(out), pointer(size), block),
        "cuMemGetInfo_v2": lambda: cuda.cuMemGetInfo_v2(pointer(size), pointer(ctypes.c_size_t())),
        "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(pointer(at)),
        "cuCtxGetDevice": lambda: cuda.cuCtxGetDevice(pointer(word)),
        "cuCtxGetFlags": lambda: cuda.cuCtxGetFlags(pointer(ctypes.c_uint())),
        "cuCtxGetLimit": lambda: cuda.cuCtxGetLimit(pointer(size), 0),
        "cuCtxGetStreamPriorityRange": lambda: cuda.cuCtxGetStreamPriorityRange(pointer(word), None),
        "cuCtxSetCurrent": lambda: cuda.cuCtxSetCurrent(context),
        "cuDeviceGetAttribute": lambda: cuda.cuDeviceGetAttribute(pointer(word), 1, device),
        "cuDeviceGetMemPool": lambda: cuda.cuDeviceGetMemPool(pointer(at), device),
        "cuDevicePrimaryCtxGetState": lambda: cuda.cuDevicePrimaryCtxGetState(
            device, pointer(ctypes.c_uint()), pointer(word)
        ),
        "cuDevicePrimaryCtxRetain": lambda: cuda.cuDevicePrimaryCtxRetain(pointer(at), device),
        "cuModuleLoadData": lambda: cuda.cuModuleLoadData(pointer(ctypes.c_void_p()), PTX),
        "cuModuleGetFunction": lambda: cuda.cuModuleGetFunction(pointer(ctypes.c_void_p()), module, KERNEL),
        "cuFuncGetAttribute": lambda: cuda.cuFuncGetAttribute(pointer(word), 0, function),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda: (
            cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(pointer(word), function, 32, ctypes.c_size_t(0))
        ),
        "cuGraphCreate": lambda: cuda.cuGraphCreate(pointer(ctypes.c_void_p()), 0),
        "cuLinkCreate_v2": lambda: cuda.cuLinkCreate_v2(0, None, None, pointer(ctypes.c_void_p())),
        "cuStreamCreate": lambda: cuda.cuStreamCreate(pointer(ctypes.c_void_p()), 0),
        "cuEventCreate": lambda: cuda.cuEventCreate(pointer(ctypes.c_void_p()), 0),
        "cuMemHostAlloc": lambda: cuda.cuMemHostAlloc(pointer(ctypes.c_void_p()), few, 0),
        "cuDriverGetVersion": lambda: cuda.cuDriverGetVersion(pointer(word)),
    }
    return {name: call for name, call in known.items() if hasattr(cuda, name)}


class Caller(threading.Thread):
    """Calls a function once to test it, and once more on request."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self._again = threading.Event()
        self.proved = threading.Event()
        self.codes: list[int] = []

    def run(self) -> None:
        code = cuda.cuCtxSetCurrent(context)
        self.codes.append(int(code or self._call()))
        self.proved.set()
        self._again.wait()
        self.codes.append(int(self._call()))

    def again(self) -> None:
        """Let the thread call the function once more."""
        self._again.set()


callers: list[Caller] = []


def prepare() -> int:
    code = int(
        cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20))
        or cuda.cuStreamCreate(ctypes.byref(stream), 0)
        or cuda.cuEventCreate(ctypes.byref(event), 0)
        or cuda.cuEventCreate(ctypes.byref(other_event), 0)
        or cuda.cuEventRecord(event, stream)
        or cuda.cuEventRecord(other_event, stream)
        or cuda.cuModuleLoadData(ctypes.byref(module), PTX)
        or cuda.cuModuleGetFunction(ctypes.byref(function), module, KERNEL)
        or cuda.cuCtxSynchronize()
    )
    for name, call in functions().items() if not code else ():
        caller = Caller(name, call)
        caller.start()
        caller.proved.wait(PROOF_S)
        callers.append(caller)
    return code or int(cuda.cuCtxSynchronize())


def names() -> str:
    return ",".join(each.name for each in callers if each.codes[:1] == [0])


def failed() -> str:
    """Return the functions that failed, with ``-`` for a code that never came."""
    return ",".join(f"{c.name}:{(c.codes or ['-'])[0]}" for c in callers if c.codes[:1] != [0]) or "-"


def blocked(within_s: float) -> str:
    """``waits``: name to system call; ``answers``: name to a code other than 0."""
    proved = [each for each in callers if each.codes[:1] == [0]]
    for each in proved:
        each.again()
    time.sleep(within_s)
    waits = {each.name: system_call(each.native_id) for each in proved if len(each.codes) == 1}
    return json.dumps({"waits": waits, "answers": {c.name: c.codes[1] for c in proved if any(c.codes[1:])}})


def call(name: str) -> int:
    return int(functions()[name]())


def system_call(thread: int | None) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/syscall").read_text().split(" ")[0].strip() or "?"
    except OSError:
        return "?"


def addresses() -> str:
    """``answered``: how many entry points cuGetProcAddress has for the names of hooks.h; ``apart``: of
    those that are no symbol of hooks.h, each as NAME/VERSION/FLAGS.

    The library finds a function that it is asked for by its address among those symbols.
    """
    hooks = Path(native.__file__).with_name("preload").joinpath("hooks.h").read_text()
    hooked = re.findall(r"HOOK\([A-Z]+, (cu[A-Z]\w+)(?:, \d+)?\)", hooks)
    symbols = {
        ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in hooked if hasattr(cuda, name)
    }
    seen: dict[int, str] = {}
    for base in sorted({re.sub(r"(_v\d)?(_pt[sd][zs])?$", "", name) for name in hooked}):
        for version in VERSIONS:
            for flags in (1, PER_THREAD):
                at = ctypes.c_void_p()
                cuda.cuGetProcAddress_v2(
                    base.encode(), ctypes.byref(at), version, ctypes.c_uint64(flags), None
                )
                if at.value:
                    seen.setdefault(at.value, f"{base}/{version}/{flags}")
    apart = sorted(name for at, name in seen.items() if at not in symbols)
    return json.dumps({"answered": len(seen), "symbols": len(symbols), "apart": apart})


if __name__ == "__main__":
    serve(
        open=open_, prepare=prepare, names=names, failed=failed, blocked=blocked, call=call,
        addresses=addresses,
    )  # fmt: skip
