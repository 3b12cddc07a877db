from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from jupyter_gpushare import cli
from tests.server import fake_broker


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    """Set the environment of a user without a Hub, with a fresh home and a client that does not retry."""
    for name in ("GPUSHARE_API_URL", "GPUSHARE_API_TOKEN", "JUPYTERHUB_API_TOKEN", "JUPYTERHUB_USER"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GPUSHARE_LEASE", "GPUSHARE_LEASE_DIR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(cli.verbs, "POLL_S", 0.02)
    monkeypatch.setattr("jupyter_gpushare.client._PAUSE_S", 0.02)


@pytest.fixture
def broker(monkeypatch) -> Iterator[Any]:
    broker = fake_broker.FakeBroker()
    broker.start()
    monkeypatch.setenv("GPUSHARE_API_URL", broker.url)
    monkeypatch.setenv("GPUSHARE_API_TOKEN", fake_broker.TOKEN)
    yield broker
    broker.stop()


@pytest.fixture
def golden() -> Callable[[str], dict[str, Any]]:
    return fake_broker.golden


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def gpushare(capfd) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def run(*words: str) -> Ran:
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
