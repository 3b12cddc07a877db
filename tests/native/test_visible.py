"""A process of a lease sees the lease's devices, numbered as in a container that has no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.native.calls import in_lease
from tests.native.worker import Worker, WorkerError
from tests.simulator import GIB, Lease, Simulator

OPTIONS = "host=512GiB,context=0GiB,free-delay=0"
NO_DEVICE = 100
NOT_FOUND = "Not Found"

#: What CUDA, NVML and torch see.  `torch_count` counts as torch does before it initializes CUDA
#: (torch/cuda/__init__.py: _parse_visible_devices, _transform_uuid_to_ordinals, _device_count_nvml).
LOOK = """
import pynvml as n, re
def nvml():
    n.nvmlInit()
    handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
    assert [n.nvmlDeviceGetIndex(h) for h in handles] == list(range(len(handles)))
    return [n.nvmlDeviceGetUUID(h) for h in handles]
def names(visible, prefix):
    wanted = []
    for name in visible.split(","):
        if name in wanted: return []
        if not name.startswith(prefix): break
        wanted.append(name)
    found = []
    for name in wanted:
        fits = [i for i, uuid in enumerate(nvml()) if uuid.startswith(name)]
        if len(fits) != 1: break
        if fits[0] in found: return []
        found += fits
    return found
def torch_count():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None: return len(nvml())
    if visible.startswith("GPU-"): return len(names(visible, "GPU-"))
    found = []
    for word in visible.split(","):
        number = re.match(r"[+-]?[0-9]+", word.strip())
        number = int(number[0]) if number else -1
        if number in found: return 0
        if number < 0: break
        found.append(number)
    count = len(nvml())
    return next((i for i, number in enumerate(found) if number >= count), len(found))
def cuda():
    library, count, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(16)
    code = library.cuInit(0)
    if code: return code
    library.cuDeviceGetCount(ctypes.byref(count))
    return [library.cuDeviceGetUuid_v2(raw, i) or raw.raw.hex() for i in range(count.value)]
libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p
def look(): return [torch_count(), cuda(), nvml()]
"""

ONE, TWO = [2], [3, 2]
#: Spellings with {0} and {1} for the lease's own devices, {other} for one of another lease: what is seen
#: by index in the lease of one device and of two.
SPELLINGS: dict[str | None, tuple[list[int], list[int]]] = {
    None: ([0], [0, 1]),
    "0": ([0], [0]),
    "0,1": ([0], [0, 1]),
    "1": ([], [1]),
    "1,0": ([], [1, 0]),
    "-1": ([], []),
    "": ([], []),
    "none": ([], []),
    "0,-1,1": ([0], [0]),
    "0,7,1": ([0], [0]),
    "99999999999999999999": ([], []),
    "0,0": ([], []),
    " 0, 1": ([0], [0, 1]),
    "0gpu,+1": ([0], [0, 1]),
    "{0}": ([0], [0]),
    "{0:.14}": ([0], [0]),
    "{0},{1}": ([0], [0, 1]),
    "{1},{0}": ([], [1, 0]),
    "{0},{0}": ([], []),
    "{0},1": ([0], [0]),
    "0,{1}": ([0], [0]),
    "GPU-": ([0], []),
    "{other}": ([], []),
    "{0},{other}": ([0], [0]),
}


@pytest.fixture
def machine(tmp_path: Path) -> Simulator:
    """Four GPUs."""
    return Simulator(tmp_path, f"4xH100-80GB,{OPTIONS}")


def lease_of(machine: Simulator, devices: list[int], folder: str = "lease") -> Lease:
    """A lease of a quarter of each of these devices."""
    return Lease(machine.folder / folder, [(machine.uuid(device), 20 * GIB) for device in devices])


def raw(uuid: str) -> str:
    """A UUID as CUDA answers it."""
    return uuid[4:].replace("-", "")


def look(env: dict[str, str], visible: str | None) -> Any:
    """What a process sees that sets the variable in its first cell; None: that removes it."""
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(LOOK)
        change = "os.environ.pop('CUDA_VISIBLE_DEVICES', 0)"
        if visible is not None:
            change = f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}"
        kernel.run(change)
        return kernel.ask("look()")


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one of four", "two of four"])
def test_a_program_chooses_among_the_devices_of_its_lease(machine: Simulator, devices: list[int]) -> None:
    uuids = [machine.uuid(device) for device in devices]
    env = machine.env(**lease_of(machine, devices).env(), CUDA_VISIBLE_DEVICES=",".join(uuids))
    names = [*uuids, machine.uuid(1)]
    for spelling, expected in SPELLINGS.items():
        visible = spelling and spelling.format(*names, other=machine.uuid(0))
        wanted = expected[len(devices) - 1]
        counted, seen, nvml = look(env, visible)
        assert seen == ([raw(uuids[i]) for i in wanted] or NO_DEVICE), visible
        assert (counted, nvml) == (len(wanted), uuids), visible


@pytest.mark.parametrize("count", [1, 2])
def test_a_machine_with_these_devices_alone_answers_the_same(tmp_path: Path, count: int) -> None:
    """The table above is what the driver does without a lease."""
    machine = Simulator(tmp_path, f"{count}xH100-80GB,{OPTIONS}")
    uuids = [machine.uuid(device) for device in range(count)]
    other = "GPU-00000000-0000-4000-8000-000000000000"
    for spelling, expected in SPELLINGS.items():
        visible = spelling and spelling.format(*uuids, other, other=other)
        wanted = expected[count - 1]
        counted, seen, nvml = look(machine.env(), visible)
        assert seen == ([raw(uuids[i]) for i in wanted] or NO_DEVICE), visible
        assert (counted, nvml) == (len(wanted), uuids), visible


@pytest.mark.parametrize("order", ["FASTEST_FIRST", "PCI_BUS_ID"])
def test_the_lease_s_order_holds_whatever_the_order_of_cuda_is(tmp_path: Path, order: str) -> None:
    machine = Simulator(tmp_path, f"1xA100-40GB+1xL4-24GB+1xH100-80GB,{OPTIONS}")
    uuids = [machine.uuid(device) for device in (1, 2)]
    env = machine.env(**lease_of(machine, [1, 2]).env(), CUDA_DEVICE_ORDER=order)
    assert look(env, "0,1") == [2, [raw(uuid) for uuid in uuids], uuids]
    assert look(env, None) == [2, [raw(uuid) for uuid in uuids], uuids]


def test_memory_is_allocated_on_the_lease_s_device(machine: Simulator) -> None:
    lease = lease_of(machine, TWO)
    with in_lease(machine, lease, CUDA_VISIBLE_DEVICES="1") as kernel:
        assert kernel.ask("gpu.memory()") == [20 * GIB, 20 * GIB]
        kernel.run("b = gpu.allocate('1GiB')")
        assert [machine.device_used(device) for device in range(4)] == [0, 0, GIB, 0]
        assert lease.slots()[kernel.pid].used_bytes[:2] == (0, GIB)
        with pytest.raises(WorkerError, match="101"):  # CUDA_ERROR_INVALID_DEVICE
            kernel.run("demo_gpu.open(1)")


def test_the_variable_stays_as_the_program_set_it(machine: Simulator) -> None:
    """Its children inherit it, and its threads read it."""
    env = machine.env(**lease_of(machine, ONE).env(), CUDA_VISIBLE_DEVICES=machine.uuid(2))
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(LOOK)
        for visible, count in [("-1", 0), ("0,1", 1)]:
            kernel.run(f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}")
            seen = kernel.ask("cuda()")
            assert (len(seen) if count else seen) == (count or NO_DEVICE)
            assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == visible
            assert kernel.ask(f"libc.system(b'test \"$CUDA_VISIBLE_DEVICES\" = {visible}')") == 0
        # Found once, the devices stay.
        kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = '-1'")
        assert len(kernel.ask("cuda()")) == 1


@pytest.mark.parametrize(
    ("change", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, TWO[:1]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, TWO[::-1]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": None}, TWO),
        ({}, TWO[1:]),
    ],
)
def test_a_child_chooses_anew(machine: Simulator, change: dict[str, str | None], devices: list[int]) -> None:
    with in_lease(machine, lease_of(machine, TWO), CUDA_VISIBLE_DEVICES="1") as kernel:
        kernel.run(f"""
import subprocess
env = {{k: v for k, v in (dict(os.environ) | {change!r}).items() if v is not None}}
child = "import ctypes, json, os, sys" + {LOOK!r} + "print(json.dumps(cuda()))"
seen = json.loads(subprocess.check_output([sys.executable, "-c", child], env=env))
""")
        assert kernel.ask("seen") == ([raw(machine.uuid(device)) for device in devices] or NO_DEVICE)


def test_a_process_that_has_removed_the_variable_gets_the_lease_s_devices(machine: Simulator) -> None:
    """Other threads may read the environment meanwhile: the old one is left as it is."""
    env = machine.env(**lease_of(machine, ONE).env(), CUDA_VISIBLE_DEVICES="0")
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(LOOK)
        kernel.run("del os.environ['CUDA_VISIBLE_DEVICES']")
        assert kernel.ask("cuda()") == [raw(machine.uuid(2))]
        assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == machine.uuid(2)
        assert kernel.ask("libc.setenv(b'ONE', b'1', 1) or libc.getenv(b'ONE').decode()") == "1"


def test_calls_at_the_same_time_agree(machine: Simulator) -> None:
    """None of them finds the machine's first device, and the variable is put back after the last."""
    env = machine.env(**lease_of(machine, ONE).env(), CUDA_VISIBLE_DEVICES="0")
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(LOOK)
        kernel.run("""
answers = []
threads = [threading.Thread(target=lambda: answers.append(cuda())) for _ in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
""")
        assert kernel.ask("answers") == 16 * [[raw(machine.uuid(2))]]
        assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == "0"


def test_nvml_finds_no_device_of_another_lease(machine: Simulator) -> None:
    with in_lease(machine, lease_of(machine, TWO), open_gpu=False) as kernel:
        kernel.run(LOOK)
        kernel.run("n.nvmlInit()")
        kernel.run("""
def finds(ask, *arguments):
    try: return n.nvmlDeviceGetUUID(ask(*arguments))
    except n.NVMLError as error: return str(error)
""")
        for device in range(4):
            uuid = machine.uuid(device)
            expected = uuid if device in TWO else NOT_FOUND
            assert kernel.ask(f"finds(n.nvmlDeviceGetHandleByUUID, {uuid!r})") == expected
            address = f"0000:{device + 1:02X}:00.0"
            assert kernel.ask(f"finds(n.nvmlDeviceGetHandleByPciBusId, {address!r})") == expected
        assert kernel.ask("finds(n.nvmlDeviceGetHandleByIndex, 2)") == "Invalid Argument"
        # The number of /dev/nvidiaN stays the machine's.
        minor = "n.nvmlDeviceGetMinorNumber(n.nvmlDeviceGetHandleByIndex(0))"
        assert kernel.ask(minor) == TWO[0]
        kernel.run("n.nvmlShutdown()")
        assert kernel.ask("finds(n.nvmlDeviceGetHandleByIndex, 0)") == "Uninitialized"


def test_without_a_lease_s_files_there_is_no_device(machine: Simulator, tmp_path: Path) -> None:
    """Nothing of the machine's is shown, of which nothing could be allocated."""
    env = machine.env(**lease_of(machine, ONE).env())
    (tmp_path / "lease" / "limit").unlink()
    for visible in ("0", machine.uuid(2), None):
        assert look(env, visible)[1:] == [NO_DEVICE, []]


@pytest.mark.parametrize("spelling", [None, "0", "{0}", "{0:.14}", "0,1", "{0},{1}", "{1}", "1", ""])
def test_a_mig_instance_is_the_first_device_of_its_lease(tmp_path: Path, spelling: str | None) -> None:
    machine = Simulator(tmp_path, f"3xH100 MIG 1g.10gb-10GB,{OPTIONS},mig")
    uuids = [machine.uuid(1), machine.uuid(0)]
    assert uuids[0].startswith("MIG-")
    env = machine.env(**Lease(tmp_path / "lease", [(uuids[0], GIB)]).env(), CUDA_VISIBLE_DEVICES=uuids[0])
    visible = spelling and spelling.format(*uuids)
    seen = look(env, visible)[1]
    assert seen == (NO_DEVICE if spelling in ("{1}", "1", "") else [raw(uuids[0])])
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(LOOK)
        kernel.run("n.nvmlInit(); gpu = n.nvmlDeviceGetHandleByIndex(0)")
        kernel.run("""
def instance(i):
    try: return n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i))
    except n.NVMLError_NotFound: return None
""")
        assert kernel.ask("[n.nvmlDeviceGetCount(), n.nvmlDeviceGetIndex(gpu)]") == [1, 0]
        assert kernel.ask("n.nvmlDeviceGetUUID(gpu)[:4]") == "GPU-"
        assert (
            kernel.ask("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(gpu)))[:4]")
            == "GPU-"
        )
        assert kernel.ask("[instance(i) for i in range(3)]") == [None, uuids[0], None]
        assert kernel.ask("n.nvmlDeviceGetIndex(n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1))") == 1


def test_what_was_written_before_a_move_names_the_device_that_the_lease_has_now(machine: Simulator) -> None:
    """Device 2 is another lease's then: no process of this one finds it."""
    lease = lease_of(machine, ONE)
    old, new = (machine.uuid(device) for device in (2, 0))
    memory = "[getattr(n.nvmlDeviceGetMemoryInfo({}), w) for w in ('total', 'used')]"
    with in_lease(machine, lease, CUDA_VISIBLE_DEVICES=old) as kernel:
        kernel.run(LOOK)
        kernel.run("b = gpu.allocate('1GiB'); n.nvmlInit(); before = n.nvmlDeviceGetHandleByIndex(0)")
        lease.move(new)
        for handle in ("before", "n.nvmlDeviceGetHandleByIndex(0)", f"n.nvmlDeviceGetHandleByUUID({old!r})"):
            assert kernel.ask(memory.format(handle)) == [20 * GIB, GIB]
            assert kernel.ask(f"[n.nvmlDeviceGetUUID({handle}), n.nvmlDeviceGetIndex({handle})]") == [old, 0]
        minor = f"n.nvmlDeviceGetMinorNumber(n.nvmlDeviceGetHandleByUUID({old!r}))"
        assert kernel.ask(minor) == 0
        # The account goes on: it is by the place of a device, whatever the driver calls it.
        kernel.run("c = gpu.allocate('1GiB')")
        assert lease.slots()[kernel.pid].used_bytes[:2] == (2 * GIB, 0)
    for visible in (old, old[:14], new, "0", None):
        assert look(machine.env(**lease.env(), CUDA_VISIBLE_DEVICES=old), visible) == [
            int(visible != new),  # torch compares it with the names that NVML answers
            [raw(new)],
            [old],
        ]


def test_a_handle_from_before_stands_for_the_place_that_its_device_moved_to(machine: Simulator) -> None:
    """The lease has left the first device, and has the second in its place."""
    lease = lease_of(machine, TWO)
    first, second = (machine.uuid(device) for device in TWO)
    with in_lease(machine, lease, open_gpu=False) as kernel:
        kernel.run(LOOK)
        kernel.run("n.nvmlInit(); before = [n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]")
        lease.move(second, machine.uuid(0))
        assert kernel.ask("[n.nvmlDeviceGetIndex(handle) for handle in before]") == [0, 0]
        assert kernel.ask("[n.nvmlDeviceGetUUID(handle) for handle in before]") == [first, first]
        assert kernel.ask("nvml()") == [first, second]


def test_a_device_that_a_lease_left_in_a_move_is_not_found_by_its_address(machine: Simulator) -> None:
    """Another lease may have it: its processes are not shown."""
    lease = lease_of(machine, ONE)
    with in_lease(machine, lease, open_gpu=False, CUDA_VISIBLE_DEVICES=machine.uuid(2)) as kernel:
        kernel.run(LOOK)
        kernel.run("""
def found(address):
    try: return n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(address))
    except n.NVMLError_NotFound: return None
n.nvmlInit()
""")
        look_up = "[found(f'00000000:{d + 1:02X}:00.0') for d in range(4)]"
        assert kernel.ask(look_up) == [None, None, 0, None]
        lease.move(machine.uuid(0))
        assert kernel.ask(look_up) == [0, None, None, None]


def test_a_process_that_only_found_the_old_device_makes_no_context_there(machine: Simulator) -> None:
    """The driver moves no process that has none."""
    lease = lease_of(machine, ONE)
    with in_lease(machine, lease, open_gpu=False, CUDA_VISIBLE_DEVICES=machine.uuid(2)) as kernel:
        kernel.run(LOOK)
        assert kernel.ask("cuda()") == [raw(machine.uuid(2))]
        lease.move(machine.uuid(0))
        context = "ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)"
        assert kernel.ask(context) == 2  # CUDA_ERROR_OUT_OF_MEMORY
        assert machine.device_used(2) == 0


def test_a_context_made_unseen_after_a_move_gets_no_memory_on_the_old_device(machine: Simulator) -> None:
    """As the runtime of torch and cupy makes its contexts."""
    lease = lease_of(machine, ONE)
    with in_lease(machine, lease, open_gpu=False, CUDA_VISIBLE_DEVICES=machine.uuid(2)) as kernel:
        kernel.run(LOOK)
        kernel.run("cuda(); driver = ctypes.CDLL('libcuda.so.1'); at = ctypes.c_void_p()")
        lease.move(machine.uuid(0))
        assert kernel.ask("driver.gpushare_sim_retain_unseen(0)") == 0
        assert kernel.ask("driver.cuCtxGetCurrent(ctypes.byref(at)) or driver.cuCtxSetCurrent(at)") == 0
        assert (
            kernel.ask("driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20))") == 2
        )
        assert machine.device_used(2) == 0
        # The lease has the device again, which is the process's own.
        lease.move(machine.uuid(2))
        assert (
            kernel.ask("driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20))") == 0
        )


def test_a_device_that_took_another_place_in_a_move_is_not_used_in_its_old_one(machine: Simulator) -> None:
    """It would be charged to the device that has its place now."""
    lease = lease_of(machine, TWO)
    devices = ",".join(uuid for uuid, _ in lease.limits)
    with in_lease(machine, lease, open_gpu=False, CUDA_VISIBLE_DEVICES=devices) as kernel:
        kernel.run(LOOK)
        kernel.run("cuda(); driver = ctypes.CDLL('libcuda.so.1')")
        lease.move(lease.limits[1][0], machine.uuid(0))
        for ordinal in (0, 1):
            context = f"driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), {ordinal})"
            assert kernel.ask(context) == 2


def test_a_device_that_was_not_used_before_a_move_is_used_only_where_the_lease_is(machine: Simulator) -> None:
    """Whether the driver moves what a process sees and does not use is not known: here it does not."""
    lease = lease_of(machine, TWO)
    with in_lease(machine, lease, CUDA_VISIBLE_DEVICES="0,1") as kernel:
        lease.move(machine.uuid(0), machine.uuid(1))
        assert kernel.ask("cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 1)") == 2
        assert [kernel.ask(f"create(2 << 20, {ordinal})[0]") for ordinal in (0, 1)] == [0, 2]
        assert machine.device_used(2) == 0
        lease.move(machine.uuid(3), machine.uuid(2))
        assert kernel.ask("create(2 << 20, 1)[0]") == 0


def test_a_process_with_a_context_makes_others_whichever_uuid_the_driver_answers(machine: Simulator) -> None:
    """The driver has moved it; the runtime had made its context unseen."""
    lease = lease_of(machine, ONE)
    with in_lease(machine, lease, open_gpu=False, CUDA_VISIBLE_DEVICES=machine.uuid(2)) as kernel:
        kernel.run(LOOK)
        kernel.run("cuda(); driver = ctypes.CDLL('libcuda.so.1')")
        assert kernel.ask("driver.gpushare_sim_retain_unseen(0)") == 0
        kernel.run("at = ctypes.c_void_p(); driver.cuCtxGetCurrent(ctypes.byref(at))")
        assert kernel.ask("driver.cuCtxSetCurrent(at)") == 0
        lease.move(machine.uuid(0))
        assert kernel.ask("driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)") == 0
        assert kernel.ask("driver.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)") == 0
