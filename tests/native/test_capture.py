"""The simulated driver captures streams and records events of contexts as real drivers are published to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.conftest import Checkpoint
from tests.native.worker import Worker
from tests.simulator import Simulator

source = pytest.mark.source
CUDA_H = source("cuda.h 13.5: cuStreamBeginCapture, cuStreamEndCapture, cuThreadExchangeStreamCaptureMode")
GUIDE = source("CUDA Programming Guide 13.0, Stream Capture: prohibited operations, invalidation")
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE, NOT_READY = 1, 201, 400, 401, 600
UNSUPPORTED, INVALIDATED, IMPLICIT, WRONG_THREAD = 900, 901, 906, 908
GLOBAL, THREAD_LOCAL, RELAXED = range(3)

CALLS = """
cuda = ctypes.CDLL("libcuda.so.1")
b = gpu.allocate(4096); b.fill()
context, function = ctypes.c_void_p(int(gpu._context)), ctypes.c_void_p(int(gpu.kernel))
def made(name, *arguments):
    out = ctypes.c_void_p()
    assert getattr(cuda, name)(ctypes.byref(out), *arguments) == 0
    return out
def in_thread(call):
    answers = []
    def run():
        cuda.cuCtxSetCurrent(context)
        answers.append(call())
    thread = threading.Thread(target=run); thread.start(); thread.join()
    return answers[0]
def begin(mode, on=None): return cuda.cuStreamBeginCapture_v2(on or stream, mode)
def step(seconds, on=None):
    words = [ctypes.c_uint64(n) for n in (b.address, 512, int(seconds * 1e9))]
    table = (ctypes.c_void_p * 3)(*(ctypes.addressof(word) for word in words))
    return cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, on or stream, table, None)
def set32(value): return cuda.cuMemsetD32Async(ctypes.c_uint64(b.address), value, ctypes.c_size_t(4), stream)
def end(on=None):
    graph = ctypes.c_void_p(1)
    return cuda.cuStreamEndCapture(on or stream, ctypes.byref(graph)), graph
def status(on):
    out = ctypes.c_int(-1)
    return cuda.cuStreamIsCapturing(on, ctypes.byref(out)), out.value
def mode(wanted):
    out = ctypes.c_int(wanted)
    assert cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(out)) == 0
    return out.value
def allocate(): return cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4096))
stream, other = made("cuStreamCreate", 1), made("cuStreamCreate", 1)
event = made("cuEventCreate", 3)
"""


@pytest.fixture
def kernel(machine: Simulator) -> Iterator[Worker]:
    """A process with two streams that do not wait for the legacy one, and an event."""
    with Worker(machine.env()) as worker:
        worker.run(CALLS)
        yield worker


@CUDA_H
def test_what_is_captured_runs_with_the_graph(kernel: Worker, machine: Simulator) -> None:
    before = machine.served_s(kernel.pid)
    assert kernel.ask("[begin(0), begin(0), status(stream)]") == [0, ILLEGAL_STATE, [0, 1]]
    assert kernel.ask("[step(0.01), set32(7), step(0.02), status(other)]") == [0, 0, 0, [0, 0]]
    kernel.run("code, graph = end()")
    assert kernel.ask("[code, bool(graph), status(stream), end()[0]]") == [0, True, [0, 0], ILLEGAL_STATE]
    assert machine.served_s(kernel.pid) == before
    assert kernel.ask("b.is_intact()")
    kernel.run("run = made('cuGraphInstantiateWithFlags', graph, ctypes.c_ulonglong(0))")
    assert kernel.ask("[cuda.cuGraphLaunch(run, stream), cuda.cuStreamQuery(stream)]") == [0, NOT_READY]
    assert kernel.ask("cuda.cuStreamSynchronize(stream)") == 0
    assert machine.served_s(kernel.pid) - before == pytest.approx(0.03, abs=1e-6)
    kernel.run("words = (ctypes.c_uint32 * 4)(); cuda.cuMemcpyDtoH_v2(words, ctypes.c_uint64(b.address), 16)")
    assert kernel.ask("list(words)") == [7, 7 + 1, 7, 7 + 1]  # the step after the set


#: Calls that conflict with a capture, and their answers.
CONFLICTS = [
    ("cuda.cuCtxSynchronize()", UNSUPPORTED),
    ("cuda.cuStreamSynchronize(stream)", UNSUPPORTED),
    ("cuda.cuStreamQuery(stream)", UNSUPPORTED),
    ("cuda.cuCtxRecordEvent(context, event)", UNSUPPORTED),
    ("in_thread(lambda: cuda.cuCtxRecordEvent(context, event))", UNSUPPORTED),
]


@GUIDE
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize(("call", "code"), CONFLICTS)
def test_a_wait_for_the_context_invalidates_the_capture(
    kernel: Worker, call: str, code: int, mode: int
) -> None:
    assert kernel.ask(f"[begin({mode}), step(0), {call}, status(stream)]") == [0, 0, code, [0, 2]]
    assert kernel.ask("[step(0), set32(1)]") == [INVALIDATED, INVALIDATED]
    kernel.run("code, graph = end()")
    assert kernel.ask("[code, bool(graph), status(stream)]") == [INVALIDATED, False, [0, 0]]
    assert kernel.ask("[step(0), cuda.cuStreamSynchronize(stream)]") == [0, 0]


@GUIDE
def test_another_stream_is_free_while_one_captures(kernel: Worker) -> None:
    assert kernel.ask("[begin(0), step(0, other), cuda.cuStreamSynchronize(other)]") == [0, 0, 0]
    assert kernel.ask("[status(None), cuda.cuMemcpyDtoH_v2(bytes(8), ctypes.c_uint64(b.address), 8)]") == [
        [0, 0],
        0,
    ]
    assert kernel.ask("end()[0]") == 0


@CUDA_H
def test_the_legacy_stream_cannot_be_used_while_a_blocking_one_captures(kernel: Worker) -> None:
    kernel.run("blocking = made('cuStreamCreate', 0)")
    assert kernel.ask("[begin(0, blocking), status(None)[0], status(blocking)]") == [0, IMPLICIT, [0, 1]]
    legacy = "cuda.cuMemcpyDtoH_v2(bytes(8), ctypes.c_uint64(b.address), 8)"
    assert kernel.ask(f"[{legacy}, status(blocking), end(blocking)[0]]") == [IMPLICIT, [0, 2], INVALIDATED]
    assert kernel.ask("[begin(0, ctypes.c_void_p(n)) for n in range(1, 3)]") == [UNSUPPORTED, UNSUPPORTED]


@CUDA_H
@pytest.mark.parametrize("capture", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("thread", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_calls_are_prohibited_by_the_mode_of_the_capture_and_of_the_thread(
    kernel: Worker, capture: int, thread: int
) -> None:
    """In the thread that captures, and in another one."""
    for call in ("allocate()", "cuda.cuEventQuery(event)"):
        own = f"[begin({capture}), mode({thread}), {call}, mode(0), end()[0]]"
        denied = capture != RELAXED and thread != RELAXED
        assert kernel.ask(own)[2::2] == ([UNSUPPORTED, INVALIDATED] if denied else [0, 0])
        other = f"[begin({capture}), in_thread(lambda: mode({thread}) or {call}), end()[0]]"
        denied = capture == thread == GLOBAL
        assert kernel.ask(other)[1:] == ([UNSUPPORTED, INVALIDATED] if denied else [0, 0])


@CUDA_H
def test_a_capture_ends_in_its_thread_unless_it_is_relaxed(kernel: Worker) -> None:
    ends_elsewhere = "[begin({}), in_thread(lambda: end()[0])]"
    assert kernel.ask(ends_elsewhere.format(GLOBAL)) == [0, WRONG_THREAD]
    assert kernel.ask("end()[0]") == 0
    assert kernel.ask(ends_elsewhere.format(RELAXED)) == [0, 0]
    assert kernel.ask("[begin(3), begin(-1)]") == [INVALID_VALUE, INVALID_VALUE]
    assert kernel.ask("[mode(2), in_thread(lambda: mode(1)), mode(0)]") == [0, 0, 2]


@CUDA_H
def test_a_capture_has_an_id_of_its_own(kernel: Worker) -> None:
    kernel.run("""
def info():
    state, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    refs = [ctypes.byref(each) for each in (state, number, graph)]
    return cuda.cuStreamGetCaptureInfo_v2(stream, *refs, None, None), state.value, number.value, bool(graph)
""")
    first = kernel.ask("[begin(0), info(), end()[0]]")[1]
    second = kernel.ask("[begin(0), info(), end()[0]]")[1]
    assert [first[:2], first[3], second[:2]] == [[0, 1], True, [0, 1]]
    assert first[2] != second[2]


# ---- events of a context ----

RECORD_EVENT = source("cuda.h 13.5, cuCtxRecordEvent (since CUDA 12.5)")


@RECORD_EVENT
def test_an_event_of_a_context_is_done_with_all_that_was_submitted_before(kernel: Worker) -> None:
    kernel.run("[step(0.05, stream), step(0.1, other)]")
    assert kernel.ask("[cuda.cuCtxRecordEvent(context, event), cuda.cuEventQuery(event)]") == [0, NOT_READY]
    kernel.run("step(0.2, stream)")
    assert kernel.ask("[cuda.cuStreamSynchronize(other), cuda.cuEventQuery(event)]") == [0, 0]
    assert kernel.ask("cuda.cuStreamQuery(stream)") == NOT_READY
    assert kernel.ask("cuda.cuCtxRecordEvent(context, event)") == 0
    assert kernel.ask("[cuda.cuEventSynchronize(event), cuda.cuStreamQuery(stream)]") == [0, 0]


@RECORD_EVENT
def test_an_event_of_another_context_cannot_be_recorded(kernel: Worker) -> None:
    kernel.run("second = made('cuCtxCreate_v2', 0, 0)")
    assert kernel.ask("cuda.cuCtxRecordEvent(second, event)") == INVALID_HANDLE
    assert kernel.ask("cuda.cuCtxRecordEvent(context, None)") == INVALID_HANDLE
    assert kernel.ask("[cuda.cuCtxDestroy_v2(second), cuda.cuCtxRecordEvent(second, event)]") == [
        0,
        INVALID_CONTEXT,
    ]
    assert kernel.ask("[cuda.cuCtxRecordEvent(None, event), cuda.cuCtxRecordEvent(context, event)]") == [
        INVALID_CONTEXT,
        0,
    ]


@source(
    "https://github.com/NVIDIA/cuda-checkpoint README: calls that affect the GPU's state wait while locked"
)
def test_an_event_of_a_context_is_recorded_when_the_process_is_unlocked(
    kernel: Worker, driver: Checkpoint
) -> None:
    assert driver.lock(kernel.pid) == 0
    kernel.start("cuda.cuCtxRecordEvent(context, event)")
    assert kernel.is_waiting()
    assert driver.unlock(kernel.pid) == 0
    assert kernel.answer() == 0


@source("cuda.h 13.5, cuEventCreate and cuEventElapsedTime")
def test_an_event_without_timing_tells_no_time(kernel: Worker) -> None:
    kernel.run("timed = made('cuEventCreate', 1)")
    kernel.run("assert cuda.cuEventRecord(timed, stream) == cuda.cuEventRecord(event, stream) == 0")
    elapsed = "cuda.cuEventElapsedTime_v2(ctypes.byref(ctypes.c_float()), timed, {})"
    assert kernel.ask(f"[{elapsed.format('timed')}, {elapsed.format('event')}]") == [0, INVALID_HANDLE]
    create = "cuda.cuEventCreate(ctypes.byref(ctypes.c_void_p()), {})"
    assert [kernel.ask(create.format(flags)) for flags in (4, 6, 8)] == [INVALID_VALUE, 0, INVALID_VALUE]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("cuStreamBeginCapture", 10010), ("cuStreamEndCapture", 10000), ("cuStreamGetCaptureInfo", 11030),
        ("cuThreadExchangeStreamCaptureMode", 10010), ("cuCtxRecordEvent", 12050),
    ],
)  # fmt: skip
@source("cudaTypedefs.h 13.5")
def test_the_entry_points_are_there_from_their_version_on(kernel: Worker, name: str, version: int) -> None:
    ask = f"cuda.cuGetProcAddress_v2({name.encode()}, ctypes.byref(ctypes.c_void_p()), {{}}, u64(0), None)"
    kernel.run("u64 = ctypes.c_uint64")
    assert kernel.ask(f"[{ask.format(version)}, {ask.format(version - 10)}]") == [0, 500]
