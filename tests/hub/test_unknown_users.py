"""A Hub of system users whose configuration names users that the system does not know."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.conftest import LOCAL, Hub, running_hub

# `delete_invalid_users` has the Hub forget such users at each start, and make them anew.
CONFIG = """
c.JupyterHub.authenticator_class = "pam"
c.Authenticator.delete_invalid_users = True
c.JupyterHub.load_groups = {"vision": {"users": ["removed-1", "removed-2"]}, "nlp": {"users": ["nobody"]}}
c.JupyterHub.load_roles[0]["scopes"] += ["list:groups", "read:groups"]
c.JupyterHub.load_roles.append({"name": "ops", "users": ["removed-3"], "scopes": ["self"]})
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with (
        tempfile.TemporaryDirectory(prefix="gpushare-unknown-") as folder,
        running_hub(LOCAL, Path(folder), extra=CONFIG) as made,
    ):
        yield made


def warned(hub: Hub) -> list[str]:
    lines = (hub.folder / "hub.log").read_text().splitlines()
    return [line for line in lines if "The configuration names the user" in line]


def test_the_hub_starts_and_warns_of_each(hub: Hub) -> None:
    said = warned(hub)
    assert ["removed-1" in said[0], "removed-2" in said[1], "removed-3" in said[2]] == [True] * 3
    assert ["group: vision" in line for line in said] == [True, True, False]
    assert len(said) == 3


def test_it_starts_again_with_the_groups_as_they_are_configured(hub: Hub) -> None:
    hub.stop()
    hub.start()
    assert len(warned(hub)) == 6
    groups = {each["name"]: each["users"] for each in hub.api("GET", "groups").json()}
    assert groups == {"vision": ["removed-1", "removed-2"], "nlp": ["nobody"]}
