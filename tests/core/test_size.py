"""What a lease asks for: parsed, compared with a device, printed."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.size import (
    Size,
    field_of_memory,
    memory_of_field,
    parse_fraction,
    parse_memory,
)
from jupyter_gpushare.errors import InvalidRequest
from tests.core.build import GIB, device


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("1", 1000), ("0.5", 500), ("1/2", 500), ("1/3", 333), ("2/3", 666), ("0.001", 1), ("1.0", 1000),
        (".25", 250), (" 0.5 ", 500), ("0.250", 250), ("4/4", 1000), ("1/1000", 1), ("0.33", 330),
        ("0.33333", 333), ("0.3333333333333333", 333), ("0.9999", 999), ("0.0019", 1),
    ],
)  # fmt: skip
def test_a_fraction_is_parsed_exactly(text, milli):
    assert parse_fraction(text) == milli


@pytest.mark.parametrize(
    "text",
    [
        "0", "-1", "1.5", "nan", "inf", "-inf", "1/0", "0/1", "lots", "", " ", "1e-1", "1E0", "2",
        "1e999999999", "0x1", "1/2/3", "\u0660.\u0665",
        "\u0661/\u0662", "0,5", "½", "\u0660\u066b\u0665", "1/1001", "0.0001",
        "9" * 5000, "0." + "0" * 99, "1/" + "9" * 99,
        "1_0/2_0_0_0_0_0_0", "+1/2", "1.", "3/2", "--1", "1 / 2", "None", "\0", "50%",
    ],
)  # fmt: skip
def test_what_is_not_a_fraction_is_refused(text):
    with pytest.raises(InvalidRequest, match="fraction") as refused:
        parse_fraction(text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0.5", Size(500)), ("1/4", Size(250)), ("1", Size(1000)), ("01", Size(1000)),
        ("8", Size(1000, 8)), ("1024", Size(1000, 1024)),
    ],
)  # fmt: skip
def test_a_number_of_gpus_is_a_fraction_of_one_or_whole_ones(text, size):
    assert Size.of_gpus(text) == size


@pytest.mark.parametrize("text", ["0", "00", "1.5", "-2", "1025", "99999999", "\u0662", "two", ""])
def test_what_is_no_number_of_gpus_is_refused(text):
    with pytest.raises(InvalidRequest):
        Size.of_gpus(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 * GIB), ("500MB", 500_000_000), ("500M", 500_000_000),
        ("1048576", 1 << 20), ("2k", 0), ("2TiB", 1 << 41),
    ],
)  # fmt: skip
def test_memory_is_parsed_with_decimal_and_binary_units(text, count):
    if count:
        assert Size.of_memory(text) == Size(memory_bytes=count)
    else:
        with pytest.raises(InvalidRequest, match="too little"):
            parse_memory(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1.5GiB", "1XB", "\u0662GiB", "2\u0662", "9" * 16])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(InvalidRequest, match="size of memory"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["1g.10gb", "1g.10gb+me", "1c.3g.40gb", "7g.80gb"])
def test_a_mig_profile_asks_for_one_whole_instance(text):
    assert Size.of_profile(text) == Size(1000, profile=text)


@pytest.mark.parametrize("text", ["", "1g", "g.10gb", "\u0661g.10gb", "1g.10GB", "1g.10gb;rm"])
def test_what_is_no_mig_profile_is_refused(text):
    with pytest.raises(InvalidRequest, match="MIG profile"):
        Size.of_profile(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Size(500), "1/2 GPU"), (Size(120), "0.12 GPU"), (Size(1000), "1 GPU"), (Size(1000, 2), "2 GPUs"),
        (Size(memory_bytes=20 * GIB), "20 GiB of a GPU"), (Size(memory_bytes=GIB // 2), "0.5 GiB of a GPU"),
        (Size(1000, profile="1g.10gb"), "MIG 1g.10gb"),
    ],
)  # fmt: skip
def test_a_size_is_printed_as_people_write_it(size, text):
    assert size.text == text


def test_bytes_need_the_next_thousandth_of_a_device():
    assert device(0).demand_milli(Size(memory_bytes=20 * GIB + 1)) == 251
    assert device(0).demand_milli(Size(250)) == 250
    assert device(0, profile="1g.10gb").demand_milli(Size(250)) > 1000
    assert device(0, memory_bytes=1, reserve_bytes=1).demand_milli(Size(memory_bytes=1)) > 1000


@pytest.mark.parametrize(
    ("field", "memory"), [(" 20 ", "20GiB"), ("20GiB", "20GiB"), ("500MB", "500MB"), ("", "")]
)
def test_a_number_in_a_field_labelled_gb_counts_as_gpu_vendors_count(field, memory):
    assert memory_of_field(field) == memory
    assert memory_of_field(field_of_memory(memory)) == memory


@pytest.mark.parametrize("digits", ["\u0662\u0660", "2\u00b2"])
def test_a_number_in_other_digits_gets_no_unit_and_is_refused(digits):
    assert memory_of_field(digits) == digits
    with pytest.raises(InvalidRequest):
        Size.of_memory(memory_of_field(digits))
