"""demo_gpu: what notebooks and jobs use in front of people."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jupyter_gpushare import demo_gpu
from tests.native.programs import run
from tests.native.worker import Worker, WorkerError
from tests.simulator import GIB, Lease, Simulator


def find_ptxas() -> str | None:
    """Path of NVIDIA's assembler: the system's, else that of the package nvidia-cuda-nvcc."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/ptxas"))
    return shutil.which("ptxas") or (str(packaged[-1]) if packaged else None)


PTXAS = find_ptxas()


def train(machine: Simulator, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m jupyter_gpushare.demo_gpu train ...` on a machine."""
    command = [sys.executable, "-m", "jupyter_gpushare.demo_gpu", "train", *arguments]
    return run(*command, env=machine.env(**env))


def test_a_lost_or_repeated_step_or_a_changed_byte_shows(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('32MiB'); b.fill(seed=5); demo_gpu.train([b], 10, 0)")
        assert kernel.ask("(b.steps, b.is_intact())") == [10, True]
        kernel.run("b.start_step(0); b.steps -= 1")  # one that was not counted
        assert not kernel.ask("b.is_intact()")
        kernel.run("b.steps += 1")
        assert kernel.ask("b.is_intact()")
        kernel.run("b.steps += 1")  # one that was lost
        assert not kernel.ask("b.is_intact()")
        kernel.run("b.steps -= 1; gpu.call('cuMemsetD8', b.address + 12345, 1, 1)")
        assert not kernel.ask("b.is_intact()")


def test_steps_take_their_time(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill(); t = time.monotonic(); demo_gpu.train([b], 4, 0.02)")
        assert kernel.ask("time.monotonic() - t") >= 0.08


def test_out_of_memory_says_how_much_there_is(machine: Simulator) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(0), 40 * GIB)])
    with Worker(machine.env(**lease.env())) as kernel, pytest.raises(WorkerError) as refused:
        kernel.run("gpu.allocate('50GiB')")
    assert refused.value.kind == "GpuOutOfMemory"
    assert str(refused.value).endswith(
        "Out of GPU memory: asked for 50 GiB, 40 GiB of 40 GiB are free in your share of this GPU"
    )


def test_another_thread_can_use_the_gpu(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill(); seen = []")
        kernel.run(
            "t = threading.Thread(target=lambda: seen.append(demo_gpu.train([b], 2, 0))); t.start(); t.join()"
        )
        assert kernel.ask("(seen, b.is_intact())") == [[None], True]


def test_what_is_no_size_is_refused(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel, pytest.raises(WorkerError, match="is not a size of memory"):
        kernel.run("gpu.allocate('lots')")


def test_a_job_trains_on_all_its_gpus_and_checks_them(machine: Simulator) -> None:
    done = train(machine, "--steps", "130", "--step-s", "0.001", "--bytes", "2GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "step 100 of 130", "step 130 of 130", "every step was applied exactly once",
    ]  # fmt: skip
    assert [machine.device_peak(i) > 2 * GIB - 1 for i in (0, 1)] == [True, True]


def test_a_job_that_does_not_fit_fails_with_a_sentence(machine: Simulator) -> None:
    done = train(machine, "--bytes", "100GiB")
    assert done.returncode == 1
    assert done.stderr == (
        "demo_gpu: Out of GPU memory: asked for 100 GiB, 80 GiB of 80 GiB are free on this GPU\n"
    )
    assert train(machine, "--bytes", "much").stderr.startswith("demo_gpu: 'much' is not a size of memory")
    assert train(machine, "--steps", "many").returncode == 2
    hidden = train(machine, CUDA_VISIBLE_DEVICES="")
    assert (hidden.returncode, hidden.stderr.count("\n")) == (1, 1)


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, demo_gpu.__name__)
    with pytest.raises(ImportError, match=r'pip install "jupyter-gpushare\[demo\]"'):
        importlib.import_module(demo_gpu.__name__)


@pytest.mark.skipif(PTXAS is None, reason="NVIDIA's assembler ptxas is not installed")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvidia_s_assembler_takes_the_kernels(tmp_path: Path, architecture: str) -> None:
    assert PTXAS is not None
    source = Path(demo_gpu.__file__).with_suffix(".ptx")
    subprocess.run(
        [PTXAS, f"-arch={architecture}", "-o", str(tmp_path / "demo.cubin"), str(source)], check=True
    )
