"""What a user puts into the folders of their jobs stops neither the runner nor their server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_gpushare.errors import NotFound
from jupyter_gpushare.protocol import jobfiles
from jupyter_gpushare.server import launch

FOLDER = ".local/share/gpushare/jobs/0123456789"


def fifo(folder: Path) -> None:
    for name in ("attempt-1.log", "attempt-1.json", "attempt-1.json.new", "attempt-1.log.000000000000001"):
        os.mkfifo(folder / name)
    other = folder.with_name("other")
    other.mkdir()
    os.mkfifo(other / "attempt-1.json")


def folders(folder: Path) -> None:
    for name in ("attempt-1.log", "attempt-1.json", "attempt-1.json.new"):
        (folder / name).mkdir()


def links(folder: Path) -> None:
    for name in ("attempt-1.log", "attempt-1.json", "attempt-1.json.new"):
        (folder / name).symlink_to(name)


def no_folder(folder: Path) -> None:
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.write_text("")  # a file in its place


@pytest.mark.parametrize("prepare", [fifo, folders, links, no_folder])
def test_a_job_runs_and_is_reported_whatever_lies_in_its_log_folder(start, tmp_path, prepare):
    folder = tmp_path / "home" / FOLDER
    folder.mkdir(parents=True)
    prepare(folder)
    job = start("true")
    assert job.ended()["exit_code"] == 0
    assert job.exited() == 0


def test_a_job_runs_where_no_temporary_file_can_be_made(start, tmp_path):
    job = start("sh", "-c", "exit 3", runner_env={"TMPDIR": str(tmp_path / "none"), "HOME": "/proc/1/none"})
    assert job.ended()["exit_code"] in (3, 126)


def test_reading_a_log_waits_for_no_fifo_and_no_device(tmp_path):
    log = tmp_path / "attempt-1.log"
    log.write_bytes(b"begin")
    os.mkfifo(tmp_path / "attempt-1.log.000000000000005")
    (tmp_path / "attempt-1.log.000000000000009").symlink_to("/dev/zero")
    assert jobfiles.read_log(log, 0, 100).data == b"begin"
    assert jobfiles.read_log(log, 5, 100).data == b""


@pytest.mark.parametrize("name", ["a" * 4_000, "a" * 300 + "/b", "loop/x", "a\0b", "../x", "/etc/passwd"])
def test_a_name_that_names_no_file_is_refused(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(NotFound):
        launch.find(tmp_path, name)
    with pytest.raises(NotFound):
        launch.form(tmp_path, name, ())
