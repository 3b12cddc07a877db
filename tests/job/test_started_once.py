"""An attempt starts once: the record on disk is read before anything is started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from jupyter_gpushare.protocol.jobfiles import AttemptRecord, read_record, unseen_outcome, write_record
from tests.job.conftest import HubAndBroker, Job, Start, wait_for
from tests.waiting import is_alive

COUNTED = ("sh", "-c", "echo run >> ../runs; exec sleep 600")


def runs(job: Job) -> int:
    path = job.home.parent / "runs"
    return path.read_text().count("run") if path.exists() else 0


def ended_unseen(start: Start, others: HubAndBroker, *command: str, **spec: object) -> Job:
    """Run a command to its end while the broker is away, and stop its runner."""
    others.broker_down = True
    job = start(*command, **spec)
    wait_for(lambda: job.state == "ended", "the result is on disk")
    job.process.terminate()
    job.exited()
    others.broker_down = False
    return job


@pytest.mark.parametrize("code", [0, 7])
def test_a_result_that_the_broker_missed_is_reported_and_nothing_runs_again(
    start: Start, others: HubAndBroker, code: int
) -> None:
    command = ("sh", "-c", f"echo run | tee -a ../runs; exit {code}")
    first = ended_unseen(start, others, *command)
    job = start(*command)
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (code, False)
    assert job.exited() == 0
    assert runs(first) == 1
    assert job.log == "run\n", "the log of the only run stays"
    assert job.record["reported"]


def test_after_a_kill_of_its_runner_an_attempt_has_failed_and_is_not_started_again(
    start: Start, others: HubAndBroker
) -> None:
    first = start("sh", "-c", "echo $$; echo run >> ../runs; exec sleep 600")
    wait_for(lambda: others.reported("started"), "the start is reported")
    first.printed("\n")
    pid = int(first.log)
    first.process.kill()
    first.exited()
    wait_for(lambda: not is_alive(pid), "the command died with it")
    report = start(*COUNTED).ended()
    assert (report["exit_code"], report["stopped"]) == (-signal.SIGKILL, False)
    assert "killed" in report["reason"]
    assert runs(first) == 1
    assert int(first.log) == pid, "the log of the only run stays"


def test_an_attempt_that_is_new_to_the_broker_runs_not_again_under_a_higher_number(
    start: Start, others: HubAndBroker
) -> None:
    first = ended_unseen(start, others, "sh", "-c", "echo run | tee -a ../runs; exit 7")
    job = start(*COUNTED, attempt=2)
    assert job.ended()["exit_code"] == 7
    assert runs(first) == 1
    assert first.log == "run\n"
    assert "attempt 1 had ended before" in (job.folder / "attempt-2.log").read_text()


def test_a_failed_attempt_that_was_counted_is_followed_by_the_next_one(
    start: Start, others: HubAndBroker
) -> None:
    first = ended_unseen(start, others, "sh", "-c", "echo run >> ../runs; exit 7")
    job = start("sh", "-c", "echo run >> ../runs", attempt=2, settled=1)
    assert job.ended()["exit_code"] == 0
    assert runs(first) == 2


def test_a_job_that_succeeded_unseen_is_done_although_the_attempt_was_counted_as_lost(
    start: Start, others: HubAndBroker
) -> None:
    first = ended_unseen(start, others, "sh", "-c", "echo run >> ../runs")
    assert start(*COUNTED, attempt=2, settled=1).ended()["exit_code"] == 0
    assert runs(first) == 1


RECORD = AttemptRecord(id="x", attempt=3, name="n", command=["c"], state="ended", log="l", exit_code=1)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"attempt": "3"}', '{"state": "ended"}'],
    ids=lambda text: text[:12],
)
def test_a_record_that_is_none_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "attempt-3.json"
    path.write_text(content)
    assert read_record(path) is None


@pytest.mark.parametrize("change", [{"exit_code": "1"}, {"stopped": 1}, {"command": [1]}, {"state": "new"}])
def test_a_record_with_a_wrong_type_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "attempt-3.json"
    assert write_record(path, RECORD)
    assert read_record(path) == RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_record(path) is None


def test_a_record_that_names_another_attempt_says_nothing(tmp_path: Path) -> None:
    write_record(tmp_path / "attempt-2.json", RECORD)
    assert unseen_outcome(tmp_path, 0, 2) is None
