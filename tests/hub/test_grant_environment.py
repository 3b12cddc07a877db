"""What a broker may put into the environment of a user's server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_gpushare.backends.local import holder_environment
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub.grants import checked
from jupyter_gpushare.native import install_preload
from tests.hub.conftest import Hub
from tests.hub.fake_broker import GRANT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTHONPATH", "/tmp/evil"),
        ("PATH", "/tmp/evil"),
        ("LD_LIBRARY_PATH", "/tmp/evil"),
        ("LD_AUDIT", "/tmp/evil.so"),
        ("BASH_ENV", "/tmp/evil"),
        ("JUPYTERHUB_API_TOKEN", "x"),
        ("GPUSHARE_API_URL", "http://evil"),
        ("ld_preload", "/x/libgpushare_preload.so"),
        ("LD_PRELOAD", "/tmp/evil.so"),
        ("LD_PRELOAD", "/tmp/evil.so:/x/libgpushare_preload.so"),
        ("LD_PRELOAD", "/tmp/evil.so /x/libgpushare_preload.so"),
        ("LD_PRELOAD", "/x/../tmp/libgpushare_preload.so"),
        ("LD_PRELOAD", "/$LIB/libgpushare_preload.so"),
        ("LD_PRELOAD", "libgpushare_preload.so"),
        ("LD_PRELOAD", "/x/libgpushare_preload.so\n"),
        ("LD_PRELOAD", "/x/evil-libgpushare_preload.so"),
        ("GPUSHARE_LEASE", "../x"),
        ("GPUSHARE_LEASE_DIR", "relative"),
        ("GPUSHARE_LEASE_DIR", "/run/../home/ada"),
        ("GPUSHARE_LEASE_DIR", "/run/a\nb"),
        ("GPUSHARE_MEMORY_LIMIT", "-1"),
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1,"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false; x"),
    ],
)
def test_other_names_and_other_shapes_are_refused(name, value):
    with pytest.raises(GpuShareError, match="may not set"):
        checked({**GRANT["env"], name: value})


def test_what_our_broker_sets_is_accepted():
    uuid = "GPU-5c1f2a2e-9bd7-41f8-8a7d-2f0f4c8a1d11"
    limits = {uuid: 1 << 35, "MIG-41b35b2f-2d6b-5e2a-9d1b-0f3d1f2a7c55": 1 << 30}
    given = holder_environment("b0123456789-1", "/var/lib/gpushare helper/leases/b0123456789-1", limits)
    assert checked(given) == given
    assert checked(GRANT["env"]) == GRANT["env"]


def test_the_library_that_a_device_helper_installed_on_a_node_is_accepted(tmp_path: Path):
    library = install_preload(tmp_path)
    given = holder_environment("b0123456789-1", "/run/gpushare/leases/b0123456789-1", {}, str(library))
    assert checked({k: v for k, v in given.items() if k == "LD_PRELOAD"})


@pytest.mark.parametrize(("mode", "folder_mode"), [(0o666, 0o755), (0o644, 0o777)])
def test_a_library_that_other_users_can_change_is_not_loaded(tmp_path: Path, mode, folder_mode):
    library = tmp_path / "lib" / "libgpushare_preload.so"
    library.parent.mkdir()
    library.touch()
    library.chmod(0o644)
    env = {"LD_PRELOAD": str(library)}
    assert checked(env) == env
    library.chmod(mode)
    library.parent.chmod(folder_mode)
    with pytest.raises(GpuShareError, match="writable for other users"):
        checked(env)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_library_of_another_user_is_not_loaded(tmp_path: Path):
    library = tmp_path / "libgpushare_preload.so"
    library.touch(mode=0o644)
    os.chown(library, 12345, 12345)
    with pytest.raises(GpuShareError, match="belongs to uid 12345"):
        checked({"LD_PRELOAD": str(library)})


def test_a_start_is_refused_when_the_broker_sets_something_else(hub: Hub) -> None:
    hub.broker.grant = {**GRANT, "env": {**GRANT["env"], "PYTHONPATH": "/tmp/evil"}}
    answer = hub.start_server("ada", {"fraction": "1/2"})
    assert answer.status_code == 503
    assert "does not accept" in answer.json()["message"]
    assert "PYTHONPATH" in hub.log()
    assert hub.broker.of("spawner/stop"), "the lease is given back"
