"""An upgrade (docs/operations.md): a newer wheel, and no user notices.

The first wheel is of an older version number, not of older code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import jupyter_gpushare
from tests.e2e.demo import Person
from tests.setup.conftest import build, unpacked
from tests.setup.machine import Site, installed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

OLD, NEW = "0.0.9", jupyter_gpushare.__version__
STATUS = "/services/gpushare/api/v1/status"
ALLOCATE = """
from jupyter_gpushare import demo_gpu
weights = demo_gpu.open().allocate("6GiB")
weights.fill(seed=42)
before = 41
print(weights.is_intact())
"""
TRAIN = """
import pathlib
from jupyter_gpushare import demo_gpu
buffers = [demo_gpu.open(number).allocate("10GiB") for number in range(demo_gpu.device_count())]
for number, buffer in enumerate(buffers):
    buffer.fill(seed=number)
with open("steps", "a") as steps:
    while not pathlib.Path("enough").exists():
        demo_gpu.train(buffers, 1, 0.1)
        print(buffers[0].steps, file=steps, flush=True)
assert all(buffer.is_intact() for buffer in buffers)
"""


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By version: the sdist's wheel, and the same code with an older number."""
    made = {}
    for version in (OLD, NEW):
        folder = tmp_path_factory.mktemp("version")
        tree = unpacked(sdist, folder)
        for name, number in (
            ("PKG-INFO", "Version: {}"),
            ("jupyter_gpushare/__init__.py", '__version__ = "{}"'),
        ):
            text = (tree / name).read_text()
            assert number.format(NEW) in text
            (tree / name).write_text(text.replace(number.format(NEW), number.format(version), 1))
        done = build("wheel", tree, folder / "dist")
        assert done.returncode == 0, done.stderr
        (made[version],) = (folder / "dist").glob(f"jupyter_gpushare-{version}-*.whl")
    return made


@pytest.fixture
def site(wheels: dict[str, Path]) -> Iterator[Site]:
    with installed(wheels[OLD], OLD) as made:
        yield made


@contextmanager
def reading(person: Person) -> Iterator[list[float]]:
    """Ask for the status all the time; yields the seconds of each answer, of which none is a refusal."""
    took: list[float] = []
    wrong: list[str] = []
    ended = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=person.hub.url, headers=person.http.headers, timeout=PATIENCE_S) as http:
            while not ended.wait(0.05):
                began = time.monotonic()
                answer = http.get(STATUS)
                took.append(time.monotonic() - began)
                if answer.status_code != 200:
                    wrong.append(f"{answer.status_code}: {answer.text}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()
    assert wrong == []


def test_a_new_wheel_leaves_a_sleeping_session_and_a_running_job_alone(
    site: Site, wheels: dict[str, Path]
) -> None:
    ada, bo = Person(site, "ada"), Person(site, "bo")  # type: ignore[arg-type]
    ada.start_server(gpus=2)
    kernel = ada.kernel()
    assert kernel.run(ALLOCATE) == "True"
    kernel.disconnect()
    folder = site.folder / "home" / "bo"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    job = bo.ask(
        "jobs",
        "POST",
        json={"command": [str(site.opt / "bin" / "python"), "train.py"], "cwd": str(folder), "gpus": "3"},
    )["id"]

    def steps() -> int:
        path = folder / "steps"
        return len(path.read_text().splitlines()) if path.exists() else 0

    until(lambda: ada.state() == "suspended" and steps() > 0, "the session sleeps, and the job runs")
    with reading(bo) as took:
        said = site.play("operations", "Upgrade", wheels[NEW].parent)
        assert f"Successfully installed jupyter-gpushare-{NEW}" in said
        until(lambda: site.is_well(NEW), "the new wheel's broker is at work")
        done = steps()
        until(lambda: steps() > done, "the job goes on")
    print(f"restart of helper and broker: the longest of {len(took)} answers took {max(took):.1f} s")
    assert (site.folder / "backup" / "gpushare-before.sqlite").stat().st_mode & 0o077 == 0
    closed = [path for path in site.packages.rglob("*") if not path.stat().st_mode & 0o004]
    assert closed == [], "users read the package"

    assert (ada.state(), bo.job(job)["state"], bo.job(job)["attempt"]) == ("suspended", "running", 1)
    assert kernel.run("print(before)") == "41"
    assert (
        kernel.run("import jupyter_gpushare; print(weights.is_intact(), jupyter_gpushare.__version__)")
        == f"True {OLD}"
    )
    until(lambda: ada.state() == "running", "the cell has woken the session")
    (folder / "enough").touch()
    until(lambda: bo.job(job)["state"] == "succeeded", "the job has ended")
    assert bo.job(job)["attempt"] == 1

    kernel.disconnect()
    site.run("restart", "jupyterhub")
    until(lambda: site.is_well(NEW), "the Hub of the new wheel answers")
    until(ada.server_ready, "it has found ada's server")
    assert kernel.run("print(before, weights.is_intact())") == "41 True"
    bo.start_server(fraction="1/2")
    assert bo.kernel().run("import jupyter_gpushare; print(jupyter_gpushare.__version__)") == NEW
    for person in (ada, bo):
        person.close()
