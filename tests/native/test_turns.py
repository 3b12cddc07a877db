"""The library holds launches out of turn, bounds what is in flight, and proves when a process is done.

The turns themselves are decided by the helper (tests/gpu/test_turns.py); here a test writes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.calls import in_lease
from tests.native.conftest import Checkpoint
from tests.native.test_hooks import compile_shared
from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Phase, Simulator, Slot
from tests.waiting import until

OPEN, HELD = 2, 3
LATER_OPEN, LATER_HELD = 4, 5
# A call that is not held comes back within this, a held one does not.
HELD_S = 0.1


@pytest.fixture
def kernel(machine: Simulator, half: Lease) -> Iterator[Worker]:
    """A process of a lease that shares time, with a buffer; it has no turns yet."""
    half.set_turn(0)
    with in_lease(machine, half) as process:
        process.run("b = gpu.allocate('1MiB'); b.fill()")
        process.run("def step(s): b.start_step(s)")
        yield process


def slot(lease: Lease, kernel: Worker) -> Slot:
    return lease.slots()[kernel.pid]


def is_settled(lease: Lease, kernel: Worker) -> bool:
    found = slot(lease, kernel)
    return found.settled == found.work + found.again


LAUNCHES = [
    "step(0)",
    "b.fill()",
    "b.checksum()",
    "cuda.cuMemcpyDtoDAsync_v2(u64(b.address), u64(b.address), size(8), None)",
    "cuda.cuMemsetD8_v2(u64(b.address), 0, size(8))",
    "cuda.cuLaunchHostFunc(None, host_function, None)",
    "cuda.cuGraphLaunch(graph, None)",
]
OTHERS = [
    "gpu.allocate(8)",
    "gpu.call('cuMemFree', other.address)",
    "gpu.memory()",
    "gpu.call('cuCtxSynchronize')",
    "cuda.cuStreamSynchronize(None)",
    "cuda.cuStreamQuery(None)",
    "cuda.cuMemHostAlloc(ctypes.byref(ctypes.c_void_p()), size(8), 0)",
    "demo_gpu.open()",
]
PREPARED = """
other = gpu.allocate(8)
host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
empty, graph = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuGraphCreate(ctypes.byref(empty), 0) == 0
assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(graph), empty, u64(0)) == 0
"""


@pytest.mark.parametrize("call", LAUNCHES)
def test_what_computes_waits_for_its_turn(half: Lease, kernel: Worker, call: str) -> None:
    kernel.run(PREPARED)
    kernel.run(call)
    half.set_turn(HELD)
    work = slot(half, kernel).work
    kernel.start(call)
    until(lambda: slot(half, kernel).waiting == 1)
    assert kernel.is_waiting(HELD_S)
    assert slot(half, kernel).work > work
    held = slot(half, kernel)
    half.set_turn(OPEN)
    kernel.answer()
    found = slot(half, kernel)
    assert (found.waiting, found.work, found.again) == (0, held.work, held.again + 1)  # one call, not two


@pytest.mark.parametrize("call", OTHERS)
def test_what_does_not_compute_is_never_held(half: Lease, kernel: Worker, call: str) -> None:
    kernel.run(PREPARED)
    half.set_turn(HELD)
    kernel.ask(f"{call} and None")
    assert slot(half, kernel).waiting == 0


def test_a_lease_alone_is_not_held_and_its_thread_rests(half: Lease, kernel: Worker) -> None:
    kernel.run("for _ in range(100): step(0)")
    found = slot(half, kernel)
    assert (found.settled, found.waiting, found.looking) == (0, 0, 0)


def test_a_process_is_settled_when_its_last_kernel_has_ended(half: Lease, kernel: Worker) -> None:
    half.set_turn(OPEN)
    kernel.run("step(0.4)")
    until(lambda: slot(half, kernel).looking == 1)
    assert not is_settled(half, kernel)
    began = time.monotonic()
    until(lambda: is_settled(half, kernel))
    assert time.monotonic() - began > 0.1
    kernel.run("gpu.call('cuCtxSynchronize')")
    until(lambda: is_settled(half, kernel))


def test_the_end_of_a_turn_is_proved_for_a_program_that_never_synchronizes(
    half: Lease, kernel: Worker
) -> None:
    half.set_turn(OPEN)
    kernel.run("import threading; go = True")
    kernel.run(
        "threading.Thread(target=lambda: [step(0.002) for _ in iter(lambda: go, False)], daemon=True).start()"
    )
    until(lambda: slot(half, kernel).work > 50)
    half.set_turn(HELD)
    until(lambda: is_settled(half, kernel) and slot(half, kernel).waiting == 1)
    half.set_turn(LATER_OPEN)
    until(lambda: not is_settled(half, kernel))
    kernel.run("go = False")


def test_a_launch_that_was_held_is_not_taken_for_done(half: Lease, kernel: Worker) -> None:
    half.set_turn(HELD)
    kernel.start("step(0.4)")
    until(lambda: slot(half, kernel).waiting == 1 and is_settled(half, kernel))
    half.set_turn(LATER_OPEN)
    kernel.answer()
    for _ in range(10):
        assert not is_settled(half, kernel)
        time.sleep(0.02)
    until(lambda: is_settled(half, kernel))


def test_a_program_that_launches_without_pause_runs_ahead_by_a_bound(
    machine: Simulator, half: Lease, kernel: Worker
) -> None:
    half.set_turn(OPEN, ahead_us=20_000)
    kernel.run("count = 0")
    kernel.run(
        "def flood(): global count\nwhile count < 400: step(0.005); count += 1".replace(
            "\nw", "\n    w", 1
        ).replace("global count", "\n    global count", 1)
    )
    kernel.run("threading.Thread(target=flood, daemon=True).start()")
    until(lambda: kernel.ask("count") > 40)
    for _ in range(20):
        done, launched = machine.served_s(kernel.pid) / 0.005, kernel.ask("count")
        assert launched - done < 12  # 4 fit, and the reading takes its time
        time.sleep(0.01)


def test_long_kernels_are_not_launched_far_ahead_either(half: Lease, kernel: Worker) -> None:
    half.set_turn(OPEN, ahead_us=20_000)
    for _ in range(3):
        kernel.run("step(0.2)")
        until(lambda: is_settled(half, kernel))  # that is how long one takes
    kernel.run("for _ in range(10): step(0.3)")
    launched_at = time.monotonic()
    until(lambda: is_settled(half, kernel))
    assert time.monotonic() - launched_at < 1.5  # one runs and one waits, rarely two; all take 3 s


def test_a_process_that_can_have_no_more_threads_launches_all_the_same(
    machine: Simulator, half: Lease
) -> None:
    half.set_turn(0, ahead_us=0)
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill()")
        kernel.run("import resource; pages = int(open('/proc/self/statm').read().split()[0])")
        kernel.run("resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (2 << 20),) * 2)")
        half.set_turn(OPEN)
        began = time.monotonic()
        kernel.run("for _ in range(20): b.start_step(0)")
        assert time.monotonic() - began < 1.0
        assert kernel.ask("len(os.listdir('/proc/self/task'))") == 1


def test_a_launch_that_waits_for_room_goes_on_when_its_lease_is_alone(half: Lease, kernel: Worker) -> None:
    half.set_turn(OPEN, ahead_us=20_000)
    for _ in range(3):
        kernel.run("step(0.2)")
        until(lambda: is_settled(half, kernel))  # that is how long one takes
    kernel.run("step(0.6)")
    kernel.start("step(0.3); step(0.3)")  # a look that came before the first launch lets one more through
    assert kernel.is_waiting(HELD_S)
    half.set_turn(0)
    assert not kernel.is_waiting(0.3)
    kernel.answer()


def test_who_is_held_goes_on_when_its_helper_is_gone(half: Lease, kernel: Worker) -> None:
    half.set_turn(HELD)
    kernel.start("step(0)")
    assert kernel.is_waiting(1.0)
    kernel.answer(timeout_s=10)
    began = time.monotonic()
    kernel.run("for _ in range(20): step(0)")
    assert time.monotonic() - began < 2.0  # not 3 s for each
    half.set_turn(LATER_HELD)  # a helper is there again
    kernel.start("step(0)")
    assert kernel.is_waiting(HELD_S)
    half.set_turn(0)
    kernel.answer()


def test_a_lease_that_is_suspended_while_it_is_held_wakes_it(
    half: Lease, kernel: Worker, driver: Checkpoint
) -> None:
    half.set_turn(HELD)
    kernel.start("step(0)")
    until(lambda: slot(half, kernel).waiting == 1)
    half.turn = 0
    half.write(Phase.SUSPENDED)
    until(lambda: slot(half, kernel).waiting == 0)
    driver.suspend(kernel.pid)
    calls = slot(half, kernel).calls
    until(lambda: slot(half, kernel).calls > calls)  # it still waits, so it counts again
    driver.resume(kernel.pid)
    half.write(Phase.RUNNING)
    kernel.answer()


def test_the_thread_does_not_look_while_the_lease_is_suspended(half: Lease, kernel: Worker) -> None:
    half.set_turn(OPEN)
    kernel.run("step(0.3)")
    until(lambda: slot(half, kernel).looking == 1)
    half.turn = 0
    half.write(Phase.SUSPENDING)
    until(lambda: slot(half, kernel).looking == 0)
    for _ in range(50):
        assert slot(half, kernel).looking == 0
        time.sleep(0.002)


CAPTURE = """
stream, graph, made = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
values = [u64(b.address), u64(0), u64(1_000_000)]
pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in values))
function = ctypes.c_void_p(int(gpu.kernel))
def launch(): return cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, pointers, None)
def begin(mode): return cuda.cuStreamBeginCapture_v2(stream, mode)
def end(): return cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
"""


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread_local", "relaxed"])
def test_a_capture_goes_on_across_turns_and_nothing_disturbs_it(
    half: Lease, kernel: Worker, mode: int
) -> None:
    kernel.run(CAPTURE)
    half.set_turn(OPEN)
    kernel.run("step(0.05)")  # the thread looks while the capture begins
    assert kernel.ask(f"begin({mode})") == 0
    half.set_turn(HELD)
    time.sleep(0.05)
    for _ in range(3):
        assert kernel.ask("launch()") == 0  # it runs nothing, so it is not held
        time.sleep(0.02)
    assert kernel.ask("end()") == 0
    assert kernel.ask("bool(graph.value)")
    assert kernel.ask("cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, u64(0))") == 0
    kernel.start("cuda.cuGraphLaunch(made, stream)")
    assert kernel.is_waiting(HELD_S)
    half.set_turn(LATER_OPEN)
    assert kernel.answer() == 0
    until(lambda: is_settled(half, kernel))


def test_a_capture_that_fails_to_begin_is_none(half: Lease, kernel: Worker) -> None:
    kernel.run(CAPTURE)
    half.set_turn(HELD)
    assert kernel.ask("cuda.cuStreamBeginCapture_v2(stream, 77)") != 0
    kernel.start("launch()")
    assert kernel.is_waiting(HELD_S)
    half.set_turn(OPEN)
    assert kernel.answer() == 0


def test_a_capture_whose_end_is_refused_goes_on(half: Lease, kernel: Worker) -> None:
    kernel.run(CAPTURE)
    half.set_turn(OPEN)
    kernel.run("step(0.05)")
    assert kernel.ask("begin(0)") == 0
    kernel.run("context, answers = ctypes.c_void_p(), []")
    kernel.run("assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0")
    kernel.run("def elsewhere(): cuda.cuCtxSetCurrent(context); answers.append(end())")
    kernel.run("thread = threading.Thread(target=elsewhere); thread.start(); thread.join()")
    assert kernel.ask("answers") == [908]
    time.sleep(0.1)  # the thread would look by now
    assert kernel.ask("launch()") == 0
    assert kernel.ask("end()") == 0


def test_a_capture_is_over_when_its_stream_is(half: Lease, kernel: Worker) -> None:
    kernel.run(CAPTURE)
    half.set_turn(OPEN)
    assert kernel.ask("begin(0)") == 0
    kernel.run("step(0)")
    time.sleep(0.05)
    assert not is_settled(half, kernel)
    assert kernel.ask("cuda.cuStreamDestroy_v2(stream)") == 0
    until(lambda: is_settled(half, kernel))


GREEN_DRIVER = """
#include <string.h>
#define API __attribute__((visibility("default"))) int
typedef void *context, *event;
static int both[2];
__attribute__((visibility("default"))) _Atomic int ended, used_after_end, records;
static _Thread_local context current = &both[0];
static int use(context at) { return used_after_end |= ended && at == &both[1], 0; }
API cuInit(unsigned flags) { return (int)flags; }
API cuDeviceGetCount(int *count) { return *count = 1, 0; }
API cuDeviceGetUuid_v2(char uuid[16], int device) { return memset(uuid, 0x11, 16), device; }
API cuCtxGetDevice(int *device) { return *device = 0; }
API cuCtxGetCurrent(context *out) { return *out = current, 0; }
API cuCtxSetCurrent(context at) { return current = at, use(at); }
API cuCtxFromGreenCtx(context *out, void *green) { return *out = &both[1], !green; }
API cuGreenCtxDestroy(void *green) { return ended = 1, !green; }
API cuCtxDetach(context at) { return ended |= at == &both[1], 0; }
API cuEventCreate(event *out, unsigned flags) { return *out = both, (void)flags, 0; }
API cuEventQuery(event at) { return !at; }
API cuEventSynchronize(event at) { return !at; }
API cuEventDestroy_v2(event at) { return !at; }
API cuCtxRecordEvent(context at, event e) { return records++, (void)e, use(at); }
API cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0; }
API cuLaunchKernel(void) { return 0; }
"""


@pytest.mark.parametrize(
    "end",
    ["cuda.cuGreenCtxDestroy(ctypes.c_void_p(1))", "cuda.cuCtxDetach(green)"],
    ids=["green", "detached"],
)
def test_no_context_is_looked_into_that_has_ended(tmp_path: Path, end: str) -> None:
    compile_shared(GREEN_DRIVER, tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    lease = Lease(tmp_path / "lease", [("GPU-" + "11" * 16, GIB)])
    lease.set_turn(OPEN)
    env = {**os.environ, **lease.env(), "LD_LIBRARY_PATH": str(tmp_path)}
    with Worker(env, open_gpu=False) as kernel:
        kernel.run("cuda, green = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()")
        kernel.run("def told(name): return ctypes.c_int.in_dll(cuda, name).value")
        kernel.run("assert cuda.cuInit(0) == 0 == cuda.cuCtxFromGreenCtx(ctypes.byref(green), 1)")
        kernel.run("cuda.cuLaunchKernel(); cuda.cuCtxSetCurrent(green); cuda.cuLaunchKernel()")
        until(lambda: kernel.ask("told('records')") > 3)
        kernel.run("cuda.cuCtxGetCurrent(ctypes.byref(green))")
        kernel.run(f"cuda.cuCtxSetCurrent(None); assert {end} == 0")
        before = kernel.ask("told('records')")
        kernel.run("threading.Thread(target=cuda.cuLaunchKernel).start()")
        until(lambda: kernel.ask("told('records')") > before)
        assert kernel.ask("told('ended'), told('used_after_end')") == [1, 0]


def test_a_child_that_is_forked_in_a_turn_lives_and_proves_nothing_of_its_parent(
    half: Lease, kernel: Worker
) -> None:
    half.set_turn(OPEN)
    kernel.run("step(0.2)")
    child = kernel.ask("os.fork() or os._exit(7 if cuda.cuCtxSynchronize() == 3 else 8)")
    assert kernel.ask(f"os.waitstatus_to_exitcode(os.waitpid({child}, 0)[1])") == 7
    until(lambda: is_settled(half, kernel))
    half.set_turn(HELD)
    kernel.start("step(0)")
    assert kernel.is_waiting(HELD_S)
    half.set_turn(LATER_OPEN)
    kernel.answer()


def test_all_contexts_of_a_process_are_looked_into(half: Lease, kernel: Worker) -> None:
    half.set_turn(OPEN)
    kernel.run("own = ctypes.c_void_p(); assert cuda.cuCtxCreate_v2(ctypes.byref(own), 0, 0) == 0")
    kernel.run("assert cuda.cuCtxSetCurrent(own) == 0; other = demo_gpu.Gpu(0)")
    kernel.run("step(0.3)")
    until(lambda: slot(half, kernel).looking == 1)
    assert not is_settled(half, kernel)
    kernel.run("assert cuda.cuCtxDestroy_v2(own) == 0")
    kernel.run("step(0)")
    until(lambda: is_settled(half, kernel))


@pytest.mark.parametrize(
    "call",
    [
        "cuda.cuDevicePrimaryCtxRelease_v2(0)",
        "cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)",
        "cuda.cuCtxDestroy_v2(own)",
    ],
)
def test_nobody_waits_for_the_device_because_the_thread_does(half: Lease, kernel: Worker, call: str) -> None:
    """What runs there may wait for the very thread that calls."""
    kernel.run("own = ctypes.c_void_p(); assert cuda.cuCtxCreate_v2(ctypes.byref(own), 0, 0) == 0")
    kernel.run("cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)")
    kernel.run("assert cuda.cuCtxSetCurrent(None) == 0; gpu = demo_gpu.Gpu(0)")
    half.set_turn(OPEN)
    kernel.run("step(2.0)")
    until(lambda: slot(half, kernel).looking == 1)
    began = time.monotonic()
    kernel.ask(call)
    assert time.monotonic() - began < 1.0
    kernel.run("step(0)")
    until(lambda: is_settled(half, kernel))
    assert time.monotonic() - began > 1.0


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_a_launch_alone_costs_one_load_for_phase_and_turn() -> None:
    """As many instructions as a call that has no turns."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", native.preload_path()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    bodies = {
        name: re.search(rf"<{name}>:\n(.*?)\n\n", listing, re.S)
        for name in ("cuLaunchKernel", "cuStreamQuery")
    }
    lengths = {name: len(body.group(1).splitlines()) for name, body in bodies.items() if body}
    assert lengths["cuLaunchKernel"] == lengths["cuStreamQuery"] > 5
