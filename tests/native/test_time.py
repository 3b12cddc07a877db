"""The simulated driver divides a device's time between processes, as far as this is published."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.conftest import Checkpoint, shared_library
from tests.native.test_hooks import NATIVE, compile_shared
from tests.native.worker import Worker, WorkerError
from tests.simulator import Simulator

source = pytest.mark.source
MS = 1_000_000
NOT_READY = 600
SLICE, SWITCH = 2 * MS, 50_000
EQUAL = source(
    "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html (as of 2025-09): "
    "an equal share of time to all GPU processes"
)

#: sim_time.c with a clock that the test moves.  All living processes are this one.
VIRTUAL = """
#include "simulator/sim_time.c"
static struct sim_state state;
static uint64_t now;
struct sim_state *sim = &state;
uint64_t sim_now_ns(void) { return now; }
static bool are_files_kept;
bool sim_are_device_files_open(const struct sim_process *process) { (void)process; return are_files_kept; }
void sim_busy_add(struct sim_busy *busy, uint64_t from_ns, uint64_t until_ns)
{
    busy->from_ns += until_ns - from_ns;
}
void reset(void)
{
    memset(&state, 0, sizeof state);
    state.device_count = 1, state.slice_ns = SLICE, state.switch_ns = SWITCH;
    now = 0, are_files_kept = false;
}
void start(int number)
{
    state.process[number].pid = getpid();
    state.process[number].start_ticks = process_start_ticks(getpid());
}
void end(int number, bool keeps_files)
{
    state.process[number].start_ticks = 0;
    are_files_kept = keeps_files;
}
uint64_t submit(int number, uint64_t ns)
{
    sim_divide_time(0);
    struct sim_work *work = sim_work_on(&state.process[number], 0);
    return work->until_ns += ns;
}
void let_pass(uint64_t ns) { now += ns; }
uint64_t clock_ns(void) { return now; }
uint64_t left(int number, uint64_t mark) { return sim_time_left(&state.process[number], 0, mark); }
uint64_t served(int number) { sim_divide_time(0); return sim_work_on(&state.process[number], 0)->served_ns; }
uint64_t reached(int number, uint64_t mark)
{
    sim_divide_time(0);
    return sim_time_of(&state.process[number], 0, mark);
}
uint64_t busy(void) { sim_divide_time(0); return state.schedule[0].busy_all.from_ns; }
"""


class Device:
    """One device in virtual time, with processes by number; times in nanoseconds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._c = library
        self._c.reset()
        for name in ("submit", "served", "left", "reached", "clock_ns", "busy"):
            getattr(self._c, name).restype = ctypes.c_uint64

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self._c.start(number)

    def end(self, number: int, *, forked: bool = False) -> None:
        """Let it die; one that it forked may have its device files open still."""
        self._c.end(number, forked)

    def submit(self, number: int, ns: int) -> int:
        """Give a process so much work more, and return the mark at its end."""
        return int(self._c.submit(number, ctypes.c_uint64(ns)))

    def served(self, number: int) -> int:
        return int(self._c.served(number))

    def left(self, number: int, mark: int) -> int:
        return int(self._c.left(number, ctypes.c_uint64(mark)))

    def reached(self, number: int, mark: int) -> int:
        return int(self._c.reached(number, ctypes.c_uint64(mark)))

    def now(self) -> int:
        return int(self._c.clock_ns())

    def busy(self) -> int:
        return int(self._c.busy())

    def run(self, ns: int, kernels: dict[int, int]) -> None:
        """Let time pass with processes that launch a kernel of a length, wait for it, and launch the next."""
        ends = self.now() + ns
        marks = {number: self.submit(number, length) for number, length in kernels.items()}
        while self.now() < ends:
            for number, length in kernels.items():
                if not self.left(number, marks[number]):
                    marks[number] = self.submit(number, length)
            waits = [self.left(number, mark) for number, mark in marks.items()]
            self.wait(max(1, min(*waits, ends - self.now())))

    def wait(self, ns: int) -> None:
        self._c.let_pass(ctypes.c_uint64(ns))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = ["-O1", f"-DSLICE={SLICE}", f"-DSWITCH={SWITCH}", f"-I{NATIVE / 'simulator'}", "-pthread"]
    return shared_library(compile_shared(VIRTUAL, tmp_path_factory.mktemp("time") / "time.so", *flags))


@pytest.fixture
def device(library: ctypes.CDLL) -> Device:
    return Device(library)


def shares(device: Device, numbers: range) -> list[float]:
    """Each process's part of what all together received."""
    served = [device.served(number) for number in numbers]
    return [each / sum(served) for each in served]


@EQUAL
def test_two_processes_get_half_each_and_take_twice_as_long(device: Device) -> None:
    device.start(0, 1)
    marks = [device.submit(number, 100 * MS) for number in (0, 1)]
    device.wait(101 * MS)
    assert shares(device, range(2)) == pytest.approx([0.5, 0.5], abs=0.02)
    device.wait(200 * MS)
    done = [device.reached(number, mark) for number, mark in enumerate(marks)]
    assert max(done) == 200 * MS + 100 * SWITCH
    assert min(done) == max(done) - SLICE - SWITCH


@EQUAL
@pytest.mark.parametrize("kernels", [(100 * MS, 100 * MS), (10 * MS, 500 * MS), (20 * MS, 3 * MS)])
def test_shares_do_not_depend_on_the_length_of_kernels(device: Device, kernels: tuple[int, int]) -> None:
    device.start(0, 1)
    for number, length in enumerate(kernels):
        for _ in range(10_000 * MS // length):
            device.submit(number, length)
    device.wait(6_000 * MS)
    assert shares(device, range(2)) == pytest.approx([0.5, 0.5], abs=0.01)


@EQUAL
def test_a_user_of_three_processes_gets_three_parts_against_one(device: Device) -> None:
    device.start(0, 1, 2, 3)
    device.run(3_000 * MS, dict.fromkeys(range(4), 100 * MS))
    assert shares(device, range(4)) == pytest.approx([0.25] * 4, abs=0.02)


@source("https://arxiv.org/abs/2406.05221 (2024, Jetson): a round-robin policy that leaves no time unused")
def test_a_process_without_work_leaves_its_time_to_others(device: Device) -> None:
    device.start(0, 1)
    device.submit(0, 10_000 * MS)
    rounds = 0
    while device.now() < 1_000 * MS:
        mark = device.submit(1, MS // 10)
        while left := device.left(1, mark):
            device.wait(left)
        device.wait(MS // 100)  # its host does something else
        rounds += 1
    changes = 2 * SWITCH
    assert device.now() // rounds == pytest.approx(SLICE + MS // 10 + changes, rel=0.01)
    assert device.busy() == pytest.approx(device.now() - rounds * changes, rel=0.001)


def test_a_process_alone_has_the_device_without_a_change(device: Device) -> None:
    device.start(0)
    mark = device.submit(0, 3_600_000 * MS)
    assert device.left(0, mark) == 1_000 * MS  # the next look
    device.wait(3_600_000 * MS)
    assert (device.left(0, mark), device.served(0), device.busy()) == (0, mark, mark)


def test_a_wait_is_never_too_long(device: Device) -> None:
    """Whoever sleeps for the time left is there when its work is done, and looks a few times only."""
    device.start(0, 1, 2)
    marks, looks = [device.submit(number, 60 * MS) for number in range(3)], 0
    while left := device.left(2, marks[2]):
        looks += 1
        device.wait(left)
    assert device.now() == device.reached(2, marks[2])
    assert looks < 40


def test_a_process_that_died_gets_no_further_slice(device: Device) -> None:
    device.start(0, 1)
    device.submit(0, 10_000 * MS)
    mark = device.submit(1, 100 * MS)
    device.wait(50 * MS)
    before = device.served(0)
    device.end(0)
    while left := device.left(1, mark):
        device.wait(left)
    assert device.served(0) - before <= SLICE
    assert device.reached(1, mark) == pytest.approx(50 * MS + 75 * MS, abs=2 * SLICE + 4 * MS)
    device.start(0)  # the number is used again
    assert not device.left(0, device.served(0))


def test_the_work_of_a_dead_process_goes_on_while_a_forked_one_has_its_device_files_open(
    device: Device,
) -> None:
    """Inferred, as its memory stays taken."""
    device.start(0, 1)
    for number in (0, 1):
        device.submit(number, 1_000 * MS)
    device.end(0, forked=True)
    device.wait(500 * MS)
    assert shares(device, range(2)) == pytest.approx([0.5, 0.5], abs=0.01)


def test_times_of_old_marks_stay_known_as_well_as_needed(device: Device) -> None:
    """Exact for the last slices, within a twentieth of the age for work of long ago."""
    device.start(0, 1)
    for number in (0, 1):
        for _ in range(100):
            device.submit(number, 100 * MS)
    device.wait(21_000 * MS)
    assert device.served(0) == device.served(1) == 10_000 * MS
    times = [device.reached(0, step * 100 * MS) for step in range(1, 101)]
    assert times == sorted(times)
    per_step = 200 * MS + 100 * SWITCH
    assert times[-1] - times[-2] == pytest.approx(per_step, abs=SLICE + SWITCH)
    for step, at in enumerate(times, 1):
        assert at == pytest.approx(per_step * step, abs=per_step * (100 - step) // 20 + SLICE + SWITCH)


@EQUAL
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_submitted_time_is_divided_equally_and_none_is_lost(device: Device, seed: int) -> None:
    """Of processes with work none gets more than a slice before another; only changes cost time."""
    chance = random.Random(seed)
    numbers = range(chance.randint(2, 6))
    device.start(*numbers)
    submitted = dict.fromkeys(numbers, 0)
    for _ in range(200):
        for number in numbers:
            if chance.random() < 0.3:
                submitted[number] = device.submit(number, int(MS * 10 ** chance.uniform(-2, 1.5)))
        before = {number: device.served(number) for number in numbers}
        busy, began = device.busy(), device.now()
        device.wait(int(MS * 10 ** chance.uniform(-1, 1.5)))
        got = {number: device.served(number) - before[number] for number in numbers}
        hungry = [number for number in numbers if before[number] + got[number] < submitted[number]]
        assert all(device.served(number) <= submitted[number] for number in numbers)
        assert device.busy() - busy == sum(got.values()) <= device.now() - began
        if hungry:  # without a pause: the device was never idle, and each got its part
            least = min(got[number] for number in hungry)
            assert max(got.values()) <= least + 2 * SLICE
            rounds = (device.now() - began) // (SLICE + SWITCH) + 2
            short = sum(submitted[number] - before[number] < SLICE for number in numbers)
            assert device.now() - began - sum(got.values()) <= (rounds + 2 * short) * SWITCH
    device.wait(sum(submitted.values()) * 2)
    assert {number: device.served(number) for number in numbers} == submitted


# ---- processes on the simulated driver ----

LAUNCH = "b = gpu.allocate(4096); b.fill(); b.start_step(0)"


def begin(machine: Simulator, worker: Worker, seconds: float) -> Callable[[], float]:
    """Start one kernel, and return a reading of the device time that its process received since."""
    worker.run(LAUNCH)
    before = machine.served_s(worker.pid)
    worker.run(f"b.start_step({seconds})")
    return lambda: machine.served_s(worker.pid) - before


TIMED = """
events = [gpu.call("cuEventCreate", 0) for _ in range(2)]
def start_timed(seconds):
    gpu.call("cuEventRecord", events[0], 0); b.start_step(seconds); gpu.call("cuEventRecord", events[1], 0)
def elapsed_ms(): return gpu.call("cuEventElapsedTime", *events)
def timed_ms(seconds):
    start_timed(seconds); gpu.call("cuEventSynchronize", events[1])
    return elapsed_ms()
"""


@EQUAL
def test_processes_share_a_device_and_not_two(machine: Simulator) -> None:
    with (
        Worker(machine.env()) as one,
        Worker(machine.env()) as other,
        Worker(machine.env(CUDA_VISIBLE_DEVICES="1")) as elsewhere,
    ):
        readings = [begin(machine, worker, 600) for worker in (one, other)]
        began = [reading() for reading in readings]
        elsewhere.run(f"{LAUNCH}\n{TIMED}")
        assert elsewhere.ask("timed_ms(0.1)") < 190
        first, second = (reading() - before for reading, before in zip(readings, began, strict=True))
        assert first > 0.04
        assert 0.5 < first / second < 2


def test_the_work_of_a_killed_process_ends_with_it(machine: Simulator) -> None:
    with Worker(machine.env()) as dies, Worker(machine.env()) as other:
        begin(machine, dies, 600)
        other.run(f"{LAUNCH}\n{TIMED}")
        assert other.ask("timed_ms(0.1)") >= 190
        dies.kill()
        assert 300 <= other.ask("timed_ms(0.3)") < 550


@source("cuda.h 13.5, cuEventElapsedTime: not ready before both events are done")
def test_events_tell_the_time_beside_another_process(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel, Worker(machine.env()) as other:
        kernel.run(f"{LAUNCH}\n{TIMED}")
        kernel.run("start_timed(0.3)")
        with pytest.raises(WorkerError) as early:
            kernel.ask("elapsed_ms()")
        assert early.value.code == NOT_READY
        kernel.run("gpu.call('cuEventSynchronize', events[1])")
        alone = kernel.ask("elapsed_ms()")
        assert 300 <= alone < 500
        begin(machine, other, 600)
        assert 590 <= kernel.ask("timed_ms(0.3)") < 900
        assert kernel.ask("b.is_intact()")


def test_a_lock_waits_for_the_work_and_a_move_leaves_none(machine: Simulator, driver: Checkpoint) -> None:
    with Worker(machine.env()) as kernel, Worker(machine.env()) as other:
        begin(machine, other, 600)
        received = begin(machine, kernel, 0.3)
        kernel.run("event = gpu.call('cuEventCreate', 0); gpu.call('cuEventRecord', event, 0)")
        assert driver.lock(kernel.pid, 20) == NOT_READY  # not in time
        assert driver.lock(kernel.pid) == 0
        assert received() == pytest.approx(0.3, abs=0.001)
        assert driver.checkpoint(kernel.pid) == 0
        pairs = ((machine.uuid(0), machine.uuid(1)), (machine.uuid(1), machine.uuid(0)))
        assert driver.restore(kernel.pid, pairs) == 0
        assert driver.unlock(kernel.pid) == 0
        kernel.run("gpu.call('cuCtxSynchronize'); gpu.call('cuEventSynchronize', event)")
        before = machine.served_s(kernel.pid, 1)
        kernel.run("b.start_step(0.05); gpu.call('cuCtxSynchronize')")
        assert machine.served_s(kernel.pid, 1) - before == pytest.approx(0.05, abs=0.001)
        assert kernel.ask("b.is_intact()")


@source("NVML API reference r580, nvmlDeviceGetProcessUtilization, nvmlDeviceGetUtilizationRates")
def test_utilization_is_of_the_time_received_and_sums_to_no_more_than_all(machine: Simulator) -> None:
    with Worker(machine.env()) as one, Worker(machine.env()) as other:
        begin(machine, one, 600), begin(machine, other, 600)
        one.run("import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)")
        time.sleep(1.1)
        one.run("samples = {s.pid: s.smUtil for s in n.nvmlDeviceGetProcessUtilization(h, 0)}")
        samples = one.ask("[samples.pop(os.getpid()), *samples.values()]")
        assert samples == pytest.approx([49, 49], abs=3)
        assert 90 <= sum(samples) <= 100
        assert 90 <= one.ask("n.nvmlDeviceGetUtilizationRates(h).gpu") <= 100


@pytest.mark.parametrize("option", ["slice=0", "slice=2ms", "switch=", "switch=60000", "slice=-1"])
def test_a_slice_of_no_length_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match="not a machine"):
        Simulator(tmp_path, f"1xH100-80GB,{option}")
    assert os.listdir(tmp_path) == ["gpu-state"]


#: Kernels that say how long they take, and one that does not.
PTX = """.version 7.0
.target sm_75
.address_size 64
.visible .entry short(.param .u64 one, .param .f32 two)
{
    { .reg .u32 %unused; }
    .pragma "gpushare busy_ns 20000000";
    ret;
}
.entry silent(.param .u64 one) { ret; }
.visible .entry plain()
{
    .pragma "nounroll";
    .pragma "gpushare busy_ns 30000000";
    ret;
}
"""
LOADED = """
cuda = ctypes.CDLL("libcuda.so.1")
def load(text):
    module = ctypes.c_void_p()
    return cuda.cuModuleLoadData(ctypes.byref(module), text.encode()), module
def kernel(name):
    out = ctypes.c_void_p()
    return cuda.cuModuleGetFunction(ctypes.byref(out), module, name), out
def launch(name, arguments):
    code, function = kernel(name)
    return code or cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, arguments, None)
"""


@source(".pragma strings have no impact on PTX semantics: PTX ISA 9.0, 11.4.7")
def test_a_kernel_says_in_its_module_how_long_it_takes(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run(LOADED)
        kernel.run(f"text = {PTX!r}; code, module = load(text); assert code == 0")
        before = machine.served_s(kernel.pid)
        assert kernel.ask("[launch(b'plain', None), launch(b'short', (ctypes.c_void_p * 2)())]") == [0, 0]
        assert kernel.ask("[cuda.cuCtxSynchronize(), launch(b'silent', None)]") == [0, 500]
        assert machine.served_s(kernel.pid) - before == pytest.approx(0.05, abs=1e-6)
        for wrong in ("-1", "many", "20 ms", ""):
            assert kernel.ask(f"load(text.replace('30000000', {wrong!r}))[0]") == 200
        kernel.run("assert cuda.cuModuleUnload(module) == 0; module = load(text)[1]")
        assert kernel.ask("launch(b'short', None)") == 0
