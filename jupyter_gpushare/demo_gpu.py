"""A few CUDA driver calls for notebooks and jobs, on a real GPU and on the simulated one.

Needs the extra ``demo``.  As a job: ``python -m jupyter_gpushare.demo_gpu train --steps 100 --bytes 1GiB``.
"""

import argparse
import os
import sys
import zlib
from array import array
from ctypes import c_uint64
from pathlib import Path
from typing import Any

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError('demo_gpu needs cuda-bindings: pip install "jupyter-gpushare[demo]"') from error

from jupyter_gpushare.core.size import parse_memory
from jupyter_gpushare.errors import DeviceError, GpuShareError
from jupyter_gpushare.gibibytes import compared

PATTERN_WORDS = 1 << 18  # a maximum, because the simulated GPU's memory is memory of this process
PTX = Path(__file__).with_suffix(".ptx").read_bytes()


class GpuOutOfMemory(GpuShareError):
    """There is not enough free GPU memory; the text has the free bytes."""


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver; return its results.

    Raises:
        DeviceError: the driver returned an error.
        RuntimeError: there is no driver.
    """
    code, *found = getattr(driver, name)(*arguments)
    if code:
        raise DeviceError(name, int(code), code.name)
    return found[0] if len(found) == 1 else found


def device_count() -> int:
    """Return the number of GPUs that this process may use; raise like `call`."""
    call("cuInit", 0)
    return int(call("cuDeviceGetCount"))


class Gpu:
    """One GPU by its number.  It can be used from any thread; every method raises like `call`."""

    def __init__(self, device: int = 0) -> None:
        call("cuInit", 0)
        handle = call("cuDeviceGet", device)
        self.name = call("cuDeviceGetName", 128, handle).partition(b"\0")[0].decode()
        self._context = call("cuDevicePrimaryCtxRetain", handle)
        module = self.call("cuModuleLoadData", PTX)
        self.kernel = self.call("cuModuleGetFunction", module, b"gpushare_demo_step")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver with the context of this GPU."""
        call("cuCtxSetCurrent", self._context)
        return call(name, *arguments)

    def memory(self) -> list[int]:
        """Return the free and total bytes that this process may use; within a lease these are the lease's."""
        return list(self.call("cuMemGetInfo"))

    def allocate(self, size: int | str) -> "Buffer":
        """Allocate memory; ``size`` is a number of bytes or a text like ``"6GiB"``.

        Raises:
            InvalidRequest: the text is not a size.
            GpuOutOfMemory: there is not enough free memory.
        """
        n_bytes = parse_memory(size) if isinstance(size, str) else size
        try:
            return Buffer(self, int(self.call("cuMemAlloc", n_bytes)), n_bytes)
        except DeviceError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        where = "in your share of this GPU" if os.environ.get("GPUSHARE_LEASE") else "on this GPU"
        text = f"Out of GPU memory: asked for %1, %2 of %3 are free {where}"
        raise GpuOutOfMemory(text, *compared(n_bytes, *self.memory()))


open = Gpu


class Buffer:
    """Memory on a GPU with a pattern at its start: word i is ``seed + i``, and each step adds 2**32."""

    def __init__(self, gpu: Gpu, address: int, n_bytes: int) -> None:
        self.gpu, self.address, self.seed, self.steps = gpu, address, 0, 0
        self._n_words = min(n_bytes // 8, PATTERN_WORDS)

    def fill(self, seed: int = 0) -> None:
        """Write the pattern."""
        self.seed, self.steps = seed, 0
        self.gpu.call("cuMemcpyHtoD", self.address, self._pattern(), 8 * self._n_words)

    def checksum(self) -> int:
        """Return a checksum of the memory that has the pattern."""
        words = array("Q", bytes(8 * self._n_words))
        self.gpu.call("cuMemcpyDtoH", words, self.address, 8 * self._n_words)
        return zlib.crc32(words)

    def is_intact(self) -> bool:
        """Return whether the memory has the pattern, with every step applied exactly once."""
        return self.checksum() == zlib.crc32(self._pattern())

    def start_step(self, step_s: float) -> None:
        """Start and count a step that keeps the GPU busy for ``step_s``."""
        arguments = (self.address, self._n_words, int(step_s * 1e9)), (c_uint64,) * 3
        self.gpu.call("cuLaunchKernel", self.gpu.kernel, 1, 1, 1, 1024, 1, 1, 0, 0, arguments, 0)
        self.steps += 1

    def _pattern(self) -> "array[int]":
        first = self.seed + (self.steps << 32)
        return array("Q", range(first, first + self._n_words))


def train(buffers: list[Buffer], steps: int, step_s: float = 0.1) -> None:
    """Run steps on all buffers at the same time."""
    for _ in range(steps):
        for buffer in buffers:
            buffer.start_step(step_s)
        for buffer in buffers:
            buffer.gpu.call("cuCtxSynchronize")


def main() -> None:
    """Run the command line; exit with a message if the GPU fails or the memory is wrong."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpushare.demo_gpu")
    parser.add_argument("command", choices=["train"], help="do steps on all GPUs and check them")
    parser.add_argument("--steps", type=int, default=100, help="how many (default %(default)s)")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds per step (default %(default)s)")
    parser.add_argument("--bytes", default="1GiB", help="memory on each GPU (default %(default)s)")
    options = parser.parse_args()
    try:
        buffers = [open(number).allocate(options.bytes) for number in range(device_count())]
        for buffer in buffers:
            buffer.fill()
        for done in range(0, options.steps, 100):
            train(buffers, min(100, options.steps - done), options.step_s)
            print(f"step {buffers[0].steps} of {options.steps}", flush=True)
        if not all(buffer.is_intact() for buffer in buffers):
            sys.exit("the GPU memory is not what it should be")
    except (GpuShareError, RuntimeError) as error:
        sys.exit(f"demo_gpu: {error}")
    print("every step was applied exactly once")


if __name__ == "__main__":
    main()
