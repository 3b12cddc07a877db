"""A process that computes for a given time; it runs one command per line (see `shares`).

Its kernel does a fixed amount of work on every multiprocessor.  So it takes longer under the driver's
time slices; a kernel that watches a clock would not.

open AMOUNT       the context and the kernel; AMOUNT is what takes 1 ms, 0: measure it
                                                              -> "open CODE AMOUNT"
run MS S PAUSE    kernels of MS ms for S seconds, a pause of PAUSE ms after each
                                                              -> "run COUNT", of those that were done
turns MS S TURN MINE OTHER  the same by turns of TURN ms: a byte in the pipe MINE gives the turn,
                  which begins, is done on the device and passes to OTHER
                                   -> "turns COUNT END", END the clock's seconds after its last turn
recorder LIBRARY  load the thread of `recorder`               -> "recorder 0"
drain MS COUNT    launch COUNT kernels, record and wait       -> "drain", as `Recorded`, or "drain missing"
watch US          record and wait every US microseconds       -> "watch 0", or "watch missing"
unwatch           end that                                    -> "unwatch", as `Recorded`
order MS          a kernel of MS ms in one stream, a record, then a short one in another stream
                                                              -> "order MS" until the short one was done
capture MODE OWN  a record by another thread while a stream is captured in MODE (0 global, 1 thread
                  local, 2 relaxed), the other thread in mode OWN -> "capture CODE CODE" of record and end
"""

from __future__ import annotations

import collections
import ctypes
import os
import select
import threading
import time

from tests.gpu_real.commands import serve
from tests.gpu_real.recorder import ALWAYS, Recorder

# Each thread does AMOUNT rounds of arithmetic.  The simulated driver knows kernels by their name:
# for it this one takes AMOUNT nanoseconds, and adds to one word.
PTX = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry gpushare_demo_step(.param .u64 words, .param .u64 count, .param .u64 amount)
{
    .reg .pred %more;
    .reg .b64 %at, %left;
    .reg .b32 %x;
    ld.param.u64 %at, [words];
    ld.param.u64 %left, [amount];
    mov.u32 %x, %tid.x;
next:
    mad.lo.u32 %x, %x, 1664525, 1013904223;
    sub.u64 %left, %left, 1;
    setp.gt.s64 %more, %left, 0;
    @%more bra next;
    setp.eq.u32 %more, %x, 7;
    @%more st.u32 [%at], %x;
    ret;
}
\0"""
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
BLOCKING_WITHOUT_TIMING = 3  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
CALIBRATION_S = 0.1
# The milliseconds that a process launches ahead of the device.
AHEAD_MS = 20.0

cuda = ctypes.CDLL("libcuda.so.1")
pointer, u64 = ctypes.byref, ctypes.c_uint64
context, device, function = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
block, blocks = u64(), ctypes.c_int()
per_ms = 0.0
recorders: list[Recorder] = []


def checked(code: int) -> None:
    assert not code, f"code {code} of the driver"


def event() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    checked(cuda.cuEventCreate(pointer(made), BLOCKING_WITHOUT_TIMING))
    return made


def stream() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    checked(cuda.cuStreamCreate(pointer(made), 1))  # CU_STREAM_NON_BLOCKING
    return made


def launch(amount: float, on: ctypes.c_void_p | None = None, wide: int = 0) -> None:
    given = [u64(value) for value in (block.value, 1, max(1, int(amount)))]
    arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in given))
    checked(cuda.cuLaunchKernel(function, wide or blocks, 1, 1, 256, 1, 1, 0, on, arguments, None))


def open_(amount: float) -> str:
    global per_ms
    module = ctypes.c_void_p()
    code = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(pointer(device), 0)
        or cuda.cuDeviceGetAttribute(pointer(blocks), MULTIPROCESSORS, device)
        or cuda.cuDevicePrimaryCtxRetain(pointer(context), device)
        or cuda.cuCtxSetCurrent(context)
        or cuda.cuMemAlloc_v2(pointer(block), ctypes.c_size_t(1 << 20))
        or cuda.cuModuleLoadData(pointer(module), PTX)
        or cuda.cuModuleGetFunction(pointer(function), module, b"gpushare_demo_step")
    )
    blocks.value = max(1, blocks.value)
    per_ms = amount
    # Twice: the first time, clocks rise.
    for _ in range(0 if code or amount else 2):
        trial, took_s = 1e5, 0.0
        while took_s < CALIBRATION_S:
            trial *= 2
            began = time.monotonic()
            launch(trial)
            checked(cuda.cuCtxSynchronize())
            took_s = time.monotonic() - began
        per_ms = trial / took_s / 1e3
    return f"{code} {per_ms:.1f}"


class Queue:
    """Kernels of one length in the default stream, at most some milliseconds ahead of the device."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.done = 0
        self._waiting: collections.deque[ctypes.c_void_p] = collections.deque()
        self._spare = [event() for _ in range(max(2, int(AHEAD_MS / ms)) + 1)]

    def add(self) -> None:
        """Launch one kernel; if too many wait, first wait for the oldest."""
        launch(self.ms * per_ms)
        self._waiting.append(self._spare.pop())
        checked(cuda.cuEventRecord(self._waiting[-1], None))
        if not self._spare:
            self._wait()

    def _wait(self) -> None:
        oldest = self._waiting.popleft()
        checked(cuda.cuEventSynchronize(oldest))
        self._spare.append(oldest)
        self.done += 1

    def drain(self) -> None:
        while self._waiting:
            self._wait()

    def count(self) -> int:
        """Return the number of finished kernels; callable from any thread."""
        return self.done + sum(not cuda.cuEventQuery(each) for each in tuple(self._waiting))

    def close(self) -> None:
        self.drain()
        for each in self._spare:
            cuda.cuEventDestroy_v2(each)


def run(ms: float, seconds: float, pause_ms: float) -> int:
    queue = Queue(ms)
    counts: list[int] = []

    def look() -> None:
        cuda.cuCtxSetCurrent(context)
        counts.append(queue.count())

    # Another thread counts when the time is over, because a launch may wait then.
    clock = threading.Timer(seconds, look)
    clock.start()
    while not counts:
        queue.add()
        if pause_ms:
            queue.drain()
            time.sleep(pause_ms / 1e3)
    clock.join()
    queue.close()
    return counts[0]


def turns(ms: float, seconds: float, turn_ms: float, mine: str, other: str) -> str:
    turn, next_one = os.open(mine, os.O_RDWR), os.open(other, os.O_RDWR)
    queue, began = Queue(ms), time.monotonic()
    end, ended = began + seconds, began
    try:
        while (left := end - time.monotonic()) > 0:
            if not select.select([turn], [], [], left)[0]:
                break
            os.read(turn, 1)
            for _ in range(max(1, round(turn_ms / ms))):
                queue.add()
            queue.drain()
            ended = time.monotonic()
            os.write(next_one, b"x")
        return f"{queue.done} {ended:.6f}"
    finally:
        queue.close()
        os.close(turn)
        os.close(next_one)


def recorder(library: str) -> int:
    recorders.append(Recorder(library))
    return 0


def drain(ms: float, count: int) -> object:
    for _ in range(count):
        launch(ms * per_ms)
    if not recorders[-1].start(context):
        checked(cuda.cuCtxSynchronize())
        return "missing"
    return recorders[-1].end()


def watch(period_us: int) -> object:
    return 0 if recorders[-1].start(context, period_us, ALWAYS) else "missing"


def unwatch() -> object:
    return recorders[-1].end(at_once=True)


def order(ms: float) -> float:
    """Both kernels fill one multiprocessor only, so they can run side by side."""
    first, second, recorded, done = stream(), stream(), event(), event()
    checked(cuda.cuCtxSynchronize())
    began = time.monotonic()
    launch(ms * per_ms, first, 1)
    checked(cuda.cuCtxRecordEvent(context, recorded))
    launch(per_ms / 100, second, 1)
    checked(cuda.cuEventRecord(done, second))
    checked(cuda.cuEventSynchronize(done))
    took_ms = 1e3 * (time.monotonic() - began)
    checked(cuda.cuCtxSynchronize())
    return round(took_ms, 2)


def capture(mode: int, own: int) -> str:
    captured, recorded, graph = stream(), event(), ctypes.c_void_p()
    codes: list[int] = []

    def record() -> None:
        cuda.cuCtxSetCurrent(context)
        cuda.cuThreadExchangeStreamCaptureMode(pointer(ctypes.c_int(own)))
        codes.append(cuda.cuCtxRecordEvent(context, recorded))

    checked(cuda.cuStreamBeginCapture_v2(captured, mode))
    launch(per_ms, captured)
    other = threading.Thread(target=record)
    other.start()
    other.join()
    codes.append(cuda.cuStreamEndCapture(captured, pointer(graph)))
    return f"{codes[0]} {codes[1]}"


def missing(*names: str) -> str:
    """Return the functions that the driver lacks."""
    return ",".join(name for name in names if not hasattr(cuda, name)) or "-"


if __name__ == "__main__":
    serve(
        open=open_, run=run, turns=turns, recorder=recorder, drain=drain, watch=watch, unwatch=unwatch,
        order=order, capture=capture, missing=missing,
    )  # fmt: skip
