"""A process that shows how the driver behaves; it runs one command per line (see `driver_facts`).

init            cuInit alone, without a context              -> "init CODE"
open            the primary context of the device            -> "open CODE"
alloc BYTES     allocate                                     -> "alloc CODE"
prepare         a block for `module`                         -> "prepare CODE"
pool BYTES      allocate from a pool that keeps memory, free -> "pool CODE"
again BYTES     allocate from that pool again                -> "again CODE"
module          load a module and launch its kernel          -> "module CODE"
thread          synchronize in a new thread                  -> "thread CODE"
synchronize     synchronize in the main thread               -> "synchronize CODE"
spin S BYTES    fill memory for S seconds                    -> "spin ROUNDS"
"""

from __future__ import annotations

import ctypes
import threading
import time

from jupyter_gpushare.gpu.driver.probe import launch
from tests.gpu_real.commands import serve

cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
device = ctypes.c_int()
block = ctypes.c_uint64()
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
    return int(cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20)) or cuda.cuCtxSynchronize())


def pool(count: int) -> int:
    """Let the default pool keep all freed memory, as PyTorch's backend:cudaMallocAsync, CuPy and RMM do."""
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
    """Fill these bytes repeatedly; return how often."""
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
        init=init, open=open_, alloc=alloc, prepare=prepare, pool=pool, again=again, module=module,
        thread=thread, spin=spin, synchronize=synchronize,
    )  # fmt: skip
