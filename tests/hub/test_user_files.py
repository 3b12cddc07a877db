"""What the Hub writes for a system user is written by a process of that user, never by root."""

from __future__ import annotations

import asyncio
import os
import pwd
import ssl
import stat
import subprocess
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from certipy import Certipy

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub import local
from jupyter_gpushare.hub.compat import SpawnException
from jupyter_gpushare.hub.local import GPUShareLocalSpawner
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls

OTHER = pwd.getpwnam("nobody")
ME = pwd.getpwuid(os.getuid()).pw_name
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of `OTHER`, in folders that others may pass."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(home, OTHER.pw_uid, OTHER.pw_gid)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.geteuid() and each != Path("/"):
            each.chmod(each.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    return home


@needs_root
async def test_the_file_and_its_folders_belong_to_the_user_alone(home: Path) -> None:
    path = home / "a b" / "server.pem"
    await local.write_as("nobody", path, b"one")
    await local.write_as("nobody", path, b"two")
    assert path.read_bytes() == b"two"
    assert [each.name for each in path.parent.iterdir()] == ["server.pem"]
    for each, mode in ((path, 0o600), (path.parent, 0o700)):
        about = each.stat()
        assert (about.st_uid, about.st_gid) == (OTHER.pw_uid, OTHER.pw_gid)
        assert stat.S_IMODE(about.st_mode) == mode


@needs_root
async def test_a_link_in_the_home_leads_nowhere_that_the_user_could_not_write(
    home: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "of-root"
    secret.mkdir(mode=0o755)
    (home / ".jupyterhub").symlink_to(secret)
    with pytest.raises(GpuShareError, match="Permission denied"):
        await local.write_as("nobody", home / ".jupyterhub" / "certs" / "server.pem", b"key")
    assert list(secret.iterdir()) == []
    assert secret.stat().st_uid == 0


def test_a_hub_that_ends_while_it_writes_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "server.pem").write_bytes(b"of before")
    words = ("sh", str(tmp_path), "server.pem", "5")
    done = subprocess.run(["/bin/sh", "-c", local._WRITE, *words], input=b"new", timeout=60, check=False)
    assert done.returncode == 1
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("server.pem", b"of before")]


async def test_a_home_that_does_not_answer_is_given_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "WRITE_S", 0.2)
    monkeypatch.setattr(local, "_WRITE", "exec sleep 600")
    with pytest.raises(GpuShareError, match="not written within"):
        await local.write_as(ME, tmp_path / "x", b"key")


async def test_no_more_is_kept_than_is_quoted_of_what_the_users_process_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_WRITE", "echo first >&2; head -c 10000 /dev/zero >&2; exit 3")
    with pytest.raises(GpuShareError, match="cannot be written: first") as refused:
        await local.write_as(ME, tmp_path / "x", b"key")
    assert len(str(refused.value)) < 1000
    monkeypatch.setattr(local, "WRITE_S", 1.0)
    monkeypatch.setattr(local, "_WRITE", "exec cat /dev/zero >&2")
    tracemalloc.start()
    try:
        with pytest.raises(GpuShareError, match="not written within"):
            await local.write_as(ME, tmp_path / "x", b"key")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def spawner(monkeypatch: pytest.MonkeyPatch, home: Path) -> GPUShareLocalSpawner:
    """One of this user, in a home of the test."""
    entry = SimpleNamespace(pw_dir=str(home), pw_uid=os.getuid(), pw_gid=os.getgid())
    monkeypatch.setattr(pwd, "getpwnam", lambda _: entry)
    made = GPUShareLocalSpawner.__new__(GPUShareLocalSpawner)
    made.user = SimpleNamespace(name="ada")
    made.handler = None
    return made


def usable(paths: dict[str, str]) -> ssl.SSLContext | None:
    return internal_tls(
        dict(zip(VARIABLES, (paths[n] for n in ("keyfile", "certfile", "cafile")), strict=True))
    )


async def test_servers_of_a_user_that_start_at_once_share_one_pair_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Certipy(store_dir=str(tmp_path / "store"))
    store.create_ca("notebooks-ca")
    made = spawner(monkeypatch, tmp_path / "home")

    async def start() -> dict[str, str]:
        # As Spawner.create_certs does, also while another start is between its two steps.
        files = store.create_signed_pair("user-ada", "notebooks-ca", overwrite=True)["files"]
        await asyncio.sleep(0)
        pair = {"keyfile": files["key"], "certfile": files["cert"], "cafile": files["ca"]}
        return await made.move_certs(pair)

    first, *others = await asyncio.gather(*(start() for _ in range(4)))
    assert others == [first] * 3
    assert usable(first) is not None
    folder = Path(first["keyfile"]).parent
    assert sorted(each.name for each in folder.iterdir()) == ["authorities.pem", "server.pem"]


async def test_a_home_that_takes_no_certificates_refuses_the_start_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Certipy(store_dir=str(tmp_path / "store"))
    store.create_ca("notebooks-ca")
    files = store.create_signed_pair("user-ada", "notebooks-ca")["files"]
    (tmp_path / "home").write_text("a file")
    made = spawner(monkeypatch, tmp_path / "home")
    with pytest.raises(SpawnException) as refused:
        await made.move_certs({"keyfile": files["key"], "certfile": files["cert"], "cafile": files["ca"]})
    assert refused.value.status_code == 409
    assert "certificates" in refused.value.message
