"""Make raw driver calls in a process of a lease."""

from __future__ import annotations

from tests.native.worker import Worker
from tests.simulator import Lease, Simulator

#: Raw driver calls for `Worker.run`: each answers the driver's code, or (code, handle).
CALLS = """
cuda = ctypes.CDLL("libcuda.so.1")
u64, size = ctypes.c_uint64, ctypes.c_size_t
class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                ("id", ctypes.c_int), ("none", ctypes.c_void_p), ("flags", ctypes.c_uint64)]
class Access(ctypes.Structure):
    _fields_ = [("where", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]
class Array(ctypes.Structure):
    _fields_ = [("width", size), ("height", size), ("format", ctypes.c_int), ("channels", ctypes.c_uint)]
def made(name, *arguments):
    out = u64()
    return [getattr(cuda, name)(ctypes.byref(out), *arguments), out.value]
def alloc(n): return made("cuMemAlloc_v2", size(n))
def pitch(width, height):
    return made("cuMemAllocPitch_v2", ctypes.byref(size()), size(width), size(height), ctypes.c_uint(4))
def managed(n): return made("cuMemAllocManaged", size(n), ctypes.c_uint(1))
def alloc_async(n, suffix=""): return made("cuMemAllocAsync" + suffix, size(n), None)
def pool(device=0):
    out = ctypes.c_void_p()
    assert cuda.cuDeviceGetDefaultMemPool(ctypes.byref(out), device) == 0
    return out
def alloc_pool(n, suffix=""): return made("cuMemAllocFromPoolAsync" + suffix, size(n), pool(), None)
def create(n, device=0, handles=0):
    return made("cuMemCreate", size(n), ctypes.byref(Prop(1, handles, 1, device)), u64(0))
def reserve(n): return made("cuMemAddressReserve", size(n), size(0), u64(0), u64(0))
def map(at, n, handle): return cuda.cuMemMap(u64(at), size(n), size(0), u64(handle), u64(0))
def mapped(n=2 << 20, device=0):
    at = reserve(n)[1]
    assert map(at, n, create(n, device)[1]) == 0
    return at
def unmap(at, n): return cuda.cuMemUnmap(u64(at), size(n))
def release(handle): return cuda.cuMemRelease(u64(handle))
def retain(at): return made("cuMemRetainAllocationHandle", ctypes.c_void_p(at))
def export(handle):
    shared = ctypes.c_int(-1)
    return [cuda.cuMemExportToShareableHandle(ctypes.byref(shared), u64(handle), 1, u64(0)), shared.value]
def free(at): return cuda.cuMemFree_v2(u64(at))
def free_async(at, suffix=""): return getattr(cuda, "cuMemFreeAsync" + suffix)(u64(at), None)
def array(width, height): return made("cuArrayCreate_v2", ctypes.byref(Array(width, height, 32, 4)))
def free_array(at): return cuda.cuArrayDestroy(ctypes.c_void_p(at))
"""


#: In addition to those above: an executable graph that allocates a number of bytes.
GRAPHS = """
class Node(ctypes.Structure):
    _fields_ = [("head", ctypes.c_int * 22), ("access", ctypes.c_void_p), ("count", ctypes.c_size_t),
                ("bytes", ctypes.c_size_t), ("at", ctypes.c_uint64)]
def executable(n):
    graph, node, made = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    parameters = Node((ctypes.c_int * 22)(1, 0, 1, 0), None, 0, n, 0)
    assert cuda.cuGraphCreate(ctypes.byref(graph), 0) == 0
    out = ctypes.byref(node)
    assert cuda.cuGraphAddMemAllocNode(out, graph, None, size(0), ctypes.byref(parameters)) == 0
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, u64(0)) == 0
    return made
"""


def in_lease(machine: Simulator, lease: Lease, *, open_gpu: bool = True, **more: str) -> Worker:
    """Return a process of the lease with the calls above."""
    worker = Worker(machine.env(**lease.env(), **more), open_gpu=open_gpu)
    worker.run(CALLS)
    return worker


def used(lease: Lease, kernel: Worker, device: int = 0) -> int:
    """Return the bytes of one device in a process's slot of the account."""
    return lease.slots()[kernel.pid].used_bytes[device]
