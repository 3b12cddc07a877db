"""The self-test's child, which holds memory the way frameworks do and reads it back on demand.

It is no descendant of the helper (an intermediate process forks it and ends).  If the helper is
root, it runs as another user.  So it resembles a kernel, which is neither the helper's child nor
its user's; Yama lets a process trace only its own descendants.

    stdout: pid PID                                its pid, before it touches the driver
    stdin:  go
    stdout: ready DIGEST DENIED FEATURES           or: failed CODE
    stdin:  check                                  any number of times
    stdout: DIGEST                                 of all bytes read back, or: failed CODE

DENIED is the code of an allocation that is expected to fail.  FEATURES names what it uses
beside plain memory, joined by "+": a virtual memory segment, pinned memory, two threads
with a stream each, a module and a kernel, a host callback, torch.  A feature that does not
work on this machine is left out, and the test then proves less.

It ends when its stdin closes, even while the driver keeps it locked.
Driver API and structures: cuda.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

SEGMENT_BYTES = 2 << 20
PINNED_BYTES = 1 << 20
OVERFLOW_UID = 65534  # the user "nobody" of Linux
# torch's first segment and a workspace of cuBLAS.
TORCH_BYTES = 512 << 20
THREAD_PERIOD_S = 0.02
PR_SET_DUMPABLE = 4  # linux/prctl.h

# Writes one word.  The simulated driver knows kernels by name; this one takes an address, a
# number of words and the first value.
KERNEL = b"gpushare_probe"
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry gpushare_probe(.param .u64 words, .param .u64 count, .param .u64 extra)
{
    .reg .u64 %a;
    .reg .u64 %v;
    ld.param.u64 %a, [words];
    ld.param.u64 %v, [extra];
    cvta.to.global.u64 %a, %a;
    st.global.u32 [%a], %v;
    ret;
}
\0"""


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp: pinned memory of one device, not exportable
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DriverFailed(Exception):
    """A driver call answered ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Probe:
    """One process's memory and work on device 0."""

    def __init__(self, cuda: Any, first_bytes: int) -> None:
        self._cuda = cuda
        self._first_bytes = first_bytes
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._blocks: list[tuple[ctypes.c_uint64, int]] = []
        self._pinned = ctypes.c_void_p()
        self._keep: list[Any] = []  # what the driver may still call or read
        self.features: list[str] = []

    def open(self) -> None:
        """Create the context and fill the first block.

        Raises:
            DriverFailed: a call of the driver failed.
        """
        cuda = self._cuda
        _check(cuda.cuInit(0))
        _check(cuda.cuDeviceGet(ctypes.byref(self._device), 0))
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._device))
        _check(cuda.cuCtxSetCurrent(self._context))
        first = ctypes.c_uint64()
        _check(cuda.cuMemAlloc_v2(ctypes.byref(first), ctypes.c_size_t(self._first_bytes)))
        self._fill(first, self._first_bytes)

    def allocate(self, count: int) -> int:
        """Allocate ``count`` more bytes and return the driver's code."""
        return int(self._cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(count)))

    def add_features(self) -> None:
        """Use every feature of frameworks that works on this machine."""
        features: dict[str, Callable[[], None]] = {
            "segment": self._segment,
            "pinned": self._pin,
            "module": self._module,
            "threads": self._threads,
            "callback": self._callback,
            "torch": self._torch,
        }
        for name, add in features.items():
            with contextlib.suppress(DriverFailed, AttributeError, ImportError, OSError, RuntimeError):
                add()
                self.features.append(name)

    def digest(self) -> str:
        """Read all bytes back from the device and return their digest.

        Raises:
            DriverFailed: a call of the driver failed.
        """
        _check(self._cuda.cuCtxSynchronize())
        digest = hashlib.sha256()
        for address, count in self._blocks:
            found = ctypes.create_string_buffer(count)
            _check(self._cuda.cuMemcpyDtoH_v2(found, address, ctypes.c_size_t(count)))
            digest.update(found.raw)
        if self._pinned:
            digest.update(ctypes.string_at(self._pinned, PINNED_BYTES))
        return digest.hexdigest()

    def _fill(self, address: ctypes.c_uint64, count: int) -> None:
        block = os.urandom(1 << 16)
        pattern = (block * (count // len(block) + 1))[:count]
        _check(self._cuda.cuMemcpyHtoD_v2(address, pattern, ctypes.c_size_t(count)))
        self._blocks.append((address, count))

    def _segment(self) -> None:
        cuda, location = self._cuda, _Location(1, self._device.value)  # CU_MEM_LOCATION_TYPE_DEVICE
        properties = _Properties(type=1, location=location)  # CU_MEM_ALLOCATION_TYPE_PINNED
        granularity, handle, address = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        _check(cuda.cuMemGetAllocationGranularity(ctypes.byref(granularity), ctypes.byref(properties), 0))
        step = max(1, granularity.value)
        size = ctypes.c_size_t(-(-SEGMENT_BYTES // step) * step)
        zero = ctypes.c_uint64(0)
        _check(cuda.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), zero))
        _check(cuda.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero))
        _check(cuda.cuMemMap(address, size, ctypes.c_size_t(0), handle, zero))
        access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _check(cuda.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)))
        self._fill(address, SEGMENT_BYTES)

    def _pin(self) -> None:
        pinned = ctypes.c_void_p()
        _check(self._cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(PINNED_BYTES), 0))
        ctypes.memmove(pinned, os.urandom(PINNED_BYTES), PINNED_BYTES)
        self._pinned = pinned

    def _module(self) -> None:
        block = ctypes.c_uint64()
        _check(self._cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(4096)))
        _check(launch(self._cuda, block))

    def _threads(self) -> None:
        for _ in range(2):
            stream, block = ctypes.c_void_p(), ctypes.c_uint64()
            _check(self._cuda.cuStreamCreate(ctypes.byref(stream), 0))
            _check(self._cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(4096)))
            threading.Thread(target=self._work, args=(stream, block), daemon=True).start()

    def _work(self, stream: ctypes.c_void_p, block: ctypes.c_uint64) -> None:
        self._cuda.cuCtxSetCurrent(self._context)
        pause = threading.Event()
        while not pause.wait(THREAD_PERIOD_S):
            self._cuda.cuMemsetD8Async(block, ctypes.c_ubyte(1), ctypes.c_size_t(4096), stream)
            self._cuda.cuStreamSynchronize(stream)

    def _callback(self) -> None:
        called = threading.Event()
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: called.set())
        self._keep.append(callback)
        _check(self._cuda.cuLaunchHostFunc(None, callback, None))
        _check(self._cuda.cuCtxSynchronize())

    def _torch(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ImportError("torch")
        import torch  # type: ignore[import-not-found,unused-ignore]  # where the site has it

        matrix = torch.ones((512, 512), device="cuda")
        self._keep.append(matrix @ matrix)
        torch.cuda.synchronize()


def launch(cuda: Any, block: ctypes.c_uint64) -> int:
    """Load a module and run its kernel on a block; return the code of the first failed call, or 0."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    given = [ctypes.c_uint64(value) for value in (block.value, 1, 7)]
    arguments = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
    return int(
        cuda.cuModuleLoadData(ctypes.byref(module), PTX)
        or cuda.cuModuleGetFunction(ctypes.byref(function), module, KERNEL)
        or cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
        or cuda.cuCtxSynchronize()
    )


def _check(code: int) -> None:
    if code:
        raise DriverFailed(int(code))


def _lines() -> queue.SimpleQueue[str]:
    """Return the lines of stdin; the thread that reads them ends the process when stdin closes."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        # _exit skips the driver's exit handlers, which may wait for the driver.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main(first_bytes: int, excess_bytes: int, uid: int, cgroup: str = "") -> int:
    """Run the protocol of this module, in ``cgroup`` if one is given, as user ``uid``."""
    if os.fork():
        os._exit(0)
    print(f"pid {os.getpid()}", flush=True)
    lines = _lines()
    lines.get()
    if cgroup:
        with open(f"{cgroup}/cgroup.procs", "a", encoding="ascii") as procs:
            procs.write(f"{os.getpid()}\n")
    cuda = ctypes.CDLL("libcuda.so.1")
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # A kernel's user is set before exec, so its files in /proc belong to that user (prctl(2), proc(5)).
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    probe = Probe(cuda, first_bytes)
    try:
        probe.open()
        probe.add_features()
        denied = probe.allocate(excess_bytes)
        print(f"ready {probe.digest()} {denied} {'+'.join(probe.features) or '-'}", flush=True)
    except DriverFailed as error:
        print(f"failed {error.code}", flush=True)
        return 1
    while True:
        lines.get()
        try:
            print(probe.digest(), flush=True)
        except DriverFailed as error:
            print(f"failed {error.code}", flush=True)


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
