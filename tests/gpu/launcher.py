"""A process of a lease that launches kernels without end: KERNEL_MS SYNCHRONIZE_EVERY [PAUSE_MS] [DEVICES].

It synchronizes and pauses after every SYNCHRONIZE_EVERY launches (0: never).  It prints "ready 0" before the
first launch.
"""

import ctypes
import sys
import time
from pathlib import Path

import jupyter_gpushare

cuda = ctypes.CDLL("libcuda.so.1")
PTX = (Path(jupyter_gpushare.__file__).parent / "demo_gpu.ptx").read_bytes()


def check(code: int) -> None:
    assert code == 0, code


def main() -> None:
    kernel_ns = int(float(sys.argv[1]) * 1e6)
    every, pause_s = int(sys.argv[2]), float(sys.argv[3] if len(sys.argv) > 3 else 0) / 1e3
    made = []
    check(cuda.cuInit(0))
    for ordinal in range(int(sys.argv[4]) if len(sys.argv) > 4 else 1):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        module, function, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(cuda.cuCtxSetCurrent(context))
        check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"gpushare_demo_step"))
        check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20)))
        arguments = [address, ctypes.c_uint64(0), ctypes.c_uint64(kernel_ns)]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in arguments))
        made.append((context, function, arguments, pointers))
    print("ready 0", flush=True)
    launched = 0
    while True:
        for context, function, _, pointers in made:
            if len(made) > 1:
                check(cuda.cuCtxSetCurrent(context))
            check(cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, pointers, None))
        launched += 1
        if every and launched % every == 0:
            for context, *_ in made:
                check(cuda.cuCtxSetCurrent(context))
                check(cuda.cuCtxSynchronize())
            time.sleep(pause_s)


if __name__ == "__main__":
    main()
