"""The mutants can be run, and a mutant that tests miss is told from one that they notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.draw import candidates
from tests.mutants.run import ROOT, Mutant, judged, listed, place

HALF = Mutant("jupyter_gpushare/half.py", "return whole / 2", "return whole / 3", "tests")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "jupyter_gpushare").mkdir()
    (tmp_path / "jupyter_gpushare/__init__.py").touch()
    (tmp_path / HALF.file).write_text("def half(whole):\n    return whole / 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_half.py").write_text(
        "from jupyter_gpushare.half import half\n\ndef test_half():\n    assert half(4) == 2\n"
    )
    return tmp_path


def test_every_mutant_changes_one_line_that_is_there():
    mutants = listed()
    assert len(mutants) == 53
    for mutant in mutants:
        file, _ = place(mutant)
        assert file == ROOT / mutant.file, "its code has moved: change the entry"
        assert mutant.line != mutant.becomes
        assert all((ROOT / tests).exists() for tests in mutant.tests.split())


def test_a_mutant_is_noticed_survives_or_is_an_error_and_the_source_is_as_before(checkout):
    source = (checkout / HALF.file).read_text()
    assert judged(HALF, checkout) == "noticed by tests/test_half.py::test_half"
    assert judged(replace(HALF, becomes="return whole * 2 / 4"), checkout) == "survived"
    assert (checkout / HALF.file).read_text() == source
    assert judged(replace(HALF, line="return 7"), checkout).startswith(
        "error: jupyter_gpushare/half.py: not one"
    )
    (checkout / HALF.file).write_text(source.replace("/ 2", "/ 2 + 1"))
    broken = replace(HALF, line="return whole / 2 + 1")
    assert "fails without it too" in judged(broken, checkout)


def test_a_line_that_has_moved_takes_its_mutant_along(checkout):
    (checkout / HALF.file).rename(checkout / "jupyter_gpushare/moved.py")
    assert place(HALF, checkout) == (checkout / "jupyter_gpushare/moved.py", 2)


def test_operators_constants_and_negations_are_drawn(tmp_path):
    (tmp_path / "one.py").write_text("if not a < b and c:\n    d = min(e, 2)\n")
    assert set(candidates(tmp_path / "one.py")) == {
        ("if not a < b and c:", "if not a <= b and c:"),
        ("if not a < b and c:", "if not a < b or c:"),
        ("if not a < b and c:", "if a < b and c:"),
        ("d = min(e, 2)", "d = max(e, 2)"),
        ("d = min(e, 2)", "d = min(e, 3)"),
    }
