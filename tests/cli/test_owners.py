"""`gpushare admin owners`, `adopt` and `end`."""

from __future__ import annotations

from typing import Any

import pytest

MADE = "2026-11-22T03:05:09.123456Z"


def owners(*names: str) -> dict[str, Any]:
    return {
        "owners": [
            {"name": n, "user": f"{n}/{MADE}", "created": MADE, "jobs": 2, "others": 1, "held": n != "cy"}
            for n in names
        ]
    }


def test_absent_owners_are_a_table(gpushare, broker):
    broker.answer("GET owners", owners("ada", "cy"))
    ran = gpushare("admin", "owners")
    assert ran.code == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines()[1:]]
    assert rows == [["ada", MADE, "2", "1", "held"], ["cy", MADE, "2", "1", "absent"]]
    broker.answer("GET owners", owners())
    assert gpushare("admin", "owners").out == "The Hub has the owners of all sessions and jobs.\n"


def test_what_belongs_to_an_owner_is_given_to_a_user(gpushare, broker):
    broker.answer("GET owners", owners("ada", "bo"))
    broker.answer("PUT owners/ada", owners("bo"))
    assert gpushare("admin", "adopt", "ada", "--to", "lovelace", "--json").json == owners("bo")
    assert broker.seen[-1].json == {"to": "lovelace"}


def test_all_owners_are_adopted_and_those_that_cannot_be_are_named(gpushare, broker):
    broker.answer("GET owners", owners("ada", "bo"))
    broker.answer("PUT owners/ada", {"status": 409, "reason": "conflict", "message": "no user 'ada'"}, 409)
    broker.answer("PUT owners/bo", owners("ada"))
    ran = gpushare("admin", "adopt", "--all")
    assert ran.code == 1
    assert "no user 'ada'" in ran.err
    assert [seen.path for seen in broker.seen if seen.method == "PUT"] == ["owners/ada", "owners/bo"]


def test_jobs_are_ended_after_a_question(gpushare, broker):
    broker.answer("GET owners", owners("ada"))
    broker.answer("DELETE owners/ada", owners())
    assert gpushare("admin", "end", "ada").code == 2  # there is no terminal to ask at
    assert all(seen.method == "GET" for seen in broker.seen)
    assert gpushare("admin", "end", "ada", "--yes").code == 0
    assert gpushare("admin", "end", "--all", "--yes").code == 0


@pytest.mark.parametrize(("method", "words"), [("PUT", ["adopt"]), ("DELETE", ["end", "--yes"])])
def test_a_change_is_not_sent_again_when_its_answer_was_lost(gpushare, broker, method, words):
    """The second answer would be that no such owner is absent."""
    broker.answer("GET owners", owners("ada"))
    broker.answer(f"{method} owners/ada", {"status": 503, "reason": "unavailable", "message": "later"}, 503)
    assert gpushare("admin", *words, "ada").code != 0
    assert [seen.method for seen in broker.seen].count(method) == 1


def test_one_owner_is_named_or_all(gpushare, broker):
    broker.answer("GET owners", owners("ada"))
    for words in (("end",), ("adopt",), ("adopt", "ada", "--all"), ("adopt", "--all", "--to", "bo")):
        assert gpushare("admin", *words).code == 2
