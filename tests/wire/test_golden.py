"""The messages in ``golden/`` are what crosses between processes; the page's tests read the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

# ---- digests of messages -----------------------------------------------------


class Later(wire.JobSource, frozen=True):
    """What a later version may know."""

    cells: list[str] = []


class LaterRequest(wire.JobRequest, frozen=True):
    source: Later | None = None


def test_the_digest_of_a_request_is_that_of_what_it_says():
    plain = wire.JobRequest(command=["a"], env={"A": "1", "B": "2"})
    assert wire.digest(wire.replace(plain, env={"B": "2", "A": "1"}, retries=0, gpus="1")) == wire.digest(
        plain
    )
    others = [
        wire.replace(plain, **change)
        for change in (
            {"command": ["b"]},
            {"env": {}},
            {"retries": 1},
            {"gpus": "2"},
            {"source": wire.JobSource(path="a.py")},
        )
    ]
    assert len({wire.digest(each) for each in (plain, *others)}) == 6


def test_defaults_inside_a_field_do_not_count_either():
    body = b'{"command": ["a"], "source": {"path": "a.py"}}'
    whole = b'{"command": ["a"], "source": {"path": "a.py", "kernel": "", "parameters": {}}}'
    digests = {wire.digest(wire.decode(each, wire.JobRequest)) for each in (body, whole)}
    assert digests == {wire.digest(msgspec.json.decode(body, type=LaterRequest))}
    other = b'{"command": ["a"], "source": {"path": "a.py", "kernel": "x"}}'
    assert wire.digest(wire.decode(other, wire.JobRequest)) not in digests


# ---- test golden -------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"
KINDS: dict[str, type[Any]] = {
    "activity_report": wire.ActivityReport,
    "error": wire.ErrorAnswer,
    "history": wire.History,
    "job": wire.Job,
    "job_list": wire.JobList,
    "job_request": wire.JobRequest,
    "offers": wire.Offers,
    "status_active": wire.Status,
    "status_asleep": wire.Status,
    "status_empty": wire.Status,
    "status_lost": wire.Status,
    "status_waking": wire.Status,
    "status_warned": wire.Status,
    "timeline": wire.JobTimeline,
}


def test_every_golden_message_has_a_kind():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_golden_message_comes_back_as_it_was_field_by_field(name):
    text = (GOLDEN / f"{name}.json").read_bytes()
    message = wire.decode(text, KINDS[name])
    assert json.loads(wire.encode(message)) == json.loads(text)


@pytest.mark.parametrize("name", ["activity_report", "job_request"])
def test_request_with_an_unknown_field_is_refused(name):
    plain = json.loads((GOLDEN / f"{name}.json").read_bytes())
    plain["sudo"] = True
    with pytest.raises(InvalidRequest, match="sudo"):
        wire.decode(json.dumps(plain).encode(), KINDS[name])


@pytest.mark.parametrize("name", ["status_active", "job", "offers", "error"])
def test_answer_of_a_newer_broker_is_still_read(name):
    text = (GOLDEN / f"{name}.json").read_bytes()
    newer = json.loads(text) | {"added_later": 1}
    assert msgspec.json.decode(json.dumps(newer).encode(), type=KINDS[name]) == wire.decode(text, KINDS[name])
