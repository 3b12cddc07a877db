"""A few CUDA driver calls for notebooks and tests: allocate, fill, check, "train".

    from jupyter_gpushare import demo_gpu

    gpu = demo_gpu.open()
    weights = gpu.allocate("6GiB")
    weights.fill(seed=1)
    weights.train(steps=20, step_s=0.1)
    weights.is_intact()          # True: every step was applied exactly once

It needs nothing but the driver, real or simulated (where torch and friends do not
run).  Three kernels: *fill* makes a pattern out of a seed; *step* changes every word
in a way that can neither be skipped nor done twice unnoticed, and keeps the GPU busy
for as long as asked; *sum* adds the words up, each with its own odd weight.  What the
sum must be follows from size, seed and steps alone (`expected_checksum`), so nothing
has to be remembered elsewhere to know whether the memory is what it should be.

The pattern covers the first 16 MiB unless asked otherwise: the simulated GPU's memory
is this process's own, so filling 40 GiB of it would take 40 GiB of RAM.

As a job: ``python -m jupyter_gpushare.demo_gpu train --steps 100 --step-s 0.1 --bytes 1GiB``.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from types import TracebackType

from jupyter_gpushare.demo_gpu.kernels import INDEX_FACTOR as INDEX_FACTOR
from jupyter_gpushare.demo_gpu.kernels import PTX as PTX
from jupyter_gpushare.demo_gpu.kernels import SEED_FACTOR as SEED_FACTOR
from jupyter_gpushare.demo_gpu.kernels import STEP_FACTOR as STEP_FACTOR
from jupyter_gpushare.demo_gpu.kernels import STEP_TERM as STEP_TERM
from jupyter_gpushare.errors import DeviceError, GpuShareError

PATTERN_BYTES = 16 << 20
WORD_BYTES = 8
_WORD = 1 << 64

_OUT_OF_MEMORY = 2
# At most 64 blocks: all of them run at once on any GPU of the last decade, so that the
# time a step takes does not depend on how many waves they come in.
_BLOCKS, _THREADS = 64, 256


class GpuOutOfMemory(DeviceError):
    """There is not enough GPU memory; the text says how much there is."""

    def __init__(self, asked_bytes: int, free_bytes: int, total_bytes: int) -> None:
        super().__init__("cuMemAlloc_v2", _OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        where = "in your share of this GPU" if os.environ.get("GPUSHARE_LEASE") else "on this GPU"
        self.args = (
            f"Out of GPU memory: asked for {gib(asked_bytes)}, "
            f"{gib(free_bytes)} of {gib(total_bytes)} are free {where}",
        )
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes


def gib(n_bytes: int) -> str:
    """A size for people: ``40.0 GiB``, below a tenth of that in MiB."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 27 else f"{n_bytes / (1 << 20):.1f} MiB"


def parse_bytes(size: int | str) -> int:
    """Bytes out of ``1073741824``, ``"512MiB"`` or ``"6 GiB"``.

    Raises:
        ValueError: it is not a size above zero.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]i?B|B)?", size.strip())
        if match is None:
            raise ValueError(f"not a size: {size!r}; write for example 512MiB or 6GiB")
        unit = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40}[(match[2] or "")[:1]]
        size = int(float(match[1]) * (1 << unit))
    if size <= 0:
        raise ValueError("a size must be above zero")
    return size


def expected_checksum(n_bytes: int, seed: int, steps: int) -> int:
    """What `Buffer.checksum` must answer for a pattern of that size after so many steps.

    The sum over i of word_i * (2 i + 1), modulo 2**64.  The weights add up to n squared.
    """
    n = n_bytes // WORD_BYTES
    weighted_indices = (n - 1) * n * (2 * n - 1) // 3 + n * (n - 1) // 2
    total = (seed * SEED_FACTOR * n * n + INDEX_FACTOR * weighted_indices) % _WORD
    for _ in range(steps):
        total = (total * STEP_FACTOR + STEP_TERM * n * n) % _WORD
    return total


class _Driver:
    """The driver's functions, as ctypes finds them; every failure is an exception."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise GpuShareError("there is no GPU driver here (libcuda.so.1)") from error
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; 64-bit arguments come as ctypes values.

        Raises:
            DeviceError: it failed.
        """
        function = getattr(self._library, name)
        code = int(function(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DeviceError(name, code, (text.value or b"").decode())


_driver: _Driver | None = None


def _get_driver() -> _Driver:
    global _driver
    if _driver is None:
        _driver = _Driver()
    return _driver


def device_count() -> int:
    """How many GPUs this process may use.

    Raises:
        GpuShareError: there is no driver, or no GPU.
    """
    count = ctypes.c_int()
    _get_driver().call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def open(device: int = 0) -> Gpu:
    """The GPU with that number among those this process may use.

    Raises:
        GpuShareError: there is no driver, no such GPU, or no memory for a context on it.
    """
    return Gpu(device)


class Gpu:
    """One GPU of this process.  Usable from any thread."""

    def __init__(self, device: int = 0) -> None:
        self._driver = _get_driver()
        self._context = ctypes.c_void_p()
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        self._driver.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._driver.call("cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self.device = device
        self.name = name.value.decode()
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
        self._kernels: dict[str, ctypes.c_void_p] = {}
        for kernel in ("fill", "step", "sum"):
            function = ctypes.c_void_p()
            entry = ctypes.c_char_p(f"gpushare_demo_{kernel}".encode())
            self.call("cuModuleGetFunction", ctypes.byref(function), module, entry)
            self._kernels[kernel] = function

    def __repr__(self) -> str:
        return f"<Gpu {self.device}: {self.name}>"

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function with this GPU's context current.

        Raises:
            DeviceError: it failed.
        """
        self._driver.call("cuCtxSetCurrent", self._context)
        self._driver.call(name, *arguments)

    def launch(self, kernel: str, address: int, words: int, extra: int) -> None:
        """Start one of the three kernels; it runs until `synchronize`."""
        values = [ctypes.c_uint64(value) for value in (address, words, extra)]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        grid = [ctypes.c_uint(value) for value in (_BLOCKS, 1, 1, _THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", self._kernels[kernel], *grid, None, pointers, None)

    def synchronize(self) -> None:
        """Return when everything started on this GPU is done."""
        self.call("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes that this process may use: within a lease, the lease's."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int | str) -> Buffer:
        """Memory on this GPU: a number of bytes, or text like ``"6GiB"``.

        Raises:
            GpuOutOfMemory: there is not enough.
            ValueError: not a size.
        """
        n_bytes = parse_bytes(size)
        address = ctypes.c_uint64()
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(n_bytes))
        except DeviceError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            raise GpuOutOfMemory(n_bytes, *self.memory()) from None
        return Buffer(self, address.value, n_bytes)


class Buffer:
    """Memory on a GPU.  Freed by `free`, by leaving a ``with`` block, or with the process."""

    def __init__(self, gpu: Gpu, address: int, n_bytes: int) -> None:
        self.gpu = gpu
        self.n_bytes = n_bytes
        self._address = address
        self._pattern_bytes = 0
        self._seed = 0
        self._steps = 0

    def __repr__(self) -> str:
        return f"<Buffer of {gib(self.n_bytes)} on {self.gpu!r}>"

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    @property
    def address(self) -> int:
        """Where it is on the GPU.

        Raises:
            ValueError: it has been freed.
        """
        if not self._address:
            raise ValueError("this memory has been freed")
        return self._address

    @property
    def steps(self) -> int:
        """How many training steps were done since the last `fill`."""
        return self._steps

    def free(self) -> None:
        """Give the memory back; a second time does nothing."""
        if self._address:
            self.gpu.call("cuMemFree_v2", ctypes.c_uint64(self._address))
            self._address = 0

    def fill(self, seed: int = 0, n_bytes: int | None = None) -> None:
        """Write a pattern into the first 16 MiB, or into as many bytes as you say.

        Raises:
            ValueError: fewer bytes than a word, or more than there are.
            DeviceError: the driver failed.
        """
        wanted = min(self.n_bytes, PATTERN_BYTES) if n_bytes is None else n_bytes
        if not WORD_BYTES <= wanted <= self.n_bytes:
            raise ValueError(f"a pattern takes {WORD_BYTES} to {self.n_bytes} bytes here, not {wanted}")
        self._pattern_bytes = wanted // WORD_BYTES * WORD_BYTES
        self._seed, self._steps = seed % _WORD, 0
        self._launch("fill", self._seed)
        self.gpu.synchronize()

    def checksum(self) -> int:
        """The sum of the pattern as it is on the GPU now."""
        out = self.gpu.allocate(WORD_BYTES)
        try:
            self.gpu.call(
                "cuMemsetD8_v2", ctypes.c_uint64(out.address), ctypes.c_ubyte(0), ctypes.c_size_t(8)
            )
            self._launch("sum", out.address)
            total = ctypes.c_uint64()
            self.gpu.call(
                "cuMemcpyDtoH_v2",
                ctypes.byref(total),
                ctypes.c_uint64(out.address),
                ctypes.c_size_t(WORD_BYTES),
            )
        finally:
            out.free()
        return total.value

    def is_intact(self) -> bool:
        """Whether the pattern is there, with every step applied exactly once."""
        return self.checksum() == expected_checksum(self._pattern_bytes, self._seed, self._steps)

    def start_step(self, step_s: float) -> None:
        """Start one training step that keeps the GPU busy for so long; `finish_step` ends it."""
        self._launch("step", int(step_s * 1e9))

    def finish_step(self) -> None:
        """Wait for the step and count it."""
        self.gpu.synchronize()
        self._steps += 1

    def train(self, steps: int, step_s: float = 0.1, on_step: Callable[[int], object] | None = None) -> int:
        """Do training steps; answers how many this buffer has seen since `fill`.

        ``on_step`` is called after each with the number of steps so far.
        """
        train([self], steps, step_s, on_step)
        return self._steps

    def _launch(self, kernel: str, extra: int) -> None:
        if not self._pattern_bytes:
            raise ValueError("fill it first")
        self.gpu.launch(kernel, self.address, self._pattern_bytes // WORD_BYTES, extra)


def train(
    buffers: Buffer | Sequence[Buffer],
    steps: int,
    step_s: float = 0.1,
    on_step: Callable[[int], object] | None = None,
) -> None:
    """Train on one or several GPUs at once: each step runs on all of them together.

    Raises:
        DeviceError: the driver refused.
    """
    together = [buffers] if isinstance(buffers, Buffer) else list(buffers)
    for _ in range(steps):
        for buffer in together:
            buffer.start_step(step_s)
        for buffer in together:
            buffer.finish_step()
        if on_step is not None:
            on_step(together[0].steps)
