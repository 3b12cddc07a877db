"""The messages in ``golden/`` are what crosses between processes; the page's tests read the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

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
