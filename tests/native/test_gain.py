"""A process of a server without a GPU sees the devices of the lease that its server gets later."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.worker import Worker
from tests.simulator import GIB, Lease, Simulator

NO_DEVICE = 100
FIND = """
def find(how):
    cuda = ctypes.CDLL("libcuda.so.1")
    if how == "symbol":
        return cuda.cuInit
    ask, found = cuda.cuGetProcAddress_v2, ctypes.c_void_p()
    assert ask(b"cuInit", ctypes.byref(found), 12000, ctypes.c_uint64(0), None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(found.value)
"""


def reserved(machine: Simulator, folder: Path, visible: str = "") -> Worker:
    """A process that names a lease which does not exist."""
    env = machine.env() | {
        "GPUSHARE_LEASE": "b0123456789-1",
        "GPUSHARE_LEASE_DIR": str(folder),
        "LD_PRELOAD": str(native.preload_path()),
        "CUDA_VISIBLE_DEVICES": visible,
    }
    worker = Worker(env, open_gpu=False)
    worker.run(FIND)
    return worker


@pytest.mark.parametrize("how", ["symbol", "address"])
def test_devices_of_a_lease_that_came_later_are_seen_at_the_first_look(
    machine: Simulator, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    folder = tmp_path / "later"
    with reserved(machine, folder) as looked, reserved(machine, folder) as kernel:
        assert looked.ask(f"find({how!r})(0)") == NO_DEVICE
        # NVML has none either, and nothing is said about a lease.
        looked.run("import pynvml as n; n.nvmlInit()")
        assert looked.ask("n.nvmlDeviceGetCount()") == 0
        lease = Lease(folder, [(machine.uuid(1), 40 * GIB)])
        assert looked.ask("n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0))") == machine.uuid(1)
        assert kernel.ask(f"find({how!r})(0)") == 0
        kernel.run("gpu = demo_gpu.open()")
        assert kernel.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
        kernel.run("b = gpu.allocate('30GiB')")
        assert sum(lease.slots()[kernel.pid].used_bytes) == 30 * GIB
        assert machine.device_used(1) == 30 * GIB
        kernel.run("libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p")
        assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == machine.uuid(1)
    assert "gpushare:" not in capfd.readouterr().err


def test_two_devices_are_seen_in_the_order_of_the_lease(machine: Simulator, tmp_path: Path) -> None:
    with reserved(machine, tmp_path / "later") as kernel:
        Lease(tmp_path / "later", [(machine.uuid(1), 80 * GIB), (machine.uuid(0), 80 * GIB)])
        assert kernel.ask("find('symbol')(0)") == 0
        kernel.run("libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p")
        assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == (
            f"{machine.uuid(1)},{machine.uuid(0)}"
        )


@pytest.mark.parametrize(("visible", "code"), [("0", 0), ("0,1", 0), ("1", NO_DEVICE), ("-1", NO_DEVICE)])
def test_a_process_that_chose_before_its_lease_came_keeps_its_choice(
    machine: Simulator, tmp_path: Path, capfd: pytest.CaptureFixture[str], visible: str, code: int
) -> None:
    with reserved(machine, tmp_path / "later", visible) as kernel:
        Lease(tmp_path / "later", [(machine.uuid(1), 40 * GIB)])
        assert kernel.ask("find('symbol')(0)") == code
        if not code:
            kernel.run("gpu = demo_gpu.open(); b = gpu.allocate('1GiB')")
            assert machine.device_used(1) == GIB
        kernel.run("libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p")
        assert kernel.ask("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == visible
    assert "gpushare:" not in capfd.readouterr().err


@pytest.mark.parametrize("limit", [{}, {"GPUSHARE_MEMORY_LIMIT": str(40 * GIB)}])
def test_a_program_that_hides_all_devices_sees_none(machine: Simulator, half: Lease, limit) -> None:
    """As ``CUDA_VISIBLE_DEVICES= python train.py`` does; without a limit it began before the lease."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with Worker(machine.env() | half.env() | hidden | limit, open_gpu=False) as program:
        program.run(FIND)
        if not limit:
            program.run("os.environ['CUDA_VISIBLE_DEVICES'] = ''")
        assert program.ask("find('symbol')(0)") == NO_DEVICE


def test_a_child_of_a_process_that_saw_the_lease_sees_it_too(machine: Simulator, tmp_path: Path) -> None:
    with reserved(machine, tmp_path / "later") as kernel:
        Lease(tmp_path / "later", [(machine.uuid(1), 80 * GIB)])
        assert kernel.ask("find('symbol')(0)") == 0
        kernel.run("libc = ctypes.CDLL(None)")
        assert kernel.ask(f"libc.system(b'test \"$CUDA_VISIBLE_DEVICES\" = {machine.uuid(1)}')") == 0
