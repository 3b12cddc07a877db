"""A process that shows how the driver behaves, one command a line; see `driver_facts`.

init            cuInit alone, without a context              -> "init CODE"
open            the primary context of the device            -> "open CODE"
alloc BYTES     allocate                                     -> "alloc CODE"
prepare         make what `blocked` needs, while running     -> "prepare CODE"
blocked S       call each function in a thread of its own    -> "blocked NAME:SYSCALL,..." or "blocked -"
names           the functions of `blocked`                   -> "names NAME,..."
call INDEX      call one of them                             -> "call CODE"
pool BYTES      allocate from a pool that keeps, free        -> "pool CODE"
again BYTES     allocate from that pool again                -> "again CODE"
addresses       entry points that are not their symbols      -> "addresses COUNT/TOTAL"
module          load a module and launch its kernel          -> "module CODE"
thread          synchronise in a new thread                  -> "thread CODE"
synchronize     synchronise in the main thread               -> "synchronize CODE"
spin S BYTES    fill memory for S seconds                    -> "spin ROUNDS"
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from jupyter_gpushare.gpu.driver.probe import PTX, launch
from tests.gpu_real.commands import serve

cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
device = ctypes.c_int()
block = ctypes.c_uint64()
stream, event, other_event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
memory_pool = ctypes.c_void_p()
RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


def init() -> int:
    return int(cuda.cuInit(0))


def open_() -> int:
    return int(
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )


def alloc(count: int) -> int:
    return int(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(count)))


def prepare() -> int:
    return int(
        cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20))
        or cuda.cuStreamCreate(ctypes.byref(stream), 0)
        or cuda.cuEventCreate(ctypes.byref(event), 0)
        or cuda.cuEventCreate(ctypes.byref(other_event), 0)
        or cuda.cuEventRecord(event, stream)
        or cuda.cuEventRecord(other_event, stream)
        or cuda.cuCtxSynchronize()
    )


def calls() -> dict[str, Callable[[], Any]]:
    """Functions with arguments that are right while the process runs."""
    out, size, word = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
    single = ctypes.c_float()
    pointer = ctypes.byref
    return {
        "cuCtxSynchronize": lambda: cuda.cuCtxSynchronize(),
        "cuMemAlloc_v2": lambda: cuda.cuMemAlloc_v2(pointer(out), ctypes.c_size_t(4096)),
        "cuStreamSynchronize": lambda: cuda.cuStreamSynchronize(stream),
        "cuStreamQuery": lambda: cuda.cuStreamQuery(stream),
        "cuEventSynchronize": lambda: cuda.cuEventSynchronize(event),
        "cuEventQuery": lambda: cuda.cuEventQuery(event),
        "cuEventElapsedTime": lambda: cuda.cuEventElapsedTime(pointer(single), event, other_event),
        "cuStreamIsCapturing": lambda: cuda.cuStreamIsCapturing(stream, pointer(word)),
        "cuStreamGetCaptureInfo_v2": lambda: cuda.cuStreamGetCaptureInfo_v2(
            stream, pointer(word), None, None, None, None
        ),
        "cuPointerGetAttribute": lambda: cuda.cuPointerGetAttribute(pointer(word), 2, block),
        "cuMemGetAddressRange_v2": lambda: cuda.cuMemGetAddressRange_v2(pointer(out), pointer(size), block),
        "cuMemGetInfo_v2": lambda: cuda.cuMemGetInfo_v2(pointer(size), pointer(ctypes.c_size_t())),
        "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(pointer(ctypes.c_void_p())),
        "cuCtxGetDevice": lambda: cuda.cuCtxGetDevice(pointer(word)),
        "cuCtxGetLimit": lambda: cuda.cuCtxGetLimit(pointer(size), 0),
        "cuCtxGetStreamPriorityRange": lambda: cuda.cuCtxGetStreamPriorityRange(pointer(word), None),
        "cuCtxSetCurrent": lambda: cuda.cuCtxSetCurrent(context),
        "cuDeviceGetAttribute": lambda: cuda.cuDeviceGetAttribute(pointer(word), 1, device),
        "cuDevicePrimaryCtxGetState": lambda: cuda.cuDevicePrimaryCtxGetState(
            device, pointer(ctypes.c_uint()), pointer(word)
        ),
        "cuDevicePrimaryCtxRetain": lambda: cuda.cuDevicePrimaryCtxRetain(pointer(ctypes.c_void_p()), device),
        "cuModuleLoadData": lambda: cuda.cuModuleLoadData(pointer(ctypes.c_void_p()), PTX),
        "cuStreamCreate": lambda: cuda.cuStreamCreate(pointer(ctypes.c_void_p()), 0),
        "cuEventCreate": lambda: cuda.cuEventCreate(pointer(ctypes.c_void_p()), 0),
        "cuMemHostAlloc": lambda: cuda.cuMemHostAlloc(pointer(ctypes.c_void_p()), ctypes.c_size_t(4096), 0),
        "cuDriverGetVersion": lambda: cuda.cuDriverGetVersion(pointer(word)),
    }


def blocked(within_s: float) -> str:
    """The functions that did not return, each with the system call that its thread waits in."""
    ids: dict[str, int] = {}
    threads: dict[str, threading.Thread] = {}

    def enter(name: str, function: Callable[[], Any]) -> None:
        ids[name] = threading.get_native_id()
        cuda.cuCtxSetCurrent(context)
        function()

    for name, function in calls().items():
        if hasattr(cuda, name):
            threads[name] = threading.Thread(target=enter, args=(name, function), daemon=True)
            threads[name].start()
    time.sleep(within_s)
    found = [f"{name}:{system_call(ids[name])}" for name, thread in threads.items() if thread.is_alive()]
    return ",".join(found) or "-"


def names() -> str:
    return ",".join(name for name in calls() if hasattr(cuda, name))


def call(index: int) -> int:
    return int(calls()[names().split(",")[index]]())


def system_call(thread: int) -> str:
    try:
        with open(f"/proc/self/task/{thread}/syscall", encoding="ascii") as file:
            return file.read().split(" ")[0].strip() or "?"
    except OSError:
        return "?"


def pool(count: int) -> int:
    """As PyTorch's backend:cudaMallocAsync, CuPy and RMM: the default pool keeps all that is freed."""
    keeps, at = ctypes.c_uint64(2**64 - 1), ctypes.c_uint64()
    return int(
        cuda.cuDeviceGetDefaultMemPool(ctypes.byref(memory_pool), device)
        or cuda.cuMemPoolSetAttribute(memory_pool, RELEASE_THRESHOLD, ctypes.byref(keeps))
        or cuda.cuMemAllocAsync(ctypes.byref(at), ctypes.c_size_t(count), None)
        or cuda.cuMemFreeAsync(at, None)
        or cuda.cuStreamSynchronize(None)
    )


def again(count: int) -> int:
    return int(cuda.cuMemAllocAsync(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(count), None))


def addresses() -> str:
    names = [name for name in calls() if hasattr(cuda, name)]
    apart = 0
    for name in names:
        at, plain = ctypes.c_void_p(), name.partition("_v")[0]
        cuda.cuGetProcAddress_v2(plain.encode(), ctypes.byref(at), 12000, ctypes.c_uint64(0), None)
        symbol = ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
        apart += at.value is not None and at.value != symbol
    return f"{apart}/{len(names)}"


def module() -> int:
    return launch(cuda, block)


def thread() -> int:
    codes: list[int] = []
    caller = threading.Thread(
        target=lambda: codes.append(cuda.cuCtxSetCurrent(context) or cuda.cuCtxSynchronize())
    )
    caller.start()
    caller.join()
    return codes[0]


def synchronize() -> int:
    return int(cuda.cuCtxSynchronize())


def spin(seconds: float, count: int) -> int:
    """How often so many bytes were filled."""
    at, rounds, end = ctypes.c_uint64(), 0, time.monotonic() + seconds
    cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(count))
    while time.monotonic() < end:
        cuda.cuMemsetD8_v2(at, ctypes.c_ubyte(1), ctypes.c_size_t(count))
        cuda.cuCtxSynchronize()
        rounds += 1
    cuda.cuMemFree_v2(at)
    return rounds


if __name__ == "__main__":
    serve(
        init=init, open=open_, alloc=alloc, prepare=prepare, blocked=blocked, pool=pool, again=again,
        addresses=addresses, module=module, thread=thread, spin=spin, names=names, call=call,
        synchronize=synchronize,
    )  # fmt: skip
