"""What only a real driver can show: ``make test-gpu`` (docs/isolation.md says how to read it).

It needs Python 3.11, a C compiler, pytest, psutil and nvidia-ml-py; torch, cupy, jax,
numba and jupyter_client for what names them.  The largest device is used; no setting of a
device is changed.  Each scenario has a process and a bound of its own, in the order
of `order`; figures are printed as they come and not judged.

Where ``GPUSHARE_SIM_STATE`` is set the simulated driver is used, and the table says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from jupyter_gpushare import native
from jupyter_gpushare.errors import GpuShareError
from tests.gpu_real.bench import Bench
from tests.gpu_real.order import SCENARIOS, Scenario


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


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    out = os.environ.get("OUT")
    bench = Bench(
        tmp_path_factory.mktemp("real"),
        os.environ,
        out=Path(out) if out and Path(out).is_dir() else None,
        budget_s=float(os.environ.get("GPUSHARE_TEST_GPU_S", "3600")),
        why_not=why_not(),
    )
    yield bench
    bench.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_real(bench: Bench, scenario: Scenario) -> None:
    result = bench.run(scenario)
    if result.outcome == "skipped":
        pytest.skip(result.reason)
    assert result.outcome == "passed", result.reason
