"""Amounts of memory are in GiB, in every sentence, field and page."""

import re
from pathlib import Path

import pytest

from jupyter_gpushare.gibibytes import GIB, compared, gibibytes

ROOT = Path(__file__).parents[2]
# What people read, or what prints it; rates of copies (GB/s) and names of devices are the vendors'.
READ = [
    *(ROOT / "docs").glob("*.md"),
    ROOT / "README.md",
    *(
        path
        for pattern in ("*.py", "*.html", "*.ts", "*.tsx")
        for path in (ROOT / "jupyter_gpushare").rglob(pattern)
        if not {"node_modules", "lib", "native", "test"} & set(path.parts)
    ),
]
OTHER_UNIT = re.compile(r"(%\d|\d|\}|in) (GB|MB)\b(?!/s)|>(GB|MB)<")


def test_memory_has_one_digit_below_ten() -> None:
    amounts = [0, 6.8, 9.94, 9.96, 40, 160]
    assert [gibibytes(int(each * GIB)) for each in amounts] == [
        "0 GiB",
        "6.8 GiB",
        "9.9 GiB",
        "10 GiB",
        "40 GiB",
        "160 GiB",
    ]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((40 * GIB, 20 * GIB), ("40 GiB", "20 GiB")),
        ((40 * GIB + GIB // 5, 40 * GIB), ("40.2 GiB", "40.0 GiB")),
        ((40 * GIB + GIB // 20, 40 * GIB), ("40.05 GiB", "40.00 GiB")),
        ((40 * GIB, 40 * GIB), ("40 GiB", "40 GiB")),
        ((40 * GIB + 1, 40 * GIB), ("40.000 GiB", "40.000 GiB")),
    ],
)
def test_amounts_that_differ_read_differently(counts: tuple[int, ...], text: tuple[str, ...]) -> None:
    assert compared(*counts) == text


def test_no_text_has_another_unit() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in READ
        for line in path.read_text().splitlines()
        if OTHER_UNIT.search(line)
    ]
    assert found == []
