"""The simulated driver, through the real bindings: cuda-bindings and nvidia-ml-py."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import until
from tests.native.programs import run
from tests.native.worker import Worker, WorkerError
from tests.simulator import GIB, MIB, Fault, Simulator

_BINDINGS = """
import json, os, warnings
warnings.simplefilter("ignore")
from cuda.bindings import driver as d
def ck(r):
    e, *v = r
    if int(e): raise RuntimeError(e.name)
    return v[0] if len(v) == 1 else v or None
"""


def python(env: dict[str, str], source: str) -> Any:
    """What a script printed, as JSON."""
    done = run(sys.executable, "-c", source, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_cuda_bindings_run_unmodified(machine: Simulator) -> None:
    seen = python(
        machine.env(),
        _BINDINGS
        + """
ck(d.cuInit(0))
dev = ck(d.cuDeviceGet(1))
ck(d.cuCtxSetCurrent(ck(d.cuDevicePrimaryCtxRetain(dev))))
p = ck(d.cuMemAlloc(1 << 30))
ck(d.cuMemcpyHtoD(p, b"hello gpu", 9))
q = ck(d.cuMemAllocAsync(1 << 21, 0))
ck(d.cuMemcpyDtoD(q, p, 9))
out = bytearray(9); ck(d.cuMemcpyDtoH(out, q, 9))
stream = ck(d.cuStreamCreate(0)); event = ck(d.cuEventCreate(0))
ck(d.cuEventRecord(event, stream)); ck(d.cuEventSynchronize(event)); ck(d.cuStreamSynchronize(stream))
print(json.dumps({
    "version": ck(d.cuDriverGetVersion()), "count": ck(d.cuDeviceGetCount()),
    "name": ck(d.cuDeviceGetName(64, dev)).rstrip(b" \\0").decode(),
    "uuid": bytes(ck(d.cuDeviceGetUuid(dev)).bytes).hex(), "read": out.decode(),
    "memory": [int(x) for x in ck(d.cuMemGetInfo())],
    "major": ck(d.cuDeviceGetAttribute(d.CUdevice_attribute(75), dev)),
    "error": ck(d.cuGetErrorName(d.CUresult.CUDA_ERROR_OUT_OF_MEMORY)).decode()}))
""",
    )
    assert seen == {
        "version": 13000,
        "count": 2,
        "name": "Simulated H100-80GB",
        "uuid": machine.uuid(1).removeprefix("GPU-").replace("-", ""),
        "read": "hello gpu",
        "memory": [79 * GIB - 2 * MIB, 80 * GIB],
        "major": 9,
        "error": "CUDA_ERROR_OUT_OF_MEMORY",
    }


def test_cuda_bindings_checkpoint_another_process(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('6GiB'); b.fill(seed=3)")
        seen = python(
            machine.env(),
            _BINDINGS
            + f"""
pid = {kernel.pid}
ck(d.cuInit(0))
state = lambda: int(ck(d.cuCheckpointProcessGetState(pid)))
lock = d.CUcheckpointLockArgs(); lock.timeoutMs = 5000
states = [state()]
ck(d.cuCheckpointProcessLock(pid, lock)); states.append(state())
ck(d.cuCheckpointProcessCheckpoint(pid, None)); states.append(state())
ck(d.cuCheckpointProcessRestore(pid, None)); states.append(state())
ck(d.cuCheckpointProcessUnlock(pid, None)); states.append(state())
print(json.dumps(states))
""",
        )
        assert seen == [0, 1, 2, 1, 0]
        assert kernel.ask("b.is_intact()")


def test_nvidia_ml_py_runs_unmodified(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1GiB')")
        seen = python(
            machine.env(),
            """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
other = n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1)))
def code(f, *a):
    try: f(*a)
    except n.NVMLError as e: return e.value
    return 0
memory, second = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
print(json.dumps({
    "count": n.nvmlDeviceGetCount(), "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h),
    "index": n.nvmlDeviceGetIndex(other), "driver": n.nvmlSystemGetDriverVersion(),
    "cuda": n.nvmlSystemGetCudaDriverVersion(), "used": [memory.used, second.used],
    "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "mig": code(n.nvmlDeviceGetMigMode, h), "idle": code(n.nvmlDeviceGetProcessUtilization, h, 0),
    "limits": code(n.nvmlDeviceSetMemoryLimits_v1, h, n.c_nvmlSetMemoryLimits_v1_t(b"/x", 0, 1)),
    "topology": n.nvmlDeviceGetTopologyCommonAncestor(h, other),
    "persistence": n.nvmlDeviceGetPersistenceMode(h),
    "pci": n.nvmlDeviceGetPciInfo(other).busId, "rates": n.nvmlDeviceGetUtilizationRates(h).gpu}))
n.nvmlShutdown()
""",
        )
    assert seen == {
        "count": 2,
        "name": "Simulated H100-80GB",
        "uuid": machine.uuid(0),
        "index": 1,
        "driver": "580.00.00-simulated",
        "cuda": 13000,
        "used": [GIB, GIB],
        "processes": [[kernel.pid, GIB]],
        "mig": 3,
        "idle": 6,
        "limits": 13,
        "topology": 50,
        "persistence": 1,
        "pci": "00000000:02:00.0",
        "rates": 0,
    }


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("{1}", [1]),
        ("{1:.14}", [1]),
        ("{1},0", [1]),
        ("0,{1}", [0]),
        ("1,7,0", [1]),
        ("0,0", []),
        ("{0},{0}", []),
        ("1gpu, 0", [1, 0]),
        ("GPU-", []),
        ("-1", []),
        ("", []),
    ],
)
def test_visible_devices_are_read_as_the_driver_does(
    machine: Simulator, visible: str, expected: list[int]
) -> None:
    uuids = [machine.uuid(0), machine.uuid(1)]
    env = machine.env(CUDA_VISIBLE_DEVICES=visible.format(*uuids))
    with Worker(env, open_gpu=False) as kernel:
        kernel.run("""
cuda = ctypes.CDLL("libcuda.so.1")
def uuid(i):
    raw = ctypes.create_string_buffer(16)
    assert cuda.cuDeviceGetUuid_v2(raw, i) == 0
    return raw.raw.hex()
code, count = cuda.cuInit(0), ctypes.c_int()
assert code or cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
seen = [uuid(i) for i in range(count.value)]
""")
        assert kernel.ask("code") == (0 if expected else 100)
        assert kernel.ask("seen") == [uuids[i].removeprefix("GPU-").replace("-", "") for i in expected]


@pytest.mark.parametrize(
    ("order", "visible", "expected"),
    [
        (None, None, [2, 0, 1]),
        ("FASTEST_FIRST", None, [2, 0, 1]),
        ("PCI_BUS_ID", None, [0, 1, 2]),
        ("FASTEST_FIRST", "0,2", [2, 1]),
        ("PCI_BUS_ID", "0,2", [0, 2]),
        (None, "{1},{0}", [1, 0]),
    ],
)
def test_devices_are_numbered_from_the_fastest_or_by_their_bus(
    tmp_path: Path, order: str | None, visible: str | None, expected: list[int]
) -> None:
    machine = Simulator(tmp_path, "1xA100-40GB+1xL4-24GB+1xH100-80GB,host=512GiB")
    uuids = [machine.uuid(device) for device in range(3)]
    env = machine.env()
    env |= {"CUDA_DEVICE_ORDER": order} if order else {}
    env |= {"CUDA_VISIBLE_DEVICES": visible.format(*uuids)} if visible else {}
    with Worker(env, open_gpu=False) as kernel:
        kernel.run("import pynvml as n; n.nvmlInit()")
        names = "[demo_gpu.open(i).name for i in range(demo_gpu.device_count())]"
        shown = (
            "[n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())]"
        )
        nvml = kernel.ask(shown)
        assert kernel.ask(names) == [nvml[i] for i in expected]
        assert nvml == [f"Simulated {name}" for name in ("A100-40GB", "L4-24GB", "H100-80GB")]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [0]), ("0", [0]), ("1", []), ("{1}", [1]), ("{1:.12}", [1]), ("{1},{0}", [1]), ("", [])],
)
def test_a_process_sees_one_mig_instance(tmp_path: Path, visible: str | None, expected: list[int]) -> None:
    machine = Simulator(tmp_path, "2xH100 MIG 1g.10gb-10GB,host=512GiB,mig")
    uuids = [machine.uuid(0), machine.uuid(1)]
    env = machine.env(**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(*uuids)}))
    with Worker(env, open_gpu=False) as kernel:
        if not expected:
            with pytest.raises(WorkerError, match="100"):
                kernel.run("demo_gpu.device_count()")
            return
        kernel.run("gpu = demo_gpu.open(); gpu.allocate('1GiB')")
        assert kernel.ask("demo_gpu.device_count()") == 1
        assert machine.device_used(expected[0]) > GIB > machine.device_used(1 - expected[0])


def test_a_context_costs_memory_once_per_process_and_device(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,context=500MiB,free-delay=0")
    with Worker(machine.env()) as one, Worker(machine.env()) as two:
        one.run("again = demo_gpu.open()")
        assert machine.device_used(0) == 1000 * MIB + 3 * 2 * MIB  # `demo_gpu.open` loads a module each
        two.kill()
        assert machine.device_used(0) == 500 * MIB + 2 * 2 * MIB
    assert machine.device_used(0) == 0


def test_small_allocations_share_pages(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("many = [gpu.allocate(64 << 10) for _ in range(33)]")
        assert machine.device_used(0) == 4 * MIB
        kernel.run("[gpu.call('cuMemFree', b.address) for b in many]")
        assert machine.device_used(0) == 0


def test_utilization_is_the_share_of_the_last_second(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel, Worker(machine.env(), open_gpu=False) as observer:
        observer.run("""
import pynvml as n
n.nvmlInit(); handles = [n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]
def look():
    try:
        samples = n.nvmlDeviceGetProcessUtilization(handles[0], 0)
    except n.NVMLError_NotFound:
        samples = []
    return [[n.nvmlDeviceGetUtilizationRates(h).gpu for h in handles], [[s.pid, s.smUtil] for s in samples]]
""")
        kernel.run("b = gpu.allocate('1MiB'); b.fill()")
        kernel.start("demo_gpu.train([b], 1, 120)")

        def computes() -> bool:
            [busy, other], samples = observer.ask("look()")
            assert other == 0
            assert busy <= 100
            return busy >= 60 and [pid for pid, share in samples if 60 <= share <= 100] == [kernel.pid]

        until(computes, "it computes for most of a second")
        kernel.kill()
        until(lambda: observer.ask("n.nvmlDeviceGetUtilizationRates(handles[0]).gpu") == 0, "it ended")


def test_different_devices_in_one_machine(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB+2xA100-40GB,host=64GiB")
    assert [machine.device_total(i) for i in range(3)] == [80 * GIB, 40 * GIB, 40 * GIB]
    assert len({machine.uuid(i) for i in range(3)}) == 3
    assert machine.host_memory() == (64 * GIB, 64 * GIB)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "H100",
        "0xH100-80GB",
        "17xH100-80GB",
        "2xH100",
        "2xH100-",
        "2x-80GB",
        "1xH-80GB,nonsense=1GiB",
        "1xH-80GB;",
    ],
)
def test_a_wrong_description_is_no_machine(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ValueError, match="not a machine"):
        Simulator(tmp_path, spec)


def test_a_lost_device_says_so_until_it_is_back(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel, Worker(machine.env(), open_gpu=False) as observer:
        observer.run("""
import pynvml as n
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)
def code():
    try: n.nvmlDeviceGetMemoryInfo(h)
    except n.NVMLError as e: return e.value
    return 0
""")
        machine.fault(Fault.DEVICE_LOST, device=0, count=-1)
        assert observer.ask("code()") == 15
        with pytest.raises(WorkerError) as lost:
            kernel.run("gpu.allocate('1GiB')")
        assert lost.value.code == 46
        machine.clear_faults()
        assert observer.ask("code()") == 0
        kernel.run("gpu.allocate('1GiB')")


def test_an_xid_reaches_the_process_that_waits_for_it(machine: Simulator) -> None:
    with Worker(machine.env(), open_gpu=False) as observer:
        observer.run("""
import pynvml as n
n.nvmlInit(); events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(1), n.nvmlEventTypeXidCriticalError, events)
""")
        with pytest.raises(WorkerError, match="Timeout"):
            observer.run("n.nvmlEventSetWait_v2(events, 1)")
        machine.fault(Fault.XID, device=0, value=31)
        machine.fault(Fault.XID, device=1, value=79)
        assert observer.ask("n.nvmlEventSetWait_v2(events, 1000).eventData") == 79


# Ended by clearing the faults, long before.
HANG_MS = 120_000


def test_a_hanging_query_hangs_only_its_caller(machine: Simulator) -> None:
    with Worker(machine.env(), open_gpu=False) as observer:
        observer.run("import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)")
        machine.fault(Fault.HANG_NVML, device=0, value=HANG_MS)
        observer.start("n.nvmlDeviceGetMemoryInfo(h).used")
        assert observer.is_waiting(0.1)
        with Worker(machine.env()) as kernel:
            kernel.run("gpu.allocate('1GiB')")
            assert machine.device_used(0) == GIB
        machine.clear_faults()
        assert observer.answer() is not None


def test_a_hanging_checkpoint_call_hangs_only_its_caller(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel, Worker(machine.env(), open_gpu=False) as helper:
        helper.run("cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); state = ctypes.c_int(-1)")
        machine.fault(Fault.HANG_CHECKPOINT, pid=kernel.pid, value=HANG_MS)
        helper.start(f"cuda.cuCheckpointProcessGetState({kernel.pid}, ctypes.byref(state)) or state.value")
        assert helper.is_waiting(0.1)
        kernel.run("gpu.allocate('1GiB')")
        machine.clear_faults()
        assert helper.answer() == 0


def test_a_state_of_another_version_is_refused_not_misread(tmp_path: Path) -> None:
    (tmp_path / "gpu-state").write_bytes(b"\1" * 4096)
    with pytest.raises(ValueError, match="not a machine"):
        Simulator(tmp_path, "1xH100-80GB")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users")
def test_processes_of_several_users_share_the_machine() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        machine = Simulator(folder, "1xH100-80GB,context=0GiB,free-delay=0")
        with Worker(machine.env()) as kernel, Worker(machine.env(), open_gpu=False) as other:
            other.run("ctypes.CDLL('libcuda.so.1'); os.setuid(65534)")
            other.run("gpu = demo_gpu.open(); b = gpu.allocate('3GiB')")
            kernel.run("b = gpu.allocate('2GiB')")
            assert machine.device_used(0) == 5 * GIB
            other.kill()
            assert kernel.ask("gpu.memory()[0]") == 78 * GIB


def test_what_the_driver_is_not_told_is_an_error_not_a_crash(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('2MiB'); cuda = ctypes.CDLL('libcuda.so.1')")
        wrong = {
            "cuda.cuMemFree_v2(ctypes.c_uint64(b.address + 8))": 1,
            "cuda.cuMemsetD8_v2(ctypes.c_uint64(b.address), 0, ctypes.c_size_t(1 << 30))": 1,
            "cuda.cuMemcpyDtoH_v2(bytes(8), ctypes.c_uint64(4096), ctypes.c_size_t(8))": 1,
            "cuda.cuDeviceGet(ctypes.byref(ctypes.c_int()), 2)": 101,
            "cuda.cuCtxSetCurrent(None) or cuda.cuCtxSynchronize()": 201,
        }
        assert {source: kernel.ask(source) for source in wrong} == wrong


def test_processes_of_a_forked_parent_start_over(machine: Simulator) -> None:
    with Worker(machine.env(), open_gpu=False) as kernel:
        kernel.run("""
cuda = ctypes.CDLL("libcuda.so.1")
def in_child():
    pid = os.fork()
    if not pid:
        os._exit(cuda.cuInit(0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
        assert kernel.ask("in_child()") == 0
        assert kernel.ask("cuda.cuInit(0)") == 0
        assert kernel.ask("in_child()") == 3  # CUDA_ERROR_NOT_INITIALIZED, as the driver answers
