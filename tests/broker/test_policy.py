"""The site's configuration as plain values: what is refused, and what follows."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from traitlets.config import Config

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.state.policy import over_capacity, parse_project
from jupyter_gpushare.core.model import DEFAULT_POLICY, Project
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
        ({"idle_timeout": "900"}, "idle_timeout is a number of 0 or more"),
        ({"notice": -1}, "notice is a number of 0 or more"),
        ({"max_hold": float("nan")}, "max_hold is a number of 0 or more"),
        ({"max_hold": True}, "max_hold is a number of 0 or more"),
        ({"keep_minutes_per_day": 10_000_000}, "keep_minutes_per_day is a number of 0 or more"),
        (2, "quota, weight"),
    ],
)
def test_a_project_that_is_configured_wrongly_is_refused(config, says):
    with pytest.raises(InvalidRequest, match=f"project vision: .*{says}"):
        parse_project("vision", config)


def test_a_site_without_settings_has_the_defaults_of_core():
    policy = GPUShareBroker().policy()
    shared = {f.name for f in fields(policy)} & {f.name for f in fields(DEFAULT_POLICY)}
    assert {"order", "min_run_s", "starvation_guard_s", "fairness_horizon_s"} <= shared
    assert {name: getattr(policy, name) for name in shared} == {
        name: getattr(DEFAULT_POLICY, name) for name in shared
    }


def test_a_project_without_a_value_of_its_own_idles_as_the_site_does():
    own = {"idle_timeout": 60, "notice": 0, "max_hold": 172_800, "keep_minutes_per_day": 15}
    site = GPUShareBroker(projects={"vision": own, "nlp": {"idle_timeout": None}}, max_hold=86_400).policy()
    vision = site.project_config("vision")
    assert (vision.idle_timeout_s, vision.notice_s, vision.keep_minutes_per_day) == (60.0, 0.0, 15.0)
    assert [site.idle_timeout_of(name) for name in ("vision", "nlp", "gone")] == [60.0, 900.0, 900.0]
    assert [site.max_hold_of(name) for name in ("vision", "nlp", "gone")] == [172_800.0, 86_400.0, 86_400.0]
    assert GPUShareBroker().policy().max_hold_of("vision") is None


def test_a_site_may_offer_no_size_of_its_own():
    assert GPUShareBroker(sizes=[], min_fraction=0.25).policy().min_fraction_milli == 250


def test_what_a_site_offers_can_be_asked_for():
    assert GPUShareBroker(sizes=["1/8", "1"], min_fraction=0.25).policy().min_fraction_milli == 125


def test_the_example_of_the_guide_fits_the_machine_that_it_names():
    guide = (Path(__file__).parents[2] / "docs/admin.md").read_text()
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if ".projects" in block
    )
    config = Config()
    exec(example, {"c": config})
    policy = GPUShareBroker(config=config).policy()
    assert "This example is for four GPUs" in guide
    assert over_capacity(policy.in_force(4000, {}), 4000) == ""
    assert "guaranteed 3.5 GPUs together, and there are 3:" in over_capacity(policy.in_force(4000, {}), 3000)


def test_guarantees_exceed_no_machine_before_its_gpus_are_known():
    assert over_capacity([Project(name="p", quota_milli=1000)], 0) == ""
