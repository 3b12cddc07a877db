"""demo_gpu: what notebooks and jobs use in front of people."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare import demo_gpu
from jupyter_gpushare.errors import GpuShareError
from tests.native.worker import Worker, WorkerError
from tests.simulator import GIB, Lease, Simulator

WORD = 1 << 64


def find_ptxas() -> str | None:
    """Path of NVIDIA's assembler: the system's, else that of the package nvidia-cuda-nvcc."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/ptxas"))
    return shutil.which("ptxas") or (str(packaged[-1]) if packaged else None)


PTXAS = find_ptxas()


def train(machine: Simulator, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m jupyter_gpushare.demo_gpu train ...` on a machine."""
    return subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.demo_gpu", "train", *arguments],
        env=machine.env(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@given(st.integers(1, 200), st.integers(0, WORD - 1), st.integers(0, 20))
def test_the_expected_checksum_is_that_of_the_words(words: int, seed: int, steps: int) -> None:
    values = [(seed * demo_gpu.SEED_FACTOR + i * demo_gpu.INDEX_FACTOR) % WORD for i in range(words)]
    for _ in range(steps):
        values = [(v * demo_gpu.STEP_FACTOR + demo_gpu.STEP_TERM) % WORD for v in values]
    checksum = sum(v * (2 * i + 1) for i, v in enumerate(values)) % WORD
    assert demo_gpu.expected_checksum(words * 8, seed, steps) == checksum


def test_a_lost_or_repeated_step_or_a_changed_byte_shows(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('32MiB'); b.fill(seed=5); b.train(10, 0)")
        assert kernel.ask("b.is_intact()")
        kernel.run("b.start_step(0); gpu.synchronize()")  # one that was not counted
        assert not kernel.ask("b.is_intact()")
        kernel.run("b.finish_step()")
        assert kernel.ask("b.is_intact()")
        kernel.run("gpu.call('cuMemsetD8_v2', ctypes.c_uint64(b.address + 12345), 1, ctypes.c_size_t(1))")
        assert not kernel.ask("b.is_intact()")


def test_steps_are_told_one_by_one_and_take_their_time(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill(); seen = []; t = time.monotonic()")
        assert kernel.ask("b.train(4, 0.02, seen.append)") == 4
        assert kernel.ask("seen") == [1, 2, 3, 4]
        assert kernel.ask("time.monotonic() - t") >= 0.08


def test_out_of_memory_says_how_much_there_is(machine: Simulator) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(0), 40 * GIB)])
    with Worker(machine.env(**lease.env())) as kernel, pytest.raises(WorkerError) as refused:
        kernel.run("gpu.allocate('50GiB')")
    assert refused.value.kind == "GpuOutOfMemory"
    assert str(refused.value).endswith(
        "Out of GPU memory: asked for 50.0 GiB, 40.0 GiB of 40.0 GiB are free in your share of this GPU"
    )


def test_memory_is_freed_by_free_and_by_with(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1GiB'); b.free(); b.free()")
        assert machine.device_used(0) == 0
        with pytest.raises(WorkerError, match="has been freed"):
            kernel.run("b.fill()")
        kernel.run("with gpu.allocate('1GiB') as b: b.fill()")
        assert machine.device_used(0) == 0
        with pytest.raises(WorkerError, match="fill it first"):
            kernel.run("gpu.allocate('1GiB').checksum()")


def test_another_thread_can_use_the_gpu(machine: Simulator) -> None:
    with Worker(machine.env()) as kernel:
        kernel.run("b = gpu.allocate('1MiB'); b.fill(); seen = []")
        kernel.run("t = threading.Thread(target=lambda: seen.append(b.train(2, 0))); t.start(); t.join()")
        assert kernel.ask("(seen, b.is_intact())") == [[2], True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 << 20), ("6 GiB", 6 << 30), ("6GB", 6 << 30), ("1.5GiB", 3 << 29), ("100", 100), (7, 7)],
)
def test_sizes_are_read(text: int | str, expected: int) -> None:
    assert demo_gpu.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "nan", "1e9", "6XB", 0, -5])
def test_what_is_no_size_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="size"):
        demo_gpu.parse_bytes(text)


def test_a_job_trains_on_all_its_gpus_and_writes_down_each_step(machine: Simulator) -> None:
    steps = machine.folder / "steps"
    done = train(machine, "--steps", "30", "--step-s", "0.001", "--bytes", "2GiB", "--steps-file", str(steps))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == ["step 30 of 30", "every step was applied exactly once"]
    assert steps.read_text().split() == [str(i) for i in range(1, 31)]
    assert [machine.device_peak(i) > 2 * GIB - 1 for i in (0, 1)] == [True, True]


def test_a_job_that_does_not_fit_fails_with_a_sentence(machine: Simulator) -> None:
    done = train(machine, "--bytes", "100GiB", "--devices", "1")
    assert done.returncode == 1
    assert done.stderr == (
        "demo_gpu: Out of GPU memory: asked for 100.0 GiB, 80.0 GiB of 80.0 GiB are free on this GPU\n"
    )
    assert train(machine, "--bytes", "much").returncode == 2
    assert train(machine, "--steps", "0").returncode == 2
    assert train(machine, CUDA_VISIBLE_DEVICES="").returncode == 1


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_gpu, "_driver", None)
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    with pytest.raises(GpuShareError, match="no GPU driver here"):
        demo_gpu.open()


def _no_library(name: str) -> None:
    raise OSError(name)


@pytest.mark.skipif(PTXAS is None, reason="NVIDIA's assembler ptxas is not installed")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvidia_s_assembler_takes_the_kernels(tmp_path: Path, architecture: str) -> None:
    assert PTXAS is not None
    source = tmp_path / "demo.ptx"
    source.write_text(demo_gpu.PTX)
    subprocess.run(
        [PTXAS, f"-arch={architecture}", "-o", str(tmp_path / "demo.cubin"), str(source)], check=True
    )
