"""A process of a lease that uses JAX; the commands `alloc`, `check` and `sleep` of torch_worker.py."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as every holder of a lease has it

import jax
import jax.numpy as jnp

from tests.gpu_real.commands import serve

arrays: list[tuple[Any, int]] = []


@partial(jax.jit, static_argnums=0)
def numbers(mib: int, factor: int) -> Any:
    """So many MiB; in two dimensions, for 8 GiB of them are too many for an index of 32 bits."""
    rows, columns = jnp.arange(mib, dtype=jnp.int32), jnp.arange(1 << 18, dtype=jnp.int32)
    return (rows[:, None] + columns) * factor


def total_of(array: Any) -> int:
    return int(array.sum())  # wraps around, the same way every time


def alloc(mib: int) -> int:
    try:
        # One fused operation: nothing of its size beside it.
        array = numbers(mib, 2 * len(arrays) + 3)
        arrays.append((array.block_until_ready(), total_of(array)))
    except (RuntimeError, ValueError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return 2
    return 0


def check() -> str:
    return "ok" if all(total_of(array) == total for array, total in arrays) else "bad"


def main() -> None:
    if jax.default_backend() != "gpu":
        print(f"skip JAX {jax.__version__} finds no GPU", flush=True)
        return
    jnp.zeros(1).block_until_ready()
    serve(alloc=alloc, check=check)


if __name__ == "__main__":
    main()
