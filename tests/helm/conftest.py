"""Render the chart for the values of a test, with a default project."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm-values"
NS = "gpushare"
PROJECTS: Json = {"vision": {"quota": 4}, "nlp": {"quota": 1.5, "limit": 3, "groups": ["nlp", "speech"]}}
# Values that differ from the default for every switch.
ALL_ON: Json = {
    "projects": PROJECTS,
    "image": {"pullSecrets": ["one", "two"]},
    "hub": {"namespace": "hub", "apiUrl": "http://hub.example/hub/api"},
    "certManager": True,
    "broker": {"postgres": True, "storage": {"storageClass": "fast"}},
    "helper": {"tlsSecret": "helper-tls", "parkBeforeKill": True},
    "policy": {"everyNode": True},
    "monitoring": {"serviceMonitor": True, "dashboard": True},
}
ALL_OFF: Json = {
    "projects": PROJECTS,
    "nodes": {"taint": None},
    "policy": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
VALUES = {"default": {"projects": PROJECTS}, "all on": ALL_ON, "all off": ALL_OFF}


def answers(*values: Json) -> list[Json]:
    """Return ``objects`` or Helm's ``error`` for each set of values."""
    program = [sys.executable, str(Path(__file__).with_name("render.py"))]
    done = subprocess.run(
        program, input=json.dumps(values), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Json] = json.loads(done.stdout)
    return found


class Chart:
    """The objects of one rendering."""

    def __init__(self, objects: list[Json]) -> None:
        self.objects = objects

    def all(self, *kinds: str) -> list[Json]:
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str, name: str = "") -> Json:
        (found,) = [o for o in self.all(kind) if name in ("", o["metadata"]["name"])]
        return found

    @property
    def broker_config(self) -> Json:
        data = self.one("ConfigMap", "gpushare-broker")["data"]
        config: Json = json.loads(data["broker_config.json"])
        return config


@pytest.fixture(scope="session")
def charts() -> dict[str, Chart]:
    """Return the chart for each of `VALUES`."""
    made = answers(*VALUES.values())
    return {name: Chart(each["objects"]) for name, each in zip(VALUES, made, strict=True)}


@pytest.fixture(scope="session")
def chart(charts: dict[str, Chart]) -> Chart:
    return charts["default"]


@pytest.fixture(scope="session")
def rendered() -> Callable[..., Chart]:
    """Render the chart for some values."""

    def render(**values: Any) -> Chart:
        (answer,) = answers({"projects": PROJECTS} | values)
        assert "error" not in answer, answer
        return Chart(answer["objects"])

    return render
