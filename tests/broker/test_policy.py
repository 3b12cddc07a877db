"""The site's configuration as plain values: what is refused, and what follows."""

from __future__ import annotations

import pytest

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.state.policy import parse_project
from jupyter_gpushare.errors import InvalidRequest


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"groups": "vision"}, "groups is a list of names"),
        ({"groups": ["vision", 1]}, "groups is a list of names"),
        ({"priority": "high"}, "priority is a whole number"),
        ({"priority": 0.5}, "priority is a whole number"),
        ({"priority_max": 101}, "priority_max is a whole number from 0 to 100"),
        ({"priority_max": True}, "priority_max is a whole number from 0 to 100"),
        (2, "quota, weight"),
    ],
)
def test_a_project_that_is_configured_wrongly_is_refused(config, says):
    with pytest.raises(InvalidRequest, match=f"project vision: .*{says}"):
        parse_project("vision", config)


def test_a_site_may_offer_no_size_of_its_own():
    assert GPUShareBroker(sizes=[], min_fraction=0.25).policy().min_fraction_milli == 250


def test_what_a_site_offers_can_be_asked_for():
    assert GPUShareBroker(sizes=["1/8", "1"], min_fraction=0.25).policy().min_fraction_milli == 125
