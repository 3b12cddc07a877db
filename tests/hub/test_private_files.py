"""Files with a secret: which are read, and which are refused because others can read or replace them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.private_files import read_private


def written(path: Path, mode: int = 0o600) -> Path:
    path.write_bytes(b"0" * 64)
    path.chmod(mode)
    return path


def test_a_private_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    assert read_private(written(tmp_path / "s", 0o400), 100) == b"0" * 64
    (tmp_path / "link").symlink_to("s")
    assert read_private(tmp_path / "link", 10) == b"0" * 10


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o666])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(GpuShareError, match="read by others"):
        read_private(written(tmp_path / "s", mode), 100)


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "is_read"),
    [
        (0o440, 0, 2000, True),
        (0o640, 0, 2000, True),
        (0o440, 0, 2001, False),  # of a group that the process is not in
        (0o444, 0, 2000, False),
        (0o460, 0, 2000, False),
        (0o440, 1000, 2000, False),  # the owner may add others to what was root's to say
    ],
)
def test_a_secret_of_kubernetes_is_read_by_a_process_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, gid: int, is_read: bool
) -> None:
    path = written(tmp_path / "s")
    fields = list(path.stat())
    fields[0], fields[4], fields[5] = stat.S_IFREG | mode, uid, gid
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result(fields))
    of_root = list(path.stat())
    of_root[4] = 0  # the link
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result(of_root))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000, 2000])
    if is_read:
        assert read_private(path, 100) == b"0" * 64
    else:
        with pytest.raises(GpuShareError, match="read by others"):
            read_private(path, 100)


def test_a_secret_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpuShareError, match="No such file"):
        read_private(tmp_path / "none", 100)
    with pytest.raises(GpuShareError, match="directory"):
        read_private(tmp_path, 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    os.chown(path, 12345, -1)
    with pytest.raises(GpuShareError, match="another user \\(uid 12345"):
        read_private(path, 100)
    link = tmp_path / "link"
    link.symlink_to(path.name)
    os.chown(path, 0, -1)
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(GpuShareError, match="uid 12345\\) made this link"):
        read_private(link, 100)
