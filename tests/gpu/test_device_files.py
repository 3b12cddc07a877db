"""Device files that the helper closes: users of leases open them, others do not.

The nodes are regular files, or a node of /dev/null where the test may make one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.os.device_files import DeviceFiles
from tests.gpu.machine import GIB, Machine, machine_in
from tests.waiting import until

ADA, BO, CYD = 61_001, 61_002, 61_003
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users open the files")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with the files of two devices that every user may open, and may pass to."""
    path = Path(tempfile.mkdtemp(prefix="gpushare-dev-"))
    path.chmod(0o711)
    make_nodes(path)
    yield path
    shutil.rmtree(path)


def make_nodes(folder: Path) -> None:
    for number in range(2):
        node = folder / f"nvidia{number}"
        try:
            os.mknod(node, stat.S_IFCHR, os.makedev(1, 3))
            os.close(os.open(node, os.O_RDWR))
        except OSError:  # not root, or a file system without devices
            node.unlink(missing_ok=True)
            node.touch()
        node.chmod(0o666)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_in(tmp_path, spec="2xH100-80GB,host=512GiB,restart=any-time")


def opens(uid: int, path: Path) -> bool:
    """Whether a process of this user opens the file."""
    opened = as_user(uid, ': <>"$1"', path)
    return not (opened.communicate() and opened.returncode)


def as_user(uid: int, script: str, path: Path) -> subprocess.Popen[str]:
    """A shell of the user: other users may not reach the interpreter of the tests."""
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", str(path)],
        user=uid,
        group=uid,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def who(folder: Path, number: int = 0) -> set[int]:
    return {uid for uid in (ADA, BO, CYD) if opens(uid, folder / f"nvidia{number}")}


def lease(machine: Machine, name: str, uid: int, limit_bytes: int = 20 * GIB, device: int = 0) -> None:
    made = machine.ask("set_limit", lease=name, uid=uid, limits={machine.uuids()[device]: limit_bytes})
    machine.knows(name, made["directory"])


def whole(machine: Machine, device: int = 0) -> dict[str, object]:
    rungs = machine.ask("inventory")["devices"][device]["ladder"]
    return next(rung for rung in rungs if rung["level"] == "whole_gpu")


def all_of(machine: Machine) -> int:
    device = machine.ask("inventory")["devices"][0]
    return device["memory_bytes"] - device["reserve_bytes"]


def start(machine: Machine, folder: Path, *, owns: bool = True, **options: object) -> None:
    own = ("--own-device-files",) if owns else ()
    machine.start("--device-dir", str(folder), *own, **options)


def has_lists(path: Path) -> bool:
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno == errno.ENODATA
    return True


def test_a_whole_gpu_is_not_enforced_where_every_user_may_open_its_file(bare: Machine, folder: Path) -> None:
    start(bare, folder, owns=False)
    assert whole(bare)["reason"] == (
        f"{folder}/nvidia0 is open to every user (mode 0666): see --own-device-files"
    )
    lease(bare, "all", os.geteuid(), all_of(bare))
    assert bare.of("all")["level"] == "preload"
    (folder / "nvidia0").chmod(0o660)
    until(lambda: bare.of("all")["level"] == "whole_gpu", "the administrator's own mode counts")
    assert whole(bare)["by"] == f"the mode of {folder}/nvidia0 (0660)"
    assert stat.S_IMODE((folder / "nvidia1").stat().st_mode) == 0o666


def test_a_helper_without_root_closes_what_its_user_owns(bare: Machine, folder: Path) -> None:
    start(bare, folder)
    lease(bare, "all", os.geteuid(), all_of(bare))
    assert bare.of("all")["level"] == "whole_gpu"
    assert stat.S_IMODE((folder / "nvidia0").stat().st_mode) == 0o600
    bare.stop()
    assert stat.S_IMODE((folder / "nvidia0").stat().st_mode) == 0o666


@as_root
def test_users_of_leases_open_the_files_of_their_devices_until_the_lease_ends(
    bare: Machine, folder: Path
) -> None:
    if not has_lists(folder / "nvidia0"):
        pytest.skip("no access lists on the file system of the folder for temporary files")
    assert who(folder) == {ADA, BO, CYD}
    start(bare, folder)
    assert who(folder) == who(folder, 1) == set()
    lease(bare, "ada", ADA, 20 * GIB)
    lease(bare, "bo", BO, 20 * GIB)
    assert who(folder) == {ADA, BO}
    assert who(folder, 1) == set()
    lease(bare, "bo-2", BO, all_of(bare), device=1)
    assert who(folder, 1) == {BO}
    assert bare.of("bo-2")["level"] == "whole_gpu"
    assert whole(bare)["by"] == f"the access list of {folder}/nvidia0"
    held = as_user(ADA, 'exec 3<>"$1"; echo open; read x; : <&3 && echo still open', folder / "nvidia0")
    assert held.stdout is not None
    assert held.stdout.readline() == "open\n"
    bare.ask("drop", lease="ada")
    assert who(folder) == {BO}
    assert held.communicate("\n")[0] == "still open\n"
    bare.ask("drop", lease="bo")
    assert who(folder) == set()
    bare.stop()
    assert who(folder) == {ADA, BO, CYD}
    assert stat.S_IMODE((folder / "nvidia0").stat().st_mode) == 0o666


@as_root
def test_a_file_that_was_opened_or_made_again_is_closed_again(bare: Machine, folder: Path) -> None:
    start(bare, folder)
    lease(bare, "ada", ADA)
    (folder / "nvidia0").chmod(0o666)
    until(lambda: who(folder) == {ADA}, "the mode is set again")
    (folder / "nvidia0").unlink()
    with contextlib.suppress(FileExistsError):
        (folder / "nvidia0").touch(0o666)
        (folder / "nvidia0").chmod(0o666)
    until(lambda: who(folder) == {ADA}, "the new file is closed")
    assert "was opened to others (mode 0666): it is closed again" in bare.log.read_text()
    (folder / "nvidia1").unlink()
    until(lambda: "cannot be closed" in str(whole(bare, 1)["reason"]), "a missing file is told")


@as_root
def test_a_killed_helper_leaves_the_files_closed_and_the_next_one_knows_their_rights(
    bare: Machine, folder: Path
) -> None:
    (folder / "nvidia1").chmod(0o664)
    start(bare, folder)
    lease(bare, "ada", ADA)
    assert bare.helper is not None
    bare.helper.kill()
    bare.helper.wait()
    assert who(folder) == {ADA}
    start(bare, folder)
    assert who(folder) == {ADA}
    bare.helper.kill()
    bare.helper.wait()
    start(bare, folder, owns=False)  # the site has changed its mind
    assert who(folder) == {ADA, BO, CYD}
    assert stat.S_IMODE((folder / "nvidia1").stat().st_mode) == 0o664


@as_root
def test_the_user_of_a_self_test_is_admitted_while_it_runs(tmp_path: Path, folder: Path) -> None:
    gpus = [DriverGpu(f"GPU-{n}", n, "H100", 80 * GIB, mig=False, minor=n) for n in range(2)]
    files = DeviceFiles(folder, gpus, tmp_path / "device-files", "boot", owns=True)
    files.admit({"GPU-0": [ADA]})
    if not has_lists(folder / "nvidia0"):
        pytest.skip("no access lists on the file system of the folder for temporary files")
    with files.tested_by(["GPU-0"], CYD):
        assert who(folder) == {ADA, CYD}
        assert who(folder, 1) == set()
    with files.tested_by(["GPU-0", "GPU-1"], CYD):  # a move from one to the other
        assert (who(folder), who(folder, 1)) == ({ADA, CYD}, {CYD})
    assert (who(folder), who(folder, 1)) == ({ADA}, set())


@as_root
def test_without_access_lists_the_only_user_owns_the_file_and_several_open_it(
    bare: Machine, tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="gpushare-ramfs-"))
    mounted = subprocess.run(["mount", "-t", "ramfs", "none", folder], capture_output=True, text=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"no file system without access lists: {mounted.stderr.strip()}")
    try:
        folder.chmod(0o711)
        make_nodes(folder)
        assert not has_lists(folder / "nvidia0")
        start(bare, folder)
        assert who(folder) == set()
        lease(bare, "ada", ADA)
        assert who(folder) == {ADA}
        assert whole(bare)["by"] == f"the owner of {folder}/nvidia0"
        lease(bare, "bo", BO)
        assert who(folder) == {ADA, BO, CYD}
        assert "no access lists, and several users" in str(whole(bare)["reason"])
        bare.ask("drop", lease="ada")
        assert who(folder) == {BO}
        bare.stop()
        assert who(folder) == {ADA, BO, CYD}
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()
