"""A process with state that a suspension may lose; it runs one command per line.

See `survival`, `timing` and `other_gpu`.

open              a context                                      -> "open CODE"
fill MIB          allocate and fill every byte                   -> "fill CODE"
verify            read back every byte that was filled           -> "verify ok" / "verify bad"
alloc BYTES       allocate                                       -> "alloc CODE"
free              free that                                      -> "free CODE"
fork COUNT        fork children that inherit all descriptors     -> "fork PID,PID,..."
children          get an answer of each, then verify             -> "children ok" / "children bad"
graph             a graph that sets memory and launches a kernel -> "graph CODE"
replay            launch it on memory that was cleared           -> "replay ok", "replay bad" or "replay CODE"
managed_pool N    N bytes of a managed pool                      -> "managed_pool CODE"
managed_variable  a module with a __managed__ variable           -> "managed_variable CODE"
exported N        N bytes exported, then unmapped and released   -> "exported CODE"
close             close the exported descriptor                  -> "close 0", or "close 1" without one
written           compare the bytes in managed memory            -> "written ok", "bad" or "-" without any
busy S            start a kernel that runs for S seconds         -> "busy 0"
idle              wait for it, compare its output                -> "idle ok" / "idle bad"
sees              the context's device; UUIDs and buses by ordinal -> "sees ORDINAL UUID,UUID BUS,BUS"
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import time
import uuid
from pathlib import Path
from typing import Any

import jupyter_gpushare
from tests.gpu import worker as plain
from tests.gpu_real.commands import serve

cuda = ctypes.CDLL("libcuda.so.1")
u64, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
context = ctypes.c_void_p()
block = u64()
children: list[tuple[int, int, int]] = []  # pid, and both ends of its pipes
managed: list[tuple[int, bytes]] = []  # an address of the host's too, and what was written there
exported = ctypes.c_int(-1)
executable, destination, worked_on = ctypes.c_void_p(), u64(), u64()
steps: list[float] = []

CHILD_S = 120.0  # a child ends by itself after this time
WORDS = 1 << 18
STEP = 1 << 32  # what the kernel adds to each word
MANAGED = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 gpushare_managed;
\0"""


class Location(ctypes.Structure):  # CUmemLocation
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class PoolProperties(ctypes.Structure):  # CUmemPoolProps of cuda.h 13.0
    _fields_ = [
        ("allocation", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("security", ctypes.c_void_p),
        ("max_size", size),
        ("rest", ctypes.c_ubyte * 56),
    ]


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", u64),
    ]


class SetNode(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS
    _fields_ = [
        ("to", u64),
        ("pitch", size),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", size),
        ("height", size),
    ]


class KernelNode(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def open_() -> int:
    code, made = plain.init()
    context.value = made.value
    return int(code)


def alloc(count: int) -> int:
    return int(cuda.cuMemAlloc_v2(pointer(block), size(count)))


def free() -> int:
    return int(cuda.cuMemFree_v2(block))


# ---- children ----


def echo(requests: int, answers: int) -> None:
    """Run a child: answer, and outlive the parent."""
    ends_at = time.monotonic() + CHILD_S
    while (left := ends_at - time.monotonic()) > 0:
        if select.select([requests], [], [], left)[0]:
            if not (asked := os.read(requests, 1)):
                break
            os.write(answers, asked)
    time.sleep(max(0.0, ends_at - time.monotonic()))


def fork(count: int) -> str:
    for _ in range(count):
        requests, ask = os.pipe()
        answer, answers = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(ask)
            echo(requests, answers)
            os._exit(0)
        os.close(requests)
        os.close(answers)
        children.append((pid, ask, answer))
    return ",".join(str(pid) for pid, _, _ in children)


def ask_children() -> str:
    for _, ask, _ in children:
        os.write(ask, b"x")
    answered = [select.select([answer], [], [], 10)[0] and os.read(answer, 1) for _, _, answer in children]
    return plain.verify() if children and all(each == b"x" for each in answered) else "bad"


# ---- graphs ----


@functools.cache
def step() -> ctypes.c_void_p:
    """The kernel of `demo_gpu`, which adds `STEP` to each word; null where it cannot be loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = Path(jupyter_gpushare.__file__).with_name("demo_gpu.ptx").read_bytes()
    if not cuda.cuModuleLoadData(pointer(module), image):
        cuda.cuModuleGetFunction(pointer(function), module, b"gpushare_demo_step")
    return function


def arguments(address: u64, busy_ns: int) -> Any:
    given = (ctypes.pointer(u64(value)) for value in (address.value, WORDS, busy_ns))
    return (ctypes.POINTER(u64) * 3)(*given)


def graph() -> int:
    """Build a graph of two nodes: set the second half of the memory, run the kernel on the first."""
    made, first, second = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    code = cuda.cuMemAlloc_v2(pointer(destination), size(16 * WORDS))
    half = SetNode(destination.value + 8 * WORDS, 0, 0xA5A5A5A5, 4, 2 * WORDS, 1)
    given = arguments(destination, 0)
    kernel = KernelNode(step().value, (1, 1, 1), (1024, 1, 1), 0, ctypes.addressof(given))
    return int(
        code
        or cuda.cuGraphCreate(pointer(made), 0)
        or cuda.cuGraphAddMemsetNode(pointer(first), made, None, size(0), pointer(half), context)
        or cuda.cuGraphAddKernelNode_v2(pointer(second), made, pointer(first), size(1), pointer(kernel))
        or cuda.cuGraphInstantiateWithFlags(pointer(executable), made, u64(0))
    )


def replay() -> object:
    found = (u64 * (2 * WORDS))()
    code = (
        cuda.cuMemsetD8_v2(destination, ctypes.c_ubyte(0), size(16 * WORDS))
        or cuda.cuGraphLaunch(executable, None)
        or cuda.cuCtxSynchronize()
        or cuda.cuMemcpyDtoH_v2(found, destination, size(16 * WORDS))
    )
    right = set(found[:WORDS]) == {STEP} and set(found[WORDS:]) == {0xA5A5A5A5A5A5A5A5}
    return code or ("ok" if right else "bad")


# ---- memory that the driver may refuse to checkpoint ----


def write(address: int) -> None:
    """Write from the host, as a program uses managed memory."""
    pattern = os.urandom(4)
    ctypes.memmove(address, pattern, len(pattern))
    managed.append((address, pattern))


def managed_pool(count: int) -> int:
    pool, at = ctypes.c_void_p(), u64()
    properties = PoolProperties(allocation=2, location=Location(1, 0))  # MANAGED, preferred: device 0
    code = (
        cuda.cuMemPoolCreate(pointer(pool), pointer(properties))
        or cuda.cuMemAllocFromPoolAsync(pointer(at), size(count), pool, None)
        or cuda.cuMemsetD8_v2(at, ctypes.c_ubyte(1), size(count))
        or cuda.cuCtxSynchronize()
    )
    if not code:
        write(at.value)
    return int(code)


def managed_variable(_count: int) -> int:
    module, at = ctypes.c_void_p(), u64()
    code = cuda.cuModuleLoadData(pointer(module), MANAGED) or cuda.cuModuleGetGlobal_v2(
        pointer(at), pointer(size()), module, b"gpushare_managed"
    )
    if not code:
        write(at.value)
    return int(code)


def written() -> str:
    kept = all(ctypes.string_at(address, len(pattern)) == pattern for address, pattern in managed)
    return "-" if not managed else "ok" if kept else "bad"


def export(count: int) -> int:
    handle, at, zero = u64(), u64(), u64(0)
    descriptor = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties = Properties(1, descriptor, Location(1, 0))  # CU_MEM_ALLOCATION_TYPE_PINNED, device 0
    access = (ctypes.c_int * 3)(1, 0, 3)  # CUmemAccessDesc: device 0, read and write
    return int(
        cuda.cuMemCreate(pointer(handle), size(count), pointer(properties), zero)
        or cuda.cuMemAddressReserve(pointer(at), size(count), size(0), zero, zero)
        or cuda.cuMemMap(at, size(count), size(0), handle, zero)
        or cuda.cuMemSetAccess(at, size(count), access, size(1))
        or cuda.cuMemsetD8_v2(at, ctypes.c_ubyte(7), size(count))
        or cuda.cuMemExportToShareableHandle(pointer(exported), handle, descriptor, zero)
        or cuda.cuCtxSynchronize()
        or cuda.cuMemUnmap(at, size(count))
        or cuda.cuMemRelease(handle)
    )


def close() -> int:
    if exported.value < 0:
        return 1
    os.close(exported.value)
    return 0


# ---- work and its device ----


def busy(seconds: float) -> int:
    code = 0
    if not worked_on:
        code = cuda.cuMemAlloc_v2(pointer(worked_on), size(8 * WORDS)) or cuda.cuMemsetD8_v2(
            worked_on, ctypes.c_ubyte(0), size(8 * WORDS)
        )
    steps.append(seconds)
    given = arguments(worked_on, int(seconds * 1e9))
    return int(code or cuda.cuLaunchKernel(step(), 1, 1, 1, 1024, 1, 1, 0, None, given, None))


def idle() -> str:
    found = (u64 * WORDS)()
    code = cuda.cuCtxSynchronize() or cuda.cuMemcpyDtoH_v2(found, worked_on, size(8 * WORDS))
    return "ok" if not code and set(found) == {len(steps) * STEP} else "bad"


def sees() -> str:
    count, device, raw = ctypes.c_int(), ctypes.c_int(-1), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetCount(pointer(count))
    cuda.cuCtxGetDevice(pointer(device))
    uuids: list[Any] = []
    buses: list[Any] = []
    for ordinal in range(count.value):
        code = cuda.cuDeviceGetUuid_v2(raw, ordinal)
        uuids.append(code or f"GPU-{uuid.UUID(bytes=bytes(raw))}")
        bus = ctypes.create_string_buffer(32)
        code = cuda.cuDeviceGetPCIBusId(bus, len(bus), ordinal)
        buses.append(code or bus.value.decode())
    return f"{device.value} {','.join(map(str, uuids))} {','.join(map(str, buses))}"


if __name__ == "__main__":
    serve(
        open=open_, fill=plain.fill, verify=plain.verify, alloc=alloc, free=free, fork=fork,
        children=ask_children, graph=graph, replay=replay, managed_pool=managed_pool,
        managed_variable=managed_variable, written=written, exported=export, close=close, busy=busy,
        idle=idle, sees=sees,
    )  # fmt: skip
