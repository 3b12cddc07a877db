"""The simulated driver does what real drivers do: each test names the source of the behaviour."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.calls import CALLS
from tests.native.conftest import Checkpoint, checkpoint_in
from tests.native.test_hooks import compile_shared
from tests.native.worker import Worker, WorkerError
from tests.simulator import GIB, MIB, Fault, Lease, Phase, Simulator
from tests.waiting import PATIENCE_S, until

OUT_OF_MEMORY, NOT_INITIALIZED, OPERATING_SYSTEM, ILLEGAL_STATE, NOT_SUPPORTED = 2, 3, 304, 401, 801
NOT_PERMITTED = 800
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
CUDA_CHECKPOINT = "https://github.com/NVIDIA/cuda-checkpoint"
source = pytest.mark.source
PLAIN = "1xH100-80GB,host=512GiB,context=0GiB,free-delay=0"
UNPRIVILEGED = 65534

NVML = """
import pynvml as n
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)
def shown(): return {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(h)}
"""


def machine_with(folder: Path, more: str = "", spec: str = PLAIN) -> Simulator:
    """A machine of one GPU with round sums, and some behaviour."""
    return Simulator(folder, f"{spec},{more}" if more else spec)


@pytest.fixture
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Simulator, Checkpoint]]:
    """A machine with the behaviour that the test names, and a process that suspends others."""
    machine = machine_with(tmp_path, getattr(request, "param", ""))
    for checkpoint in checkpoint_in(machine.env()):
        yield machine, checkpoint


def with_options(text: str) -> pytest.MarkDecorator:
    """Give the machine of the fixture `driver` these options."""
    return pytest.mark.parametrize("driver", [text], indirect=True)


def get_state(checkpoint: Checkpoint, pid: int) -> int:
    return checkpoint.call("cuCheckpointProcessGetState", pid, "ctypes.byref(ctypes.c_int())")


def ended(pid_of: Worker) -> int:
    """The signal that ended a worker."""
    return -pid_of.process.wait(PATIENCE_S)


# ---- checkpoint ----


@source(f"{CUDA_CHECKPOINT}/issues/44 (driver 580.95.05, T4)")
def test_a_restore_out_of_memory_leaves_the_process_checkpointed_for_ever(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel, Worker(machine.env()) as borrower:
        kernel.run("b = gpu.allocate('50GiB')")
        checkpoint.suspend(kernel.pid)
        borrower.run("b = gpu.allocate('50GiB')")
        assert checkpoint.restore(kernel.pid) == OUT_OF_MEMORY
        assert machine.process_state(kernel.pid) == CHECKPOINTED
        borrower.run("gpu.call('cuMemFree', b.address)")
        assert [checkpoint.restore(kernel.pid) for _ in range(2)] == [OPERATING_SYSTEM] * 2
        assert checkpoint.unlock(kernel.pid) == ILLEGAL_STATE
        kernel.start("gpu.allocate(8)")
        assert kernel.is_waiting()
        assert machine.process_state(kernel.pid) == CHECKPOINTED
        assert machine.device_used(0) == 0


@source("cuda.h 13.0, CU_PROCESS_STATE_FAILED: an error occurred during checkpoint or restore")
@with_options("lost=failed")
def test_a_restore_out_of_memory_may_leave_the_process_failed(driver: tuple[Simulator, Checkpoint]) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel, Worker(machine.env()) as borrower:
        kernel.run("b = gpu.allocate('50GiB')")
        checkpoint.suspend(kernel.pid)
        kernel.start("gpu.allocate(8)")
        borrower.run("b = gpu.allocate('50GiB')")
        assert checkpoint.restore(kernel.pid) == OUT_OF_MEMORY
        assert machine.process_state(kernel.pid) == FAILED
        borrower.run("gpu.call('cuMemFree', b.address)")
        assert checkpoint.restore(kernel.pid) == ILLEGAL_STATE
        assert checkpoint.unlock(kernel.pid) == ILLEGAL_STATE
        with pytest.raises(WorkerError) as broken:  # the call that waited ends, and every other one
            kernel.answer()
        assert broken.value.code == 999
        poisons = [event for event in machine.ledger() if event.event == "poison"]
        assert [(event.pid, event.device, event.bytes) for event in poisons] == [(kernel.pid, 0, 50 * GIB)]
        assert machine.device_used(0) == 0


#: Raw calls, with a stream and a recorded event.
RAW = """
cuda = ctypes.CDLL("libcuda.so.1")
event = ctypes.c_void_p()
assert cuda.cuEventCreate(ctypes.byref(event), 0) == cuda.cuEventRecord(event, None) == 0
"""
POLLS = [
    "cuda.cuCtxSynchronize()",
    "cuda.cuStreamSynchronize(None)",
    "cuda.cuStreamQuery(None)",
    "cuda.cuEventSynchronize(event)",
    "cuda.cuEventQuery(event)",
    "cuda.cuEventElapsedTime_v2(ctypes.byref(ctypes.c_float()), event, event)",
]
h100 = source("measured: H100 80GB HBM3, driver 580.159.04 (docs/benchmarks.md)")


@h100
@pytest.mark.parametrize("call", POLLS)
def test_a_call_that_looks_for_completed_work_ends_a_checkpointed_process(
    driver: tuple[Simulator, Checkpoint], call: str
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel:
        kernel.run(RAW)
        assert checkpoint.lock(kernel.pid) == 0
        assert kernel.ask(call) == 0  # a lock does not hold it
        assert checkpoint.checkpoint(kernel.pid) == 0
        kernel.start(call)
        assert kernel.process.wait(PATIENCE_S) == -signal.SIGSEGV


@h100
def test_free_memory_is_not_told_while_checkpointed_and_a_context_is_set(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel:
        kernel.run(RAW)
        free = "cuda.cuMemGetInfo_v2(ctypes.byref(ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t()))"
        assert checkpoint.lock(kernel.pid) == 0
        assert kernel.ask(f"[{free}, cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))]") == [0, 0]
        assert checkpoint.checkpoint(kernel.pid) == 0
        assert kernel.ask(f"[{free}, cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))]") == [
            OPERATING_SYSTEM,
            0,
        ]
        kernel.start("cuda.cuCtxGetFlags(ctypes.byref(ctypes.c_uint()))")
        assert kernel.is_waiting(0.05)
        checkpoint.resume(kernel.pid)
        assert kernel.answer() == 0


#: What every test of a refused Checkpoint shows beside its own source.
damaged = source(
    f"{CUDA_CHECKPOINT} README (driver 570): a process is not kept in a good state after an error"
)


def is_damaged(kernel: Worker) -> bool:
    """Whether CUDA calls of a process fail from now on."""
    with pytest.raises(WorkerError) as broken:
        kernel.run("gpu.call('cuCtxSynchronize')")
    return broken.value.code == 999


#: Where Checkpoint is refused: the machine, what the process did before, the code, and the source.
REFUSED = [
    ("1xA100-40GB MIG 3g-20GB,host=64GiB,mig", "0", OUT_OF_MEMORY, "issues/42 (2025-12, A100 40 GB)"),
    (f"{PLAIN},persistence=off", "0", NOT_PERMITTED, "issues/25 (driver 565.57.01, A100)"),
    ("1xGB10-120GB,host=64GiB", "0", NOT_SUPPORTED, "issues/51 (driver 580.142, GB10)"),
    (PLAIN.replace("512", "1"), "0", OUT_OF_MEMORY, "README (driver 570): it needs memory of the host"),
    (PLAIN, "cuda.gpushare_sim_trace()", NOT_SUPPORTED, "issues/15 (as of 2026-11): CUPTI"),
    *(
        (PLAIN.replace("1x", "2x"), call, NOT_SUPPORTED, "README, Functionality (driver 570)")
        for call in (
            "cuda.cuMemGetHandleForAddressRange(bytes(8), u64(b.address), size(1 << 21), 1, u64(0))",
            "cuda.cuMemAllocManaged(ctypes.byref(u64()), size(4096), 1)",
            "cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), u64(b.address))",
            "cuda.cuCtxEnablePeerAccess(context(demo_gpu.open(1)), cuda.cuCtxSetCurrent(context(gpu)))",
        )
    ),
]


@damaged
@pytest.mark.parametrize(("spec", "call", "code", "said_in"), REFUSED)
def test_a_process_whose_checkpoint_is_refused_stays_on_the_device_and_is_damaged(
    tmp_path: Path, spec: str, call: str, code: int, said_in: str
) -> None:
    machine = Simulator(tmp_path, spec)
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(machine.env()) as kernel:
            kernel.run("cuda = ctypes.CDLL('libcuda.so.1'); u64, size = ctypes.c_uint64, ctypes.c_size_t")
            kernel.run("context = lambda gpu: ctypes.c_void_p(int(gpu._context))")
            kernel.run("b = gpu.allocate('2GiB'); b.fill()")
            assert kernel.ask(call) == 0
            before = machine.device_used(0), machine.host_memory()
            assert checkpoint.lock(kernel.pid) == 0
            assert checkpoint.checkpoint(kernel.pid) == code, said_in
            assert (machine.device_used(0), machine.host_memory()) == before
            assert checkpoint.unlock(kernel.pid) == 0
            assert is_damaged(kernel)


@source(f"{CUDA_CHECKPOINT}/issues/37 (2025-09; depends on the GPU)")
@with_options("checkpoint=none")
def test_on_some_gpus_no_process_may_be_asked_about_not_even_by_root(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel:
        assert get_state(checkpoint, kernel.pid) == OPERATING_SYSTEM
        assert checkpoint.lock(kernel.pid) == OPERATING_SYSTEM
        kernel.run("gpu.call('cuCtxSynchronize')")


@source("https://github.com/XuehaiPan/nvitop/pull/208 (driver 580.173.02)")
def test_a_gb10_does_not_say_how_much_memory_it_has(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xGB10-120GB")
    with Worker(machine.env(), open_gpu=False) as outside:
        outside.run(NVML)
        outside.run("""
def code(*more):
    try: n.nvmlDeviceGetMemoryInfo(h, *more)
    except n.NVMLError as error: return error.value
    return 0
""")
        assert outside.ask("[code(), code(n.nvmlMemory_v2), shown()]") == [3, 3, {}]


@source("https://docs.nvidia.com/cuda/wsl-user-guide (CUDA on WSL User Guide 12.2, limitations)")
def test_nvml_may_refuse_to_list_the_processes(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "bytes=refused")
    with Worker(machine.env()) as kernel:
        kernel.run(NVML)
        assert kernel.ask("n.nvmlDeviceGetMemoryInfo(h).total") == 80 * GIB
        with pytest.raises(WorkerError, match="Not Supported"):
            kernel.ask("shown()")


@source(f"{CUDA_CHECKPOINT}/issues/34 (drivers 570.86.15 and 570.158.01)")
@damaged
@with_options("driver=570.158.01")
def test_driver_570_refuses_a_process_with_modules_after_the_lock(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as torch, Worker(machine.env(), open_gpu=False) as plain:
        assert checkpoint.lock(torch.pid) == 0
        assert checkpoint.checkpoint(torch.pid) == NOT_SUPPORTED
        assert checkpoint.unlock(torch.pid) == 0
        assert is_damaged(torch)
        plain.run(_CONTEXT)
        checkpoint.suspend(plain.pid)
        checkpoint.resume(plain.pid)


_CONTEXT = """
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
"""


@source(f"{CUDA_CHECKPOINT}/issues/30 (driver 575.57.08); /issues/45 (2026-02) names no driver")
def test_a_second_nccl_process_cannot_even_be_asked_while_the_first_is_locked(
    driver: tuple[Simulator, Checkpoint], tmp_path: Path
) -> None:
    machine, checkpoint = driver
    nccl = compile_shared(
        "int ncclGetVersion(int *out) { return *out = 22000; }\n", tmp_path / "libnccl.so.2"
    )
    with Worker(machine.env()) as first, Worker(machine.env()) as second, Worker(machine.env()) as other:
        for rank in (first, second):
            rank.run(f"nccl = ctypes.CDLL({str(nccl)!r})")
        checkpoint.suspend(first.pid)
        assert get_state(checkpoint, other.pid) == 0  # uses no NCCL
        for third in checkpoint_in(machine.env()):
            third.worker.start(
                f"cuda.cuCheckpointProcessGetState({second.pid}, ctypes.byref(ctypes.c_int()))"
            )
            assert third.worker.is_waiting()
            checkpoint.resume(first.pid)
            assert third.worker.answer() == 0


@source(f"{CUDA_CHECKPOINT}/issues/25 (driver 565.57.01); /issues/6 (2024-05, code 304) names no driver")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("by", "code"), [("root", OPERATING_SYSTEM), ("yama", OPERATING_SYSTEM), ("any-uid", 0)]
)
def test_only_root_or_a_tracer_may_checkpoint(tmp_path: Path, by: str, code: int) -> None:
    tmp_path.chmod(0o755)
    machine = machine_with(tmp_path, f"checkpoint={by}")
    with Worker(machine.env()) as kernel:
        for checkpoint in checkpoint_in(machine.env()):
            assert get_state(checkpoint, kernel.pid) == 0
            checkpoint.worker.run(f"os.setresuid({UNPRIVILEGED}, {UNPRIVILEGED}, {UNPRIVILEGED})")
            assert get_state(checkpoint, kernel.pid) == code
            assert checkpoint.lock(kernel.pid) == code


@source(f"Linux 6.12, admin-guide/LSM/Yama.rst: ptrace_scope 1; {CUDA_CHECKPOINT}/issues/41 (2025-12)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(("by", "code"), [("root", OPERATING_SYSTEM), ("yama", 0)])
def test_under_yama_a_user_may_checkpoint_only_what_it_started(tmp_path: Path, by: str, code: int) -> None:
    machine = machine_with(tmp_path, f"checkpoint={by}")
    with Worker(machine.env(), open_gpu=False) as parent:
        # Mapped while the folder can still be read; both processes use CUDA only after the fork.
        parent.run("cuda = ctypes.CDLL('libcuda.so.1'); cuda.gpushare_sim_faults_left()")
        parent.run(f"os.setresuid({UNPRIVILEGED}, {UNPRIVILEGED}, {UNPRIVILEGED})")
        parent.run(f"""
ready, made = os.pipe()
child = os.fork()
if not child:
{textwrap.indent(_CONTEXT.strip(), "    ")}
    os.write(made, b"x")
    time.sleep(60)
    os._exit(0)
assert os.read(ready, 1) == b"x" and cuda.cuInit(0) == 0
""")
        try:
            assert get_state(Checkpoint(parent), int(parent.ask("child"))) == code
        finally:
            parent.run("os.kill(child, 9); os.waitpid(child, 0)")


@source(f"{CUDA_CHECKPOINT} README (driver 570): submitted work, stream callbacks too, is completed by Lock")
def test_lock_waits_for_a_host_function_and_so_does_synchronizing(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel:
        kernel.run("import ctypes, threading; seen = []; go = threading.Event()")
        kernel.run("gpu.call('cuCtxSynchronize'); cuda = ctypes.CDLL('libcuda.so.1')")
        kernel.run("fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(go.wait(60)))")
        assert kernel.ask("[cuda.cuLaunchHostFunc(None, fn, None), cuda.cuStreamQuery(None)]") == [0, 600]
        assert checkpoint.lock(kernel.pid, 100) == 600
        assert kernel.ask("[seen, go.set(), cuda.cuCtxSynchronize(), seen]") == [[True], None, 0, [True]]
        assert checkpoint.lock(kernel.pid, 10_000) == 0
        assert checkpoint.unlock(kernel.pid) == 0


@source(f"{CUDA_CHECKPOINT}/issues/58 (driver 610.57.04, H100)")
@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore"])
def test_a_call_may_end_its_target(driver: tuple[Simulator, Checkpoint], step: str) -> None:
    machine, checkpoint = driver
    steps = ["lock", "checkpoint", "restore"]
    with Worker(machine.env()) as kernel:
        machine.fault(Fault[f"{step.upper()}_KILLS"], pid=kernel.pid)
        codes = [getattr(checkpoint, name)(kernel.pid) for name in steps[: steps.index(step) + 1]]
        assert codes == [0] * (len(codes) - 1) + [OPERATING_SYSTEM]
        assert ended(kernel) == signal.SIGSEGV


@source(f"{CUDA_CHECKPOINT}/issues/33 (2025-07, names no driver): the target allocates the host memory")
def test_a_checkpoint_beyond_the_targets_memory_cgroup_ends_it(
    driver: tuple[Simulator, Checkpoint], tmp_path: Path
) -> None:
    machine, checkpoint = driver
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    with Worker(machine.env()) as kernel, Worker(machine.env()) as outside:
        (cgroup / "cgroup.procs").write_text(f"{kernel.pid}\n")
        machine.limit_host_memory(cgroup, 2 * GIB)
        for worker in (kernel, outside):
            worker.run("b = gpu.allocate('1GiB')")
            checkpoint.suspend(worker.pid)
            checkpoint.resume(worker.pid)
            worker.run("c = gpu.allocate('2GiB')")
        checkpoint.suspend(outside.pid)
        assert checkpoint.lock(kernel.pid) == 0
        assert checkpoint.checkpoint(kernel.pid) == OPERATING_SYSTEM
        assert ended(kernel) == signal.SIGKILL


# ---- restore on other devices ----

MOVES = f"{CUDA_CHECKPOINT}/issues/18, 35 and 46"


def alone(device: int, machine: Simulator) -> dict[str, str]:
    """The environment of a process that sees one device."""
    return machine.env(CUDA_VISIBLE_DEVICES=machine.uuid(device))


@source(MOVES)
@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        pytest.param("2xH100-80GB", ((1, 0),), id="not the one in use"),
        pytest.param("2xH100-80GB", ((0, 1), (0, 1)), id="twice"),
        pytest.param("2xH100-80GB", ((0, 1), (1, 0)), id="one that the process does not see"),
        pytest.param("2xH100-80GB", ((0, 9),), id="one that is not there"),
        pytest.param("1xH100-80GB+1xA100-80GB", ((0, 1),), id="another chip"),
        pytest.param("1xH100-80GB+1xH100-40GB", ((0, 1),), id="less memory"),
        pytest.param("2xH100-80GB,driver=575.57", ((0, 1),), id="an older driver"),
    ],
)
def test_a_move_with_pairs_that_are_not_so_is_refused_and_changes_nothing(
    tmp_path: Path, spec: str, pairs: tuple[tuple[int, int], ...]
) -> None:
    machine = Simulator(tmp_path, f"{spec},host=512GiB,context=0GiB,free-delay=0")
    uuids = {0: machine.uuid(0), 1: machine.uuid(1), 9: "GPU-" + "0" * 32}
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(alone(0, machine)) as kernel:
            kernel.run("b = gpu.allocate('6GiB'); b.fill()")
            checkpoint.suspend(kernel.pid)
            assert checkpoint.restore(kernel.pid, tuple((uuids[old], uuids[new]) for old, new in pairs)) == 1
            assert machine.process_state(kernel.pid) == CHECKPOINTED
            checkpoint.resume(kernel.pid)
            assert kernel.ask("b.is_intact()")


@source(f"{MOVES}; github.com/checkpoint-restore/criu/pull/2836; not documented")
@pytest.mark.parametrize(("named", "codes"), [("visible", [1, 0]), ("used", [0, 1])])
def test_a_move_names_all_visible_devices_or_those_in_use_alone(
    tmp_path: Path, named: str, codes: list[int]
) -> None:
    machine = Simulator(tmp_path, f"2xH100-80GB,host=512GiB,context=0GiB,free-delay=0,pairs={named}")
    first, second = machine.uuid(0), machine.uuid(1)
    for pairs, code in zip((((first, second),), ((first, second), (second, first))), codes, strict=True):
        for checkpoint in checkpoint_in(machine.env()):
            with Worker(machine.env()) as kernel:
                kernel.run("b = gpu.allocate('6GiB'); b.fill()")
                checkpoint.suspend(kernel.pid)
                assert checkpoint.restore(kernel.pid, pairs) == code
                if code:
                    continue
                assert checkpoint.unlock(kernel.pid) == 0
                assert kernel.ask("b.is_intact()")
                kernel.run("c = demo_gpu.open(1).allocate('1GiB')")  # no two numbers are one device
                assert (machine.device_used(0), machine.device_used(1)) == (GIB, 6 * GIB)


@source(f"{MOVES}; issues/44")
def test_a_move_without_free_memory_loses_the_process(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "2xH100-80GB,host=512GiB,context=0GiB,free-delay=0")
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(alone(0, machine)) as kernel, Worker(alone(1, machine)) as other:
            kernel.run("b = gpu.allocate('50GiB')")
            other.run("b = gpu.allocate('50GiB')")
            checkpoint.suspend(kernel.pid)
            assert checkpoint.restore(kernel.pid, ((machine.uuid(0), machine.uuid(1)),)) == OUT_OF_MEMORY
            assert checkpoint.restore(kernel.pid) == OPERATING_SYSTEM


IDENTITY = """
cuda = ctypes.CDLL("libcuda.so.1")
def identity():
    uuid, bus = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
    device = ctypes.c_int(-1)
    assert cuda.cuCtxGetDevice(ctypes.byref(device)) == 0
    assert cuda.cuDeviceGetUuid_v2(uuid, device) == 0
    assert cuda.cuDeviceGetPCIBusId(bus, 16, device) == 0
    return device.value, uuid.raw.hex(), bus.value.decode()
"""


@source(f"{CUDA_CHECKPOINT}/issues/48 (moved to another node); within one node not documented")
@pytest.mark.parametrize(("shown", "after"), [("new", 1), ("old", 0)])
def test_a_moved_process_keeps_its_number_and_bus_and_sees_either_uuid(
    tmp_path: Path, shown: str, after: int
) -> None:
    machine = Simulator(tmp_path, f"2xH100-80GB,host=512GiB,context=0GiB,free-delay=0,moved-uuid={shown}")
    plain = [machine.uuid(device).removeprefix("GPU-").replace("-", "") for device in range(2)]
    pair = ((machine.uuid(0), machine.uuid(1)),)
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(alone(0, machine)) as kernel:
            kernel.run(f"b = gpu.allocate('6GiB')\n{IDENTITY}")
            assert kernel.ask("identity()") == [0, plain[0], "0000:01:00.0"]
            checkpoint.suspend(kernel.pid)
            assert checkpoint.restore(kernel.pid, pair) == 0
            assert checkpoint.unlock(kernel.pid) == 0
            assert kernel.ask("identity()") == [0, plain[after], "0000:01:00.0"]
            with Worker(machine.env(), open_gpu=False) as looker:
                looker.run(NVML)
                looker.run("def on(i): global h; h = n.nvmlDeviceGetHandleByIndex(i); return list(shown())")
                assert [kernel.pid in looker.ask(f"on({device})") for device in range(2)] == [False, True]
            # Its environment stays: what it starts with it opens the old device.
            with Worker(alone(0, machine)) as later:
                later.run("b = gpu.allocate('1GiB')")
                assert (machine.device_used(0), machine.device_used(1)) == (GIB, 6 * GIB)


# ---- processes and memory, as NVML shows them ----


@source("https://github.com/llm-d-incubation/llm-d-rl-time-slicing/pull/148 (2026-08, names no driver)")
def test_a_process_that_only_called_cu_init_is_listed_with_0_bytes_and_cannot_be_locked(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env(), open_gpu=False) as terminal, Worker(machine.env()) as kernel:
        terminal.run(NVML)
        terminal.run("assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0")
        kernel.run("b = gpu.allocate('1GiB')")
        shown = terminal.ask("shown()")
        assert shown[str(terminal.pid)] == 0
        assert shown[str(kernel.pid)] == GIB
        assert checkpoint.lock(terminal.pid) == NOT_INITIALIZED
        assert get_state(checkpoint, terminal.pid) == NOT_INITIALIZED
        checkpoint.suspend(kernel.pid)
        assert str(kernel.pid) not in terminal.ask("shown()")


@source("https://github.com/Project-HAMi/HAMi-core/issues/112 (driver 560.35): 0 bytes")
@source(
    "https://github.com/NVIDIA/open-gpu-kernel-modules/pull/614 (2024-03, names no driver): not available"
)
@pytest.mark.parametrize(("bytes_", "shown"), [("shown", GIB), ("zero", 0), ("unavailable", None)])
def test_nvml_may_hide_the_bytes_of_a_process(tmp_path: Path, bytes_: str, shown: int | None) -> None:
    machine = machine_with(tmp_path, f"bytes={bytes_}")
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1GiB')")
        kernel.run(NVML)
        assert kernel.ask("shown()[os.getpid()]") == shown
        assert kernel.ask("n.nvmlDeviceGetMemoryInfo(h).used") == GIB


@source("NVML API reference r580, Field Value Queries; Error Recovery and Response Flags")
def test_nvml_tells_which_recovery_action_a_gpu_needs(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as monitor:
        monitor.run(NVML)
        ask = "[[f.nvmlReturn, f.value.uiVal] for f in n.nvmlDeviceGetFieldValues(h, [230, 9999])]"
        assert monitor.ask(ask) == [[0, 0], [3, 0]]  # a field that it does not know has a code of its own
        machine.fault(Fault.RECOVERY_ACTION, device=0, value=1)
        assert monitor.ask(ask) == [[0, 1], [3, 0]]


@source("NVML API reference r580, nvmlDeviceGetProcessUtilization")
def test_process_utilization_is_of_the_wall_clock_since_the_argument(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(NVML)
        kernel.run(
            "b = gpu.allocate('1MiB'); b.fill(); before = int(time.time() * 1e6); demo_gpu.train([b], 1, 0.2)"
        )
        kernel.run("(sample,) = n.nvmlDeviceGetProcessUtilization(h, before)")
        assert kernel.ask("sample.pid == os.getpid() and sample.smUtil > 30")
        assert abs(kernel.ask("sample.timeStamp") / 1e6 - time.time()) < 30
        kernel.run("time.sleep(0.05)")
        with pytest.raises(WorkerError, match="NotFound"):
            kernel.run("n.nvmlDeviceGetProcessUtilization(h, int(time.time() * 1e6))")


@source("CUDA C++ Programming Guide 13.0, Lazy Loading: code takes device memory when it is loaded")
def test_a_context_grows_with_modules_and_with_its_first_restore(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "context=500MiB,growth=16MiB", "1xH100-80GB")
    for checkpoint in checkpoint_in(machine.env()):
        with Worker(machine.env(), open_gpu=False) as kernel:
            kernel.run(_CONTEXT)
            assert machine.device_used(0) == 500 * MIB
            kernel.run("gpu = demo_gpu.open()")
            assert machine.device_used(0) == 502 * MIB
            for _ in range(2):
                checkpoint.suspend(kernel.pid)
                assert machine.device_used(0) == 0
                checkpoint.resume(kernel.pid)
                assert machine.device_used(0) == 518 * MIB
            kernel.run("cuda.cuDevicePrimaryCtxReset_v2(0)")
            assert machine.device_used(0) == 0


@source("https://github.com/vllm-project/vllm, tests/utils.py (2026-11), wait_for_gpu_memory_to_clear")
def test_memory_comes_free_some_time_after_the_end_of_its_process(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "free-delay=3000")
    with Worker(machine.env()) as kernel, Worker(machine.env()) as other:
        kernel.run("b = gpu.allocate('60GiB')")
        other.run(NVML)
        kernel.kill()
        ended_at = time.monotonic()
        assert machine.device_used(0) == 60 * GIB
        assert other.ask("list(shown())") == [other.pid]
        with pytest.raises(WorkerError, match="Out of GPU memory"):
            other.run("gpu.allocate('60GiB')")
        while machine.device_used(0):
            assert time.monotonic() < ended_at + 30
            time.sleep(0.01)
        assert time.monotonic() - ended_at > 2.5
        other.run("gpu.allocate('60GiB')")


FORK = """
child = os.fork()
if not child:
    time.sleep(3600)
"""


@source(
    "https://github.com/NVIDIA/Megatron-LM/pull/3684, "
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5984 (2026-09): 51 descriptors, 1,135 MiB; "
    "listed: https://github.com/GaTech-RL2/EgoVerse/pull/682, not: https://github.com/pytorch/pytorch/issues/5736"
)
@pytest.mark.parametrize("more", ["", "dead=unlisted"])
def test_a_forked_process_keeps_the_memory_of_its_dead_parent(tmp_path: Path, more: str) -> None:
    machine = machine_with(tmp_path, more)
    with Worker(machine.env()) as kernel, Worker(machine.env(), open_gpu=False) as other:
        kernel.run("b = gpu.allocate('60GiB')")
        kernel.run(FORK)
        worker = int(kernel.ask("child"))
        other.run(NVML)
        assert other.ask("shown()") == {str(kernel.pid): 60 * GIB}
        kernel.kill()
        time.sleep(0.3)
        assert machine.device_used(0) == 60 * GIB
        assert other.ask("shown()") == ({} if more else {str(kernel.pid): 60 * GIB})
        other.run("gpu = demo_gpu.open()")
        with pytest.raises(WorkerError, match="Out of GPU memory"):
            other.run("gpu.allocate('60GiB')")
        os.kill(worker, signal.SIGKILL)
        until(lambda: machine.device_used(0) == 0, "its memory is free")
        other.run("gpu.allocate('60GiB')")


@source(
    "execve(2) (2024-06): descriptors that are marked close-on-exec, as those of the driver are, are closed"
)
def test_a_program_that_a_process_starts_keeps_nothing_of_it(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(
            "import subprocess; b = gpu.allocate('60GiB'); child = subprocess.Popen(['sleep', '3600'])"
        )
        child = int(kernel.ask("child.pid"))
        kernel.kill()
        try:
            until(lambda: machine.device_used(0) == 0, "its memory is free")
        finally:
            os.kill(child, signal.SIGKILL)


@source(f"{CUDA_CHECKPOINT} README (driver 570): checkpointed, it has no memory on the device")
def test_a_forked_process_keeps_nothing_of_a_parent_that_ended_while_checkpointed(
    driver: tuple[Simulator, Checkpoint],
) -> None:
    machine, checkpoint = driver
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('60GiB')")
        kernel.run(FORK)
        worker = int(kernel.ask("child"))
        checkpoint.suspend(kernel.pid)
        kernel.kill()
        assert machine.device_used(0) == 0
        assert machine.host_memory()[0] == machine.host_memory()[1]
        os.kill(worker, signal.SIGKILL)


@source("cuda.h 13.5, cuMemRelease: memory is freed when its shareable counterparts are released too")
def test_exported_memory_is_used_until_every_descriptor_of_it_is_closed(tmp_path: Path) -> None:
    machine = machine_with(tmp_path)
    with Worker(machine.env()) as kernel:
        kernel.run(CALLS)
        kernel.run("import subprocess; handle = create(1 << 30)[1]; code, shared = export(handle)")
        assert kernel.ask("[code, release(handle), release(handle)]") == [0, 0, 1]
        kernel.run("other = subprocess.Popen(['cat'], stdin=subprocess.PIPE, pass_fds=[shared])")
        for end in ("os.close(shared)", "other.communicate()"):
            assert kernel.ask("release(create(2 << 20)[1])") == 0
            assert machine.device_used(0) == GIB
            kernel.run(end)
        assert kernel.ask("release(create(2 << 20)[1])") == 0
        assert machine.device_used(0) == 0


@source("NVML API reference r590, nvmlMemory_t: used is reserved and allocated; some is always set aside")
def test_an_empty_device_may_show_memory_as_used(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "reserved=600MiB")
    with Worker(machine.env()) as kernel:
        kernel.run(NVML)
        kernel.run("gib = 1 << 30; n2 = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)")
        kernel.run("info = n.nvmlDeviceGetMemoryInfo(h)")
        assert kernel.ask("[info.total, info.used, info.free]") == [80 * GIB, 600 * MIB, 80 * GIB - 600 * MIB]
        assert kernel.ask("[n2.reserved, n2.used, n2.free]") == [600 * MIB, 0, 80 * GIB - 600 * MIB]
        assert kernel.ask("gpu.memory()") == [80 * GIB - 600 * MIB, 80 * GIB]
        with pytest.raises(WorkerError, match="Out of GPU memory"):
            kernel.run("gpu.allocate(80 * gib - 598 * (1 << 20))")
        kernel.run("gpu.allocate(80 * gib - 600 * (1 << 20))")


@source("NVML API reference r580, nvmlMemory_v2_t: the driver keeps memory for itself")
def test_not_all_that_is_shown_as_free_can_be_taken(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "unusable=64MiB")
    with Worker(machine.env()) as kernel:
        assert kernel.ask("gpu.memory()[0]") == 80 * GIB
        with pytest.raises(WorkerError, match="Out of GPU memory"):
            kernel.run("gpu.allocate(80 << 30)")
        kernel.run("gpu.allocate((80 << 30) - (64 << 20))")


@source("rmmod(8) of kmod 30: a module in use is not removed; nvidia-smi r580 refuses a reset with clients")
def test_the_driver_does_not_restart_under_a_living_client(driver: tuple[Simulator, Checkpoint]) -> None:
    machine, checkpoint = driver
    with pytest.raises(ValueError, match="no such fault"):
        machine.fault(Fault.DRIVER_RESTART)
    checkpoint.worker.kill()
    with Worker(machine.env(), open_gpu=False) as monitor:
        monitor.run(NVML)
        with pytest.raises(ValueError, match="no such fault"):
            machine.fault(Fault.DRIVER_RESTART)
        monitor.run("n.nvmlShutdown()")
        machine.fault(Fault.DRIVER_RESTART)


@source("github.com/vosen/ZLUDA, dark_api/src/lib.rs (2026-11): cuGetExportTable {6BD5FB6C-...}, slot 2")
@source("libcudart 12.9 and 13.5: strings(1) shows cuGetExportTable")
def test_the_runtime_makes_its_context_past_every_symbol(tmp_path: Path) -> None:
    """The library neither counts it nor makes it wait; the device shows it."""
    machine = machine_with(tmp_path, "context=500MiB", "1xH100-80GB")
    lease = Lease(tmp_path / "lease", [(machine.uuid(0), 4 * GIB)])
    lease.write(Phase.SUSPENDED)
    with Worker(machine.env(**lease.env()), open_gpu=False) as terminal:
        terminal.run("cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)")
        assert terminal.ask("cuda.gpushare_sim_retain_unseen(0)") == 0
        assert lease.slots() == {}
        assert machine.device_used(0) == 500 * MIB
