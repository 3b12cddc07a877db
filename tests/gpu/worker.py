"""A process of a lease that runs commands on the GPU, one per line of its input.

alloc MIB         allocate and fill with a unique pattern       -> "alloc CODE"
fill MIB          allocate and fill every byte              -> "fill CODE"
verify            read back every byte that was filled          -> "verify ok" / "verify bad"
check             read every block back                        -> "check ok" / "check bad"
query             query the state of a stream                   -> "query CODE"
taint             allocate managed memory                       -> "taint CODE"
managed           create a managed pool, allocate from it       -> "managed CODE"
second MIB        as alloc, on the second device                -> "second CODE"
peer              let the first device use the second's memory  -> "peer CODE"
nccl              map the file that NCCL's ranks on one host share -> "nccl 0"
free              free every block                              -> "free CODE"
sleep S           sleep, without the GPU                        -> "sleep 0"
receive S         wait S for bytes from a socket, like a slow request -> "receive 0"
select S          wait S in select                              -> "select 0"
child S           wait for a child that sleeps S                -> "child 0"
join              wait for a thread that sleeps for 4 s         -> "join 0"
poll NAME S       call a query of QUERIES every S seconds in a thread -> "poll 0"
count             the number of these calls that returned       -> "count N"
thread            check, in a second thread                     -> "thread ok" / "thread bad"
spawn MIB         start a child that allocates MIB              -> "spawn PID CODE", or "spawn PID ended"
bare MIB NAME...  as spawn, with an environment that names no lease: only these variables
                  (default: CUDA_VISIBLE_DEVICES) and the simulator's -> "bare PID CODE"
changed MIB NAME=VALUE...  as spawn, with these variables; a bare name is removed -> "changed PID CODE"
clear             overwrite and empty the environment           -> "clear 0"
detach MIB        as spawn, double-forked in a new session      -> "detach PID CODE"
fork              fork a child that sleeps                      -> "fork PID"
save              end at the next SIGTERM, with a check before  -> "save 0", then "saved ok" / "saved bad"
exit              end
"""

import collections
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

cuda = ctypes.CDLL("libcuda.so.1")
blocks = []
filled = []
CHUNK = 16 << 20


shared = []


def init(ordinal=0):
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    ), context


def alloc(mib):
    address, size = ctypes.c_uint64(), ctypes.c_size_t(int(mib) << 20)
    code = cuda.cuMemAlloc_v2(ctypes.byref(address), size)
    if not code:
        pattern = os.urandom(4096)
        code = cuda.cuMemcpyHtoD_v2(address, pattern, ctypes.c_size_t(len(pattern)))
        blocks.append((address, pattern))
    return code


def second(mib, context):
    code = init(1)[0] or alloc(mib)
    return cuda.cuCtxSetCurrent(context) or code


def managed():
    pool, properties = ctypes.c_void_p(), (ctypes.c_int * 22)(2, 0, 1, 0)
    return cuda.cuMemPoolCreate(ctypes.byref(pool), properties) or cuda.cuMemAllocFromPoolAsync(
        ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20), pool, None
    )


def peer(context):
    code, other = init(1)
    return code or cuda.cuCtxSetCurrent(context) or cuda.cuCtxEnablePeerAccess(other, 0)


def nccl():
    """Map a file named as in NCCL's src/transport/shm.cc; remove the file and keep the mapping."""
    import mmap
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="nccl-", dir="/dev/shm") as file:
        file.truncate(4096)
        shared.append(mmap.mmap(file.fileno(), 4096))
    return 0


def fill(mib):
    """Fill every 16 MiB with a different value, so that misplaced memory is detected."""
    address, size = ctypes.c_uint64(), int(mib) << 20
    code = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    for offset in range(0, size if not code else 0, CHUNK):
        value, count = int.from_bytes(os.urandom(4), "little"), min(CHUNK, size - offset)
        at = ctypes.c_uint64(address.value + offset)
        code = code or cuda.cuMemsetD32_v2(at, ctypes.c_uint(value), ctypes.c_size_t(count // 4))
        filled.append((at, value, count))
    return code or cuda.cuCtxSynchronize()


def verify():
    for at, value, count in filled:
        found = ctypes.create_string_buffer(count)
        if cuda.cuMemcpyDtoH_v2(found, at, ctypes.c_size_t(count)):
            return "bad"
        if found.raw != value.to_bytes(4, "little") * (count // 4):
            return "bad"
    return "ok"


def check(context):
    cuda.cuCtxSetCurrent(context)
    for address, pattern in blocks:
        found = ctypes.create_string_buffer(len(pattern))
        if cuda.cuMemcpyDtoH_v2(found, address, ctypes.c_size_t(len(pattern))) or found.raw != pattern:
            return "bad"
    return "ok"


def save_at_sigterm(context):
    def save(number, frame):
        print("saved", check(context), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    return 0


# Calls that programs poll, by name; each answers, or refuses an unknown object.
QUERIES = {
    "stream": lambda: cuda.cuStreamQuery(None),
    "event": lambda: cuda.cuEventQuery(None),
    "pointer": lambda: cuda.cuPointerGetAttribute(ctypes.byref(ctypes.c_uint64()), 2, blocks[0][0]),
    "range": lambda: cuda.cuMemGetAddressRange_v2(None, None, blocks[0][0]),
    "context": lambda: cuda.cuCtxGetFlags(ctypes.byref(ctypes.c_uint())),
    "priorities": lambda: cuda.cuCtxGetStreamPriorityRange(None, None),
    "capture": lambda: cuda.cuStreamIsCapturing(None, ctypes.byref(ctypes.c_int())),
    "elapsed": lambda: cuda.cuEventElapsedTime_v2(None, None, None),
    "primary": lambda: cuda.cuDevicePrimaryCtxGetState(
        0, ctypes.byref(ctypes.c_uint()), ctypes.byref(ctypes.c_int())
    ),
    "pool": lambda: cuda.cuMemPoolGetAttribute(None, 4, None),
}
queried = collections.Counter()  # answers by name


def poll(context, name, period_s):
    def ask():
        cuda.cuCtxSetCurrent(context)
        while True:
            QUERIES[name]()
            queried[name] += 1
            time.sleep(period_s)

    threading.Thread(target=ask, daemon=True).start()
    return 0


def spawn(mib, environment):
    child = subprocess.Popen(
        [sys.executable, __file__, mib], stdout=subprocess.PIPE, env=environment, text=True
    )
    said = child.stdout.readline().split()
    return f"{child.pid} {said[1] if said else 'ended'}"


def fork():
    """Fork a child like a DataLoader's worker, with all descriptors of its parent except the test's pipes."""
    pid = os.fork()
    if not pid:
        os.closerange(0, 2)
        time.sleep(3600)
    return pid


def detach(mib):
    """Start a daemon: a grandchild in a new session whose parent has ended."""
    script = (
        "import subprocess, sys, time; "
        f"c = subprocess.Popen([sys.executable, {__file__!r}, '{mib}'], stdout=subprocess.PIPE, text=True,"
        " start_new_session=True); print(c.pid, c.stdout.readline().split()[1], flush=True)"
    )
    middle = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    line = middle.stdout.readline().strip()
    middle.wait()
    return line


def free():
    code = 0
    for address, _ in blocks:
        code = code or cuda.cuMemFree_v2(address)
    blocks.clear()
    return code


def taint(*_):
    size = ctypes.c_size_t(1 << 20)
    return cuda.cuMemAllocManaged(ctypes.byref(ctypes.c_uint64()), size, ctypes.c_uint(1))


def receive(seconds):
    near, far = socket.socketpair()
    near.settimeout(float(seconds))
    with far, contextlib.suppress(TimeoutError):
        near.recv(1)
    return 0


def in_thread(call, *words):
    """Make a call in another thread and return its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call(*words)))
    thread.start()
    thread.join()
    return result[0]


def bare(mib, *names):
    kept = ("GPUSHARE_SIM", "LD_LIBRARY", "PATH", *(names or ("CUDA_VISIBLE",)))
    return spawn(mib, {k: v for k, v in os.environ.items() if k.startswith(kept)})


def changed(mib, *changes):
    environment = dict(os.environ)
    for name, equals, value in (change.partition("=") for change in changes):
        environment.pop(name, None)
        if equals:
            environment[name] = value
    return spawn(mib, environment)


def clear():
    """Overwrite /proc/PID/environ too, as programs do that change their title."""
    entries = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    index = 0
    while address := entries[index]:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
        index += 1
    os.environ.clear()
    return 0


def main():
    if len(sys.argv) > 1:  # a child: hold some memory until killed
        code, _ = init()
        print("held", code or alloc(sys.argv[1]), flush=True)
        time.sleep(600)
        return
    code, context = init()
    commands = {
        "alloc": alloc,
        "fill": fill,
        "verify": verify,
        "check": lambda: check(context),
        "query": lambda: cuda.cuStreamQuery(None),
        "taint": taint,
        "managed": managed,
        "second": lambda mib: second(mib, context),
        "peer": lambda: peer(context),
        "nccl": nccl,
        "free": free,
        "sleep": lambda seconds: time.sleep(float(seconds)) or 0,
        "receive": receive,
        "select": lambda seconds: len(select.select([], [], [], float(seconds))[0]),
        "child": lambda seconds: subprocess.run(["sleep", seconds]).returncode,
        "join": lambda: in_thread(time.sleep, 4) or 0,
        "poll": lambda name, period_s: poll(context, name, float(period_s)),
        "count": queried.total,
        "thread": lambda: in_thread(check, context),
        "spawn": lambda mib: spawn(mib, dict(os.environ)),
        "bare": bare,
        "changed": changed,
        "clear": clear,
        "detach": detach,
        "fork": fork,
        "save": lambda: save_at_sigterm(context),
        "exit": lambda: os._exit(0),
    }
    print("ready", code, flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        print(verb, commands[verb](*words) if verb in commands else "unknown", flush=True)


if __name__ == "__main__":
    main()
