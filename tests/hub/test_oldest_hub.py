"""The spawners in JupyterHub 5.5 with KubeSpawner 7.0: the oldest supported (the chart has them)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# JupyterHub 5.5 alone, installed by `make test`.
OLDEST = Path(sys.prefix) / "oldest-hub"
FOLDERS = ("tests/hub", "tests/job", "tests/backends")
KUBE = [f"tests/kube/test_{name}.py" for name in ("pod", "spawner", "story")]
# KubeSpawner 7.0 defines a trait in a way that traitlets discourages.
OLD_TRAITS = ("-W", "ignore:metadata {'default':DeprecationWarning")
SMOKE = (
    "test_a_start_by_rest_asks_the_broker",
    "test_a_refusal_stands_readable_on_the_spawn_page",
    "test_no_refusal_counts_towards_the_end_of_the_hub",
    "test_the_token_of_a_server_may_ask_the_broker",
    "test_the_lease_is_given_back_when_the_server_is_stopped",
    "test_the_spawn_page_shows_the_offers_and_starts_what_was_chosen",
)


def run_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OLD_TRAITS, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(OLDEST)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(autouse=True)
def oldest_is_there() -> None:
    assert (OLDEST / "jupyterhub").is_dir(), f"{OLDEST} is missing: run `make test`"
    for name, version in (("jupyterhub", "5.5.0"), ("jupyterhub-kubespawner", "7.0.0")):
        found = [each.version for each in metadata.distributions(name=name, path=[str(OLDEST)])]
        assert found == [version], f"remove .venv/stamps/oldest-hub, and run `make test`: {name} {found}"


def test_in_jupyterhub_5_5_starts_refusals_and_releases_work() -> None:
    done = run_tests("tests/hub/test_with_hub.py", "-k", " or ".join(SMOKE))
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{len(SMOKE)} passed" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("where", [*FOLDERS, *KUBE])
def test_every_test_of_the_hub_passes_in_jupyterhub_5_5(where: str) -> None:
    done = run_tests(where, f"--ignore={Path(__file__).relative_to(ROOT)}")
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.long
def test_an_installation_beside_jupyterhub_5_5_changes_no_installed_version(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "jupyterhub==5.5.*", "jupyterlab"], check=True, timeout=280)
    site_packages = str(
        folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    )
    before = {each.name.lower(): each.version for each in metadata.distributions(path=[site_packages])}
    report = tmp_path / "report.json"
    subprocess.run([*pip, "--dry-run", "--report", report, ROOT], check=True, timeout=280)
    chosen = {
        each["metadata"]["name"].lower().replace("_", "-"): each["metadata"]["version"]
        for each in json.loads(report.read_text())["install"]
    }
    assert not {name: (before[name], new) for name, new in chosen.items() if name in before}
    # Itself and at most three packages that a Hub with JupyterLab lacks.
    added = set(chosen) - {"jupyter-gpushare"}
    assert added <= {"msgspec", "nvidia-ml-py", "psutil"}, added
