"""A user's webhook, called by the job's own runner."""

from __future__ import annotations

import os
import signal
import ssl
from contextlib import closing

import pytest

from tests.certificates import Authority
from tests.json_server import Receiver
from tests.waiting import until

NAME = "nig\u202eht\n\x1b[31m"


def test_it_is_told_of_the_start_and_the_end_with_names_as_data(start, others, receiver):
    others.outcome = {"state": "failed", "reason": "Ended with exit code 3. It last printed:\nbad\x07"}
    job = start("sh", "-c", "exit 3", name=NAME, notify_url=receiver.url)
    job.ended()
    until(lambda: "ended" in receiver.events, "the webhook is told of the end")
    begun, ended = receiver.told
    assert begun["event"] == "started"
    assert begun["text"] == "nig?ht ?[31m started."
    assert {
        key: ended[key] for key in ("event", "user", "job", "attempt", "state", "exit_code", "reason")
    } == {
        "event": "ended",
        "user": "ada",
        "job": "0123456789",
        "attempt": 1,
        "state": "failed",
        "exit_code": 3,
        "reason": "Ended with exit code 3. It last printed: bad?",
    }
    assert ended["text"] == f"nig?ht ?[31m has failed. {ended['reason']}"
    assert job.exited() == 0
    # Its own token is for the broker and the Hub alone.
    assert "token" not in str(receiver.headers)


def test_it_is_told_at_once_that_the_job_is_being_stopped(start, others, receiver):
    others.outcome = {"state": "timed_out", "reason": "It was stopped after its maximum run time, 4 h."}
    job = start("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done", notify_url=receiver.url)
    job.printed("up")
    os.kill(job.process.pid, signal.SIGTERM)
    until(lambda: "stopping" in receiver.events, "the webhook is told of the stop")
    assert others.reported("ended") is None
    assert receiver.told[-1]["state"] == "timed_out"
    assert (
        receiver.told[-1]["text"] == "train is being stopped. It was stopped after its maximum run time, 4 h."
    )
    assert others.reported("stopping") is not None


def test_one_that_does_not_answer_delays_neither_the_report_nor_the_exit_for_long(start, others, receiver):
    receiver.answers.clear()
    job = start("true", notify_url=receiver.url)
    assert job.ended()["exit_code"] == 0
    assert job.exited() == 0
    assert receiver.events[0] == "started"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/hook", "http://no-such-host.invalid/"])
def test_one_that_is_not_there_changes_nothing(start, others, url):
    job = start("true", notify_url=url)
    assert job.ended()["exit_code"] == 0
    assert job.exited() == 0


def test_an_authority_of_the_machine_is_trusted(start, others, tmp_path):
    files = Authority(tmp_path).issue("127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)
    with closing(Receiver(tls=tls)) as receiver:
        job = start("true", notify_url=receiver.url, runner_env={"SSL_CERT_FILE": str(files.authority)})
        assert job.exited() == 0
        assert receiver.events == ["started", "ended"]


def test_a_redirect_is_not_followed(start, others, receiver):
    other = Receiver()
    receiver.status, receiver.moved_to = 307, other.url
    job = start("true", notify_url=receiver.url)
    assert job.exited() == 0
    assert receiver.events == ["started", "ended"]
    assert other.told == []
    other.close()


def test_without_one_the_broker_is_not_asked_what_becomes_of_a_stopped_job(start, others):
    job = start("sh", "-c", "echo up; sleep 60")
    job.printed("up")
    os.kill(job.process.pid, signal.SIGTERM)
    job.ended()
    assert others.reported("stopping") is None
