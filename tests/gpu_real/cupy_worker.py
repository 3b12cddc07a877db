"""A process of a lease that uses CuPy; the commands `alloc`, `check` and `sleep` of torch_worker.py."""

from __future__ import annotations

from typing import Any

import cupy

from tests.gpu_real.commands import serve

arrays: list[tuple[Any, int]] = []


def alloc(mib: int) -> int:
    try:
        # In place: nothing of its size beside it.
        array = cupy.arange(mib << 18, dtype=cupy.int32)
        array *= 2 * len(arrays) + 3
        arrays.append((array, int(array.sum(dtype=cupy.int64))))
    except cupy.cuda.memory.OutOfMemoryError:
        cupy.get_default_memory_pool().free_all_blocks()
        return 2
    return 0


def check() -> str:
    return "ok" if all(int(array.sum(dtype=cupy.int64)) == total for array, total in arrays) else "bad"


def main() -> None:
    try:
        cupy.zeros(1)
    except Exception as error:  # whatever is wrong with its installation
        print(f"skip CuPy {cupy.__version__} finds no GPU ({error})".replace("\n", " "), flush=True)
        return
    serve(alloc=alloc, check=check)


if __name__ == "__main__":
    main()
