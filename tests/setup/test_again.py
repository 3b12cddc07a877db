"""The rules of tests/again.py and tests/order.py, seen from outside: parallel runs on a few tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

from tests import order
from tests.again import is_oracle
from tests.setup.test_common_fixtures import ROOT, run_pytest

# Fails beside others: workers of pytest-xdist know their number.
BESIDE = """
import os
import pytest

@pytest.mark.parametrize("number", range(COUNT))
def test_needs_the_machine(number):
    print("it was here")
    assert "PYTEST_XDIST_WORKER" not in os.environ, "disturbed"
"""
FOR_GOOD = (
    BESIDE
    + """
def test_is_broken():
    assert not "broken"

@pytest.mark.oracle
def test_judges_a_promise():
    assert "PYTEST_XDIST_WORKER" not in os.environ, "disturbed"

@pytest.fixture
def leaves_something():
    yield
    assert "PYTEST_XDIST_WORKER" not in os.environ, "left"

def test_leaves_something(leaves_something):
    pass
"""
)


def run(folder: Path, test: str, count: int = 1) -> tuple[int, str]:
    result = run_pytest(folder, test.replace("COUNT", str(count)), "-n1", "--dist=loadfile")
    return result.returncode, result.stdout


def logs(folder: Path) -> dict[str, str]:
    return {str(log.relative_to(folder / "build/failed")): log.read_text() for log in folder.rglob("*.log")}


def test_what_fails_beside_others_and_passes_alone_passes_and_is_named(tmp_path):
    status, said = run(tmp_path, BESIDE)
    assert status == 0, said
    assert re.search(r"=+ 1 passed in [\d.]+s", said.splitlines()[-1])
    _, _, named = said.partition("failed beside others")
    assert "test_one.py::test_needs_the_machine[0]" in named
    assert "disturbed" in named
    beside, alone = (
        logs(tmp_path)[f"test_one.py_test_needs_the_machine_0_/{name}.log"]
        for name in ("beside-others", "alone")
    )
    assert "disturbed" in beside
    assert "it was here" in beside
    assert "1 passed" in alone


def test_what_fails_alone_an_oracle_and_a_teardown_fail_the_run_and_every_test_counts_once(tmp_path):
    status, said = run(tmp_path, FOR_GOOD)
    assert status == 1
    assert "2 failed, 2 passed, 1 error" in said.splitlines()[-1]
    assert {Path(name).parent.name for name in logs(tmp_path)} == {
        "test_one.py_test_needs_the_machine_0_",
        "test_one.py_test_is_broken",
    }


def test_many_that_fail_beside_others_fail_the_run(tmp_path):
    status, said = run(tmp_path, BESIDE, 6)
    assert status == 1
    assert "More than 5: the tests disturb each other." in said


def test_the_longest_file_runs_first_and_stored_files_exist(tmp_path, monkeypatch):
    stored = json.loads(order.STORED.read_text())
    assert not [name for name in stored if not (ROOT / name).is_file()]
    monkeypatch.setattr(order, "STORED", tmp_path / "durations.json")
    order.STORED.write_text('{"a.py": 1, "b.py": 30}')
    items = [SimpleNamespace(path=tmp_path / name) for name in ("a.py", "b.py", "new.py", "a.py")]
    order.by_duration(items, tmp_path)
    assert [item.path.name for item in items] == ["new.py", "b.py", "a.py", "a.py"]
    order.by_duration(items, tmp_path, shortest_first=True)
    assert [item.path.name for item in items] == ["a.py", "a.py", "b.py", "new.py"]


HELD = [
    (row, file, test)
    for row in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    for file, test in re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
]


def test_what_holds_a_promise_or_a_journey_is_in_make_test():
    assert len(HELD) > 30
    for _, file, test in HELD:
        above, found, _ = (ROOT / file).read_text().partition(f"def {test}(")
        assert found, f"{file} has no {test}"
        assert "@pytest.mark.long\n" not in above[above.rindex("\n\n") :], f"{test} is in make test-long only"
        whole = re.search(r"^pytestmark = (\[[^]]*|.*)\bmark\.long\b", above, re.MULTILINE)
        assert not whole, f"{file} is in make test-long only"


def test_what_holds_one_of_the_first_three_promises_is_never_run_again():
    held = {file for row, file, _ in HELD if re.match(r"\| P[123]:", row)}
    assert [file for file in sorted(held) if not is_oracle(ROOT / file, ROOT)] == []
