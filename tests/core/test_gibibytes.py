"""Amounts of memory are written in GiB."""

import pytest

from jupyter_gpushare.gibibytes import GIB, compared, gibibytes


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
