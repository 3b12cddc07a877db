"""JupyterHub's own tests of spawners, which ship in its wheel, pass with our class."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jupyterhub
import pytest

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = Path(jupyterhub.__file__).parent / "tests" / "test_spawner.py"
LOOP_OF_THE_MODULE = ("asyncio_default_test_loop_scope=module", "asyncio_default_fixture_loop_scope=module")


@pytest.mark.long
def test_jupyterhubs_own_spawner_tests_pass_with_our_class(tmp_path: Path) -> None:
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": {"allow_root": True}}))
    bin_folder = Path(sys.executable).parent
    settings = [word for each in ("asyncio_mode=auto", *LOOP_OF_THE_MODULE) for word in ("-o", each)]
    plugins = ["-c", os.devnull, f"--rootdir={tmp_path}", "-p", "tests.hub.upstream_spawner"]
    done = subprocess.run(
        # A shell's background job has SIGINT ignored, which the servers would inherit.
        ["env", "--default-signal=INT", sys.executable, "-m", "pytest", UPSTREAM, "-q", *settings, *plugins],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
            "JUPYTER_CONFIG_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 30
