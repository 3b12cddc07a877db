"""The life of a lease as a total table, and what users type as a fraction."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import TRANSITIONS, Device, Event, State, advance, parse_fraction
from jupyter_gpushare.errors import Conflict, InvalidRequest

ENDED = {State.RELEASED, State.FAILED}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_is_in_the_table_or_refused(state, event):
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(Conflict, match=f"{state} cannot {event}"):
            advance(state, event)


def test_nothing_follows_an_end():
    assert not [pair for pair in TRANSITIONS if pair[0] in ENDED]


def test_every_life_can_end():
    for state in set(State) - ENDED:
        assert advance(state, Event.RELEASE) is State.RELEASED
        assert advance(state, Event.FAIL) is State.FAILED


def test_every_state_can_be_reached():
    reached = {State.PENDING}
    for _ in State:
        reached |= {to for (state, _), to in TRANSITIONS.items() if state in reached}
    assert reached == set(State)


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("1", 1000), ("0.5", 500), ("1/2", 500), ("1/3", 333), ("2/3", 666), ("0.001", 1), ("1.0", 1000),
        (".25", 250), (" 0.5 ", 500), ("0.250", 250), ("4/4", 1000), ("1/1000", 1), ("0.33", 330),
        ("\u0660.\u0665", 500),
    ],
)  # fmt: skip
def test_a_fraction_is_parsed_exactly(text, milli):
    assert parse_fraction(text) == milli


@pytest.mark.parametrize(
    "text",
    [
        "0", "-1", "1.5", "nan", "inf", "-inf", "1/0", "0/1", "lots", "0.33333", "", " ", "1e-1", "1E0", "2",
        "1e999999999", "0x1", "1/2/3", "0,5", "½", "\u0660\u066b\u0665", "1/1001", "0.0001",
        "9" * 5000, "0." + "0" * 99, "1/" + "9" * 99,
        "1_0/2_0_0_0_0_0_0", "--1", "1 / 2", "None", "\0", "50%",
    ],
)  # fmt: skip
def test_what_is_not_a_fraction_is_refused(text):
    with pytest.raises(InvalidRequest, match="fraction") as refused:
        parse_fraction(text)
    assert len(str(refused.value)) < 300


def test_a_device_grants_what_it_does_not_reserve():
    assert Device(uuid="gpu0", memory_bytes=100, reserve_bytes=3).grantable_bytes == 97
