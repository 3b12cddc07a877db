"""The life of a lease as a total table, and what users type as a fraction."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import TRANSITIONS, Device, LeaseEvent, State, advance
from jupyter_gpushare.errors import Conflict

ENDED = {State.RELEASED, State.FAILED}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", LeaseEvent)
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
        assert advance(state, LeaseEvent.RELEASE) is State.RELEASED
        assert advance(state, LeaseEvent.FAIL) is State.FAILED


def test_every_state_can_be_reached():
    reached = {State.PENDING}
    for _ in State:
        reached |= {to for (state, _), to in TRANSITIONS.items() if state in reached}
    assert reached == set(State)


def test_a_device_grants_what_it_does_not_reserve():
    assert Device(uuid="gpu0", memory_bytes=100, reserve_bytes=3).grantable_bytes == 97
