"""The plugin of The Littlest JupyterHub, called as its configuration calls its plugins.

TLJH is not on a package index; the modules here have the names, classes and calls of its
sources (`tljh/hooks.py`, `tljh/normalize.py`, `tljh/user.py`, `tljh/user_creating_spawner.py`).
"""

from __future__ import annotations

import importlib
import os
import pwd
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from systemdspawner import SystemdSpawner
from traitlets.config import Config

from jupyter_gpushare.hub import compat, distinct

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def made_users(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the system users that TLJH was asked for."""
    asked: list[str] = []

    class UserCreatingSpawner(SystemdSpawner):
        pass

    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    module("tljh")
    module("tljh.hooks", hookimpl=lambda function: function)
    module("tljh.normalize", generate_system_username=lambda name: name.removeprefix("jupyter-"))
    module("tljh.user", ensure_user=asked.append)
    module("tljh.user_creating_spawner", UserCreatingSpawner=UserCreatingSpawner)
    monkeypatch.delitem(sys.modules, "jupyter_gpushare.hub.tljh_plugin", raising=False)
    return asked


@pytest.fixture
def config(made_users: list[str]) -> Config:
    c = Config()
    # TLJH's own setting, which comes first.
    c.SystemdSpawner.unit_name_template = "jupyter-{USERNAME}"
    importlib.import_module("jupyter_gpushare.hub.tljh_plugin").tljh_custom_jupyterhub_config(c)
    return c


def test_it_puts_our_mixin_before_tljhs_spawner_and_the_servers_name_into_its_units(config):
    spawner_class = config.JupyterHub.spawner_class
    assert [each.__name__ for each in spawner_class.__mro__[1:4]] == [
        "SystemdUnits",
        "GPUShareMixin",
        "SpawnPage",
    ]
    assert distinct.check_class(spawner_class, config) == ""
    assert config.JupyterHub.allow_named_servers is True


def test_it_lets_users_submit_jobs_and_the_broker_start_them(config):
    assert set(config.JupyterHub.custom_scopes) == {"custom:gpushare:jobs", "custom:gpushare:admin"}
    (broker,) = (role for role in config.JupyterHub.load_roles if role["name"] == "gpushare-broker")
    assert {"read:servers", "servers", "delete:servers"} <= set(broker["scopes"])


def test_the_system_user_is_made_before_the_broker_is_told_its_number(config, made_users):
    spawner = config.JupyterHub.spawner_class.__new__(config.JupyterHub.spawner_class)
    spawner.user = SimpleNamespace(name=ME)
    assert spawner.server_uid() == os.getuid()
    assert made_users == [ME]


@pytest.mark.parametrize("role_of_the_site", [None, {"name": "user", "scopes": ["self", "list:users"]}])
def test_in_jupyterhub_5_5_the_scopes_go_into_the_role_of_users(monkeypatch, role_of_the_site):
    monkeypatch.setattr(compat, "version_info", (5, 5, 0))
    c = Config()
    if role_of_the_site:
        c.JupyterHub.load_roles = [role_of_the_site]
    compat.grant_to_users(c, {"custom:gpushare:jobs"})
    (role,) = c.JupyterHub.load_roles
    assert role["name"] == "user"
    assert {"self", "custom:gpushare:jobs"} <= set(role["scopes"])
    assert ("list:users" in role["scopes"]) == bool(role_of_the_site)


def test_in_jupyterhub_6_the_scopes_go_into_the_setting_for_it(monkeypatch):
    monkeypatch.setattr(compat, "version_info", (6, 1, 1))
    c = Config()
    c.JupyterHub.extra_user_scopes = {"list:users"}
    compat.grant_to_users(c, {"custom:gpushare:jobs"})
    assert c.JupyterHub.extra_user_scopes == {"list:users", "custom:gpushare:jobs"}
