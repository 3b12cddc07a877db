"""A process of a lease that uses Numba; the commands `alloc`, `check` and `sleep` of torch_worker.py.

It uses memory and copies, but no kernels, so it runs on the simulated driver too.
"""

from __future__ import annotations

import os
from typing import Any

import numpy
from numba import cuda

from tests.gpu_real.commands import serve

END = 1 << 16  # bytes at either end of an array that are known

arrays: list[tuple[Any, Any]] = []


def ends_of(array: Any) -> Any:
    return numpy.concatenate([array[:END].copy_to_host(), array[-END:].copy_to_host()])


def alloc(mib: int) -> int:
    try:
        array = cuda.device_array(mib << 20, dtype=numpy.uint8)
    except cuda.cudadrv.driver.CudaAPIError as error:
        if "CUDA_ERROR_OUT_OF_MEMORY" not in str(error):
            raise
        return 2
    known = numpy.frombuffer(os.urandom(2 * END), dtype=numpy.uint8)
    array[:END].copy_to_device(known[:END])
    array[-END:].copy_to_device(known[END:])
    arrays.append((array, known))
    return 0


def check() -> str:
    return "ok" if all((ends_of(array) == known).all() for array, known in arrays) else "bad"


def main() -> None:
    if not cuda.is_available():
        print("skip Numba finds no GPU", flush=True)
        return
    cuda.current_context()
    serve(alloc=alloc, check=check)


if __name__ == "__main__":
    main()
