"""The demo's folder of secrets is closed to others, also when it existed."""

from __future__ import annotations

import os
from pathlib import Path

from traitlets.config import PyFileConfigLoader

CONFIG = Path(__file__).resolve().parents[2] / "jupyterhub_config.py"


def test_a_folder_that_existed_with_an_open_mode_is_closed(tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    for part in (folder, folder / "broker", folder / "home"):
        part.mkdir()
        part.chmod(0o777)
    monkeypatch.setenv("GPUSHARE_DEMO_DIR", str(folder))
    monkeypatch.setenv("GPUSHARE_SIMULATE", "1xH100-80GB")
    config = PyFileConfigLoader(CONFIG.name, path=str(CONFIG.parent)).load_config()
    for part in (folder, folder / "broker", folder / "home"):
        assert os.stat(part).st_mode & 0o777 == 0o700
    assert config.GPUShareMixin.broker_url.startswith("http+unix://")
