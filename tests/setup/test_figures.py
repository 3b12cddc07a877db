"""The figures of docs/architecture.md measure what they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.setup import figures

MODULE = '''
class Base:
    def documented(self):
        """Says it."""

class Derived(Base):
    """A class."""

    def __init__(self, a, b, *, c):
        pass

    def documented(self):
        return 1

    def refuses(self):
        """Raises nothing that it tells."""
        if True:
            raise ValueError("no")

    def tells(self):
        """It tells.

        Raises:
            ValueError: always.
        """
        raise ValueError("no")

    def catches(self):
        """It catches what it raises."""
        try:
            raise KeyError
        except KeyError:
            pass

    def _private(self):
        raise ValueError
'''


@pytest.fixture
def found(tmp_path: Path) -> figures.Figures:
    for name, code in (
        ("core/__init__.py", MODULE.replace("Raises nothing", "Refuses and is silent about")),
        ("gpu/one.py", "import jupyter_gpushare.core.two\nfrom jupyter_gpushare import errors\n"),
        ("gpu/two.py", "from jupyter_gpushare.gpu.one import x\n"),
    ):
        path = tmp_path / "jupyter_gpushare" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("assert True\n")
    return figures.measure(tmp_path)


def names(places: list[str]) -> list[str]:
    return [place.rpartition(" ")[2] for place in places]


def test_only_a_class_without_docstring_is_undocumented_an_override_inherits_its_text(found):
    assert names(found.undocumented) == ["Base"]
    assert found.public == 7


def test_a_public_function_that_raises_is_held_to_saying_so(found):
    assert found.raising == 2
    assert names(found.silent) == ["Derived.refuses"]


def test_arguments_of_constructors_are_counted_without_self(found):
    assert [count for count, _ in found.constructors] == [3]


def test_imports_are_counted_between_top_folders_only(found):
    assert {pair for pair in found.imports if pair[0] != pair[1]} == {("gpu", "core"), ("gpu", "errors")}
    assert len(found.between) == 2


def test_lines_of_tests_and_of_the_product_are_apart(found):
    assert found.test_lines == 1
    assert found.product_lines == MODULE.count("\n") + 3


def test_the_table_of_this_checkout_can_be_drawn():
    assert "| longest module |" in figures.table(figures.ROOT, figures.measure(figures.ROOT))
