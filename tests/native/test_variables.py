"""Every variable of a lease, missing, empty or with another value: docs/isolation.md says what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_gpushare.backends.local import holder_environment
from tests.native.programs import compiled, run
from tests.simulator import GIB, Lease, Simulator

SOURCE = Path(__file__).with_name("variables.c")
PAGE = Path(__file__).parents[2] / "docs/isolation.md"
# How a cell of the table begins, and what a process finds; the lease has 20 GiB of the last GPU of three.
FOUND = {
    "nothing changes": "devices=1 gib=20 open=0 within=0 beyond=2",
    "a choice": "devices=1 gib=20 open=0 within=0 beyond=2",
    "no GPU": "devices=0 gib=0 open=100 within=100 beyond=100",
    "no library": "devices=1 gib=80 open=0 within=0 beyond=0",
}
OTHERS = {
    "GPUSHARE_LEASE": "bob-1",
    "GPUSHARE_LEASE_DIR": "/run",
    "GPUSHARE_MEMORY_LIMIT": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "LD_PRELOAD": "libm.so.6",
    "TF_FORCE_GPU_ALLOW_GROWTH": "false",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "GPUSHARE_API_URL": "http://127.0.0.1:1",
    "GPUSHARE_API_CERTIFICATE": "none",
    "JUPYTERHUB_API_TOKEN": "none",
}


def table() -> dict[str, list[str]]:
    """The table of the page: what happens by variable, when it is missing, empty and another."""
    part = PAGE.read_text().split("### Variables of a lease", 1)[1].split("\n## ", 1)[0]
    rows = (line.split("|")[1:-1] for line in part.splitlines() if line.startswith("| `"))
    return {name: cells for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}


def begins(cell: str) -> str:
    """What a process finds by a cell of the table."""
    return next(found for words, found in FOUND.items() if cell.strip().startswith(words))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("variables") / "variables", "-std=gnu11", "-O1", "-Wall", SOURCE)


def test_the_table_has_a_row_for_every_variable_of_a_lease() -> None:
    assert holder_environment("ada-1", "/run/ada-1", {"GPU-1": 1}, "/lib.so").keys() <= table().keys()
    assert table().keys() == OTHERS.keys()


def test_every_change_of_every_variable_does_what_the_table_says(tmp_path: Path, program: Path) -> None:
    machine = Simulator(tmp_path, "3xH100-80GB,host=512GiB,context=0GiB,free-delay=0")
    lease = Lease(tmp_path / "ada", [(machine.uuid(2), 20 * GIB)])
    given = holder_environment("ada-1", str(lease.folder), {machine.uuid(2): 20 * GIB})
    changes, expected = [], []
    for name, cells in table().items():
        for change, cell in zip(("missing", "emptied", "replaced"), cells, strict=True):
            changes.append(f"{name} {change} {OTHERS[name]}")
            expected.append(f"{name} {change} before: {begins(cell)}")
            # In the first cell of a kernel, which the library has read by then.
            late = cell if name == "CUDA_VISIBLE_DEVICES" else "nothing changes"
            expected.append(f"{name} {change} itself: {begins(late)}")
    (tmp_path / "changes").write_text("\n".join(changes))
    done = run(program, str(tmp_path / "changes"), env=machine.env(**given), check=True)
    assert done.stdout.splitlines() == expected
    assert "GPUSHARE_LEASE_DIR: names no lease" in done.stderr
