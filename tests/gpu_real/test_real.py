"""What only a real driver can show: ``make test-gpu`` on a GPU machine, or

    python -m jupyter_gpushare.native.build
    python -m pytest tests/gpu_real -s

It needs Python 3.11, a C compiler, pytest, psutil and nvidia-ml-py; torch, cupy,
jax and jupyter_client for the tests that name them.  The largest device is used; no
setting of a device is changed.  Figures are printed as one table, not judged.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pynvml
import pytest

from jupyter_gpushare import native
from jupyter_gpushare.errors import GpuShareError
from tests.gpu.machine import GIB
from tests.gpu_real import scenarios
from tests.gpu_real.scenarios import SCENARIOS, Scenario, needs_suspending
from tests.gpu_real.site import PATIENCE_S, Site, do

STEPS = 400


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


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")
FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in ("torch", "cupy", "jax")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("real"), os.environ)
    yield site
    driver = site.client.ask("inventory")["driver"]
    site.close()
    title = f"{site.device['name']}, driver {driver}, {time.strftime('%Y-%m-%d')}: `make test-gpu`"
    scenarios.save(site.report.text(title), site.folder)


def test_the_driver_is_found(site: Site) -> None:
    scenarios.probe(site)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_real(site: Site, scenario: Scenario) -> None:
    scenario(site)


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_a_frameworks_memory_comes_back_as_it_was(site: Site, kind: str) -> None:
    needs_suspending(site)
    name = f"back-{kind}"
    worker = site.worker(kind, site.lease(name, 8 * GIB), 2048)
    for _ in range(3):
        moved = site.ask("suspend", lease=name, calls=site.rests(name))
        assert moved["done"], moved
        back = site.ask("resume", lease=name)
        assert back["done"], back
        assert do(worker, "check") == "ok"
    rate = f"{moved['took_s']:.2f} s out, {back['took_s']:.2f} s back"
    site.report.add(f"{kind}, {moved['bytes'] / GIB:.1f} GiB, third time", rate)
    site.end(worker)


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_a_frameworks_memory_is_limited_with_a_clean_error(site: Site, kind: str) -> None:
    if site.device["level"] not in ("preload", "cgroup"):
        pytest.skip(f"the limit is {site.device['level']}'s here")
    worker = site.worker(kind, site.lease(f"limit-{kind}", 4 * GIB), 1024)
    assert do(worker, "alloc 8192") == "2"
    assert do(worker, "alloc 512") == "0"
    assert do(worker, "check") == "ok"
    site.end(worker)


@needs("torch")
@pytest.mark.parametrize("allocator", ["native", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_every_allocator_of_torch_sees_and_keeps_the_limit(site: Site, allocator: str) -> None:
    name = "torch-" + allocator.partition(":")[0].replace("_", "-")
    environment = site.lease(name, 4 * GIB)
    if allocator != "native":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = allocator
    worker = site.worker("torch", environment)
    free, total = (int(word) for word in do(worker, "info").split())
    assert free < total == 4 * GIB
    got = 0
    while do(worker, "alloc 256") == "0":
        got += 256
        assert got <= 4096
    assert got >= 2048
    assert do(worker, "check") == "ok"
    time.sleep(1.5)
    used = site.of(name)["used_bytes"][site.uuid]
    site.report.add(f"torch, {allocator}, limit 4 GiB", f"{got} MiB of tensors, {used / GIB:.2f} GiB in NVML")
    site.end(worker)


@needs("torch")
def test_training_that_is_locked_and_suspended_has_the_same_loss_curve(site: Site) -> None:
    needs_suspending(site)
    plain = site.worker("torch", site.lease("curve-plain", 6 * GIB))
    expected = do(plain, f"curve {STEPS}")
    site.end(plain)
    worker = site.worker("torch", site.lease("curve", 6 * GIB))
    worker.tell(f"curve {STEPS}")
    moves = 0
    for keep_memory in (True, False, True, False):
        time.sleep(0.4)
        moved = site.ask("suspend", lease="curve", keep_memory=keep_memory)
        moves += moved["done"]
        time.sleep(0.2)
        assert site.ask("resume", lease="curve")["done"]
    assert moves
    verb, curve = worker.answer(PATIENCE_S).split(" ", 1)
    assert (verb, curve) == ("curve", expected)
    site.report.add(f"loss curve of {STEPS} steps, stopped {moves} times", "identical, bit by bit")
    site.end(worker)


@needs("torch")
def test_what_the_library_adds_to_a_training_loop(site: Site) -> None:
    leased = site.lease("loop", 6 * GIB)
    plain = {name: value for name, value in leased.items() if name not in ("LD_PRELOAD", "GPUSHARE_LEASE")}
    took = {}
    for name, environment in (("alone", plain), ("with the library", leased)):
        worker = site.worker("torch", environment)
        do(worker, "time 200")
        took[name] = min(float(do(worker, "time 2000")) for _ in range(3))
        site.end(worker)
    added = 100 * (took["with the library"] / took["alone"] - 1)
    site.report.add("training loop, 2000 steps", f"{took['alone']:.3f} s, with the library {added:+.1f} %")


def test_the_simulated_driver_is_not_in_the_way() -> None:
    """These tests would prove nothing on it."""
    assert "GPUSHARE_SIM_STATE" not in os.environ
    done = subprocess.run(
        [sys.executable, "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1')._name)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "jupyter_gpushare" not in done.stdout
