"""What only a real driver can show: ``make test-gpu`` (docs/isolation.md says how to read it).

It needs Python 3.11, a C compiler, pytest, psutil and nvidia-ml-py; torch, cupy, jax,
numba and jupyter_client for what names them.  The largest device is used; no setting of a
device is changed without ``GPUSHARE_TEST_MAY_SET=1``.  Each scenario has a process and a bound
of its own, in the order of `order`; figures are printed as they come and not judged.

``PART`` is one of its five parts; without it all run.  ``OUT`` is a folder: each run makes a
folder of its own in it and keeps there each row as it is measured.

Where ``GPUSHARE_SIM_STATE`` is set the simulated driver is used, and the table says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from jupyter_gpushare import native
from jupyter_gpushare.errors import GpuShareError
from tests.gpu_real.bench import Bench, new_folder
from tests.gpu_real.order import PART_S, PARTS, SCENARIOS, Scenario


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


def chosen(part: str) -> tuple[str, tuple[Scenario, ...]]:
    """The name of what is to run, and its scenarios.

    Raises:
        pytest.UsageError: there is no such part.
    """
    if not part:
        return "all", SCENARIOS
    if part not in [str(number + 1) for number in range(len(PARTS))]:
        raise pytest.UsageError(f"PART is 1 to {len(PARTS)}, or not set for all of them; it is {part!r}")
    return f"part-{part}", PARTS[int(part) - 1]


NAME, CHOSEN = chosen(os.environ.get("PART", ""))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    # Not pytest's folder, which is root's alone: the self-test runs as another user.
    folder = Path(tempfile.mkdtemp(prefix="gpushare-real-", dir="/tmp"))
    folder.chmod(0o755)
    out = os.environ.get("OUT")
    bench = Bench(
        folder,
        os.environ,
        out=new_folder(Path(out), NAME) if out else None,
        budget_s=PART_S if NAME != "all" else PART_S * len(PARTS),
        why_not=why_not(),
    )
    yield bench
    bench.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_real(bench: Bench, scenario: Scenario) -> None:
    result = bench.run(scenario)
    if result.outcome == "skipped":
        pytest.skip(result.reason)
    assert result.outcome == "passed", result.reason
