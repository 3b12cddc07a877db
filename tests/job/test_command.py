from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_gpushare.job.command import CannotStart, command_environment, working_directory
from jupyter_gpushare.protocol.wire import JobSpec


def spec(env: dict[str, str] | None = None, cwd: str | None = None) -> JobSpec:
    return JobSpec(id="abc", attempt=2, name="n", command=["x"], cwd=cwd, env=env or {}, grace_s=1.0)


def environment(runner: dict[str, str], own: dict[str, str] | None = None) -> dict[str, str]:
    found = command_environment(runner, spec(own), "/tmp/s")
    for added in ("GPUSHARE_JOB_ID", "GPUSHARE_JOB_ATTEMPT", "GPUSHARE_PROGRESS_SOCKET"):
        del found[added]
    return found


def test_secrets_and_the_words_of_the_hub_are_left_out() -> None:
    runner = {
        "JUPYTERHUB_API_TOKEN": "t",
        "JPY_API_TOKEN": "t",
        "JUPYTERHUB_CLIENT_ID": "c",
        "GPUSHARE_JOB": "{}",
        "GPUSHARE_API_URL": "u",
        "JUPYTERHUB_USER": "ada",
        "PATH": "/bin",
    }
    assert environment(runner) == {"JUPYTERHUB_USER": "ada", "PATH": "/bin"}


def test_the_lease_cannot_be_changed_by_the_job() -> None:
    runner = {"GPUSHARE_LEASE": "l", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert (
        environment(runner, {"GPUSHARE_LEASE": "x", "CUDA_VISIBLE_DEVICES": "0", "JUPYTERHUB_API_TOKEN": "x"})
        == runner
    )


def test_a_library_of_the_job_comes_behind_ours() -> None:
    assert environment({"LD_PRELOAD": "ours.so"}, {"LD_PRELOAD": "own.so"}) == {
        "LD_PRELOAD": "ours.so:own.so"
    }
    assert environment({}, {"LD_PRELOAD": "own.so"}) == {"LD_PRELOAD": "own.so"}


def test_the_folder_is_the_one_asked_for_or_the_home(tmp_path: Path) -> None:
    assert working_directory(spec(cwd=str(tmp_path)), "/") == str(tmp_path)
    assert working_directory(spec(), str(tmp_path)) == str(tmp_path)
    (tmp_path / "file").touch()
    for missing in ("/no/such", str(tmp_path / "file")):
        with pytest.raises(CannotStart, match="does not exist") as caught:
            working_directory(spec(cwd=missing), "/")
        assert caught.value.exit_code == 126
