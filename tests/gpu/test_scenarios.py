"""The scenarios of tests/gpu_real, scaled down, on the simulated driver: the same code paths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gpu.machine import MIB
from tests.gpu_real.scenarios import SCENARIOS, Scenario
from tests.gpu_real.site import ROOT, Site
from tests.simulator import Simulator


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    run = os.environ.get("GPUSHARE_TEST_RUN", "")
    machine = Simulator(folder, "1xH100-80GB,host=512GiB")
    site = Site(folder, machine.env(GPUSHARE_TEST_RUN=run), scale_bytes=4 * MIB, sample_s=0.2)
    yield site
    site.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_simulated(site: Site, scenario: Scenario) -> None:
    before = len(site.report.rows)
    scenario(site)
    assert len(site.report.rows) > before


def test_the_real_tests_need_nothing_of_the_hub() -> None:
    """On a bare GPU machine there is the standard library, nvidia-ml-py, psutil, pytest and maybe torch."""
    code = (
        "import sys\n"
        "for name in ('msgspec', 'tornado', 'jupyter_client', 'jupyterhub', 'traitlets', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "import tests.gpu_real.test_real, jupyter_gpushare.gpu.helper\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
