from __future__ import annotations

from jupyter_gpushare.job.command import command_environment
from jupyter_gpushare.protocol.wire import JobSpec


def environment(runner: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    spec = JobSpec(id="abc", attempt=2, name="n", command=["x"], cwd=None, env=own, grace_s=1.0)
    found = command_environment(runner, spec, "/tmp/s")
    for added in ("GPUSHARE_JOB_ID", "GPUSHARE_JOB_ATTEMPT", "GPUSHARE_PROGRESS_SOCKET"):
        del found[added]
    return found


def test_a_library_of_the_job_comes_behind_ours() -> None:
    assert environment({"LD_PRELOAD": "ours.so"}, {"LD_PRELOAD": "own.so"}) == {
        "LD_PRELOAD": "ours.so:own.so"
    }
    assert environment({}, {"LD_PRELOAD": "own.so"}) == {"LD_PRELOAD": "own.so"}
