"""What only a real driver can show: run on a GPU machine with

    python -m jupyter_gpushare.native.build
    python -m pytest tests/gpu_real -s

It needs pytest, psutil and nvidia-ml-py beside the standard library, and torch for
the tests that name it.  One device with about 8 GiB free is used.  Figures are
printed, not judged.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from jupyter_gpushare import native
from jupyter_gpushare.errors import DeviceError, GpuShareError
from jupyter_gpushare.gpu.checkpoint import Checkpoint, State
from jupyter_gpushare.gpu.nvml import Nvml
from tests.gpu.machine import GIB, MIB, Client, Worker, until

ROOT = Path(__file__).resolve().parents[2]
WORKERS = {"driver": ROOT / "tests/gpu/worker.py", "torch": Path(__file__).with_name("torch_worker.py")}
HELD_MIB = 2048
PATIENCE_S = 120.0


def why_not() -> str:
    """Why these tests cannot run here; "" if they can."""
    try:
        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return "no GPU on this machine"
        native.lib_dir()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver on this machine ({error})"
    except GpuShareError as error:
        return str(error)
    return ""


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
KINDS = ["driver", pytest.param("torch", marks=needs_torch)]


class RealMachine:
    """The helper on this machine's driver, and processes of one lease."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "h.sock"
        self._log = (folder / "helper.log").open("wb")
        self._workers: list[Worker] = []
        self.helper = subprocess.Popen(
            [
                sys.executable, "-m", "jupyter_gpushare.gpu.helper",
                "--state-dir", str(folder / "state"), "--socket", str(self.socket), "--sample-s", "0.5",
            ],
            stderr=self._log, cwd=ROOT,
        )  # fmt: skip
        until(self.socket.exists, "the helper listens", PATIENCE_S)
        self.client = Client(self.socket)
        self.device = until(self._examined, "the self-test ends", PATIENCE_S)

    def _examined(self) -> dict[str, Any] | None:
        devices = self.client.ask("inventory")["devices"]
        best: dict[str, Any] = max(devices, key=lambda device: device["memory_bytes"])
        return best if "not finished" not in best["suspend_reason"] else None

    def lease(self, name: str, limit_bytes: int) -> dict[str, str]:
        """The environment of a process of a new lease."""
        limits = {self.device["uuid"]: limit_bytes}
        made = self.client.ask("set_limit", lease=name, uid=os.geteuid(), limits=limits)
        return {
            **os.environ,
            "GPUSHARE_LEASE": name,
            "GPUSHARE_LEASE_DIR": made["directory"],
            "CUDA_VISIBLE_DEVICES": self.device["uuid"],
            "LD_PRELOAD": str(native.preload_path()),
            "PYTHONPATH": str(ROOT),
        }

    def worker(self, kind: str, environment: dict[str, str], mib: int = 0) -> Worker:
        process = subprocess.Popen(
            [sys.executable, str(WORKERS[kind])],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        worker = Worker(process)
        self._workers.append(worker)
        assert worker.answer(PATIENCE_S) == "ready 0"
        if mib:
            assert worker.do(f"alloc {mib}") == "0"
        return worker

    def of(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(
            each for each in self.client.ask("sample")["leases"] if each["lease"] == name
        )
        return found

    def rests(self, name: str) -> str:
        """The counters of a lease once they come to rest."""
        seen = ""
        for _ in range(60):
            now = self.of(name)["calls"]
            if now == seen and self.of(name)["used_bytes"]:
                return seen
            seen = now
            time.sleep(0.7)
        raise AssertionError("the counters do not come to rest")

    def close(self) -> None:
        self.client.close()
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()
        self.helper.send_signal(signal.SIGTERM)
        self.helper.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMachine]:
    machine = RealMachine(tmp_path_factory.mktemp("real"))
    yield machine
    machine.close()


@pytest.fixture
def suspendable(real: RealMachine) -> RealMachine:
    if not real.device["suspendable"]:
        pytest.skip(f"this machine cannot suspend: {real.device['suspend_reason']}")
    return real


def test_the_driver_is_found() -> None:
    nvml, checkpoint = Nvml(), Checkpoint()
    print(f"\ndriver {nvml.driver}, checkpoint calls: {checkpoint.unavailable or 'available'}")
    for gpu in nvml.gpus:
        usage = nvml.usage(gpu.uuid)
        print(
            f"{gpu.index} {gpu.name} {gpu.uuid} {gpu.memory_bytes / GIB:.1f} GiB island={gpu.island or '-'}"
        )
        print(f"  used {usage.used_bytes / GIB:.2f} GiB, processes {usage.processes}")
        assert 0 <= usage.used_bytes <= gpu.memory_bytes
    if checkpoint.unavailable:
        return
    with pytest.raises(DeviceError) as refused:
        checkpoint.state(os.getpid() + 1_000_000)
    print(f"GetState of a process that is not there: {refused.value}")
    assert State(0) is State.RUNNING


def test_the_self_test_gives_a_verdict(real: RealMachine) -> None:
    device = real.device
    print(f"\nlevel {device['level']}, suspendable {device['suspendable']} {device['suspend_reason']}")
    print(
        f"suspend {device['suspend_bytes_per_s'] / 1e9:.2f} GB/s,"
        f" resume {device['resume_bytes_per_s'] / 1e9:.2f} GB/s"
    )
    assert device["level"] in ("preload", "mig")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_comes_back_as_it_was(suspendable: RealMachine, kind: str) -> None:
    name = f"back-{kind}"
    worker = suspendable.worker(kind, suspendable.lease(name, 6 * GIB), HELD_MIB)
    assert worker.do("check") == "ok"
    for _ in range(3):
        moved = suspendable.client.ask("suspend", lease=name, calls=suspendable.rests(name))
        assert moved["done"], moved
        assert moved["bytes"] >= HELD_MIB * MIB
        assert worker.pid not in Nvml().processes(suspendable.device["uuid"])
        back = suspendable.client.ask("resume", lease=name)
        assert back["done"], back
        print(
            f"\n{kind}: {moved['bytes'] / 1e9:.2f} GB out in {moved['took_s']:.2f} s,"
            f" back in {back['took_s']:.2f} s"
        )
        assert worker.do("check") == "ok"
    worker.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_wakes_and_idling_does_not(suspendable: RealMachine, kind: str) -> None:
    name = f"wake-{kind}"
    worker = suspendable.worker(kind, suspendable.lease(name, 6 * GIB), 256)
    watch = Client(suspendable.socket)
    watch.ask("watch")
    assert suspendable.client.ask("suspend", lease=name, calls=suspendable.rests(name))["done"]
    assert worker.do("sleep 2") == "0"
    assert watch.event("wanted", name, timeout_s=3.0) is None
    asked = time.monotonic()
    worker.tell("check")
    event = watch.event("wanted", name)
    assert event
    assert event["fields"]["queries_only"] == "false"
    assert suspendable.client.ask("resume", lease=name)["done"]
    assert worker.answer(PATIENCE_S) == "check ok"
    print(f"\n{kind}: call to answer {time.monotonic() - asked:.3f} s")
    watch.close()
    worker.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_holds(real: RealMachine, kind: str) -> None:
    if real.device["level"] != "preload":
        pytest.skip("the limit is not the library's here")
    worker = real.worker(kind, real.lease(f"limit-{kind}", 3 * GIB), 1024)
    assert worker.do("alloc 4096") == "2"
    assert worker.do("alloc 512") == "0"
    assert worker.do("check") == "ok"
    worker.kill()


@needs_torch
def test_torch_sees_the_limit_as_the_devices_size(real: RealMachine) -> None:
    worker = real.worker("torch", real.lease("size", 3 * GIB))
    free, total = (int(word) for word in worker.do("info").split())
    assert free < total == 3 * GIB
    worker.kill()


@needs_torch
def test_training_goes_on_after_a_suspension_in_the_middle(suspendable: RealMachine) -> None:
    worker = suspendable.worker("torch", suspendable.lease("train", 6 * GIB))
    worker.tell("step 3000")
    time.sleep(1.0)
    moved = suspendable.client.ask("suspend", lease="train")
    assert moved["done"], moved
    assert worker.answer(2.0) == ""
    assert suspendable.client.ask("resume", lease="train")["done"]
    verb, loss = worker.answer(PATIENCE_S).split()
    assert verb == "step"
    assert float(loss) >= 0
    worker.kill()
