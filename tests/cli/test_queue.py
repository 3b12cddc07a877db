"""The command line and the queue: jobs that are changed, moved and stopped."""

from __future__ import annotations

import pytest


def test_cancel_takes_several_jobs_and_a_refused_one_does_not_keep_the_others(gpushare, broker, golden):
    for id in ("aaaa", "cccc"):
        broker.answer(
            f"DELETE jobs/{id}", golden("job") | {"id": id, "state": "cancelled", "reason": "Over."}
        )
    ran = gpushare("cancel", "aaaa", "bbbb", "cccc", "aaaa")
    assert ran.out == "aaaa  cancelled  Over.\ncccc  cancelled  Over.\n"
    assert ran.code == 1
    assert "gpushare: " in ran.err
    assert [job["id"] for job in gpushare("cancel", "aaaa", "cccc", "--json").json["jobs"]] == [
        "aaaa",
        "cccc",
    ]


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["--gpus", "2"], {"gpus": "2"}),
        (["--memory", "20GiB"], {"memory": "20GiB"}),
        (
            ["--project", "nlp", "--priority", "-5", "--max-run", "4h"],
            {"project": "nlp", "priority": -5, "max_run_s": 14400.0},
        ),
        (["--max-run", "none"], {"max_run_s": 0.0}),
    ],
)
def test_edit_sends_what_changes(gpushare, broker, golden, words, sent):
    broker.answer("PUT jobs/k3v9m2x7qa", golden("job"))
    ran = gpushare("edit", "k3v9m2x7qa", *words)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("k3v9m2x7qa  ")
    (asked,) = broker.asked("PUT jobs/k3v9m2x7qa")
    assert {name: value for name, value in asked.json.items() if value is not None} == sent


def test_edit_without_a_change_and_of_a_started_job_say_so(gpushare, broker):
    ran = gpushare("edit", "k3v9m2x7qa")
    assert (ran.code, broker.asked("PUT jobs/k3v9m2x7qa")) == (2, [])
    assert "gpushare edit k3v9m2x7qa --gpus 2" in ran.err
    said = "job k3v9m2x7qa has started: only jobs in the queue are changed"
    broker.answer("PUT jobs/k3v9m2x7qa", {"status": 409, "reason": "conflict", "message": said}, 409)
    ran = gpushare("edit", "k3v9m2x7qa", "--gpus", "2")
    assert (ran.code, ran.err) == (1, f"gpushare: {said}\n")


@pytest.mark.parametrize(
    ("to", "sent"),
    [
        (["--before", "aaaa"], {"before": "aaaa", "behind": None}),
        (["--behind", "aaaa"], {"before": None, "behind": "aaaa"}),
        (["--up"], {"before": "cccc", "behind": None}),
        (["--down"], {"before": None, "behind": "eeee"}),
        (["--first"], {"before": "aaaa", "behind": None}),
        (["--last"], {"before": None, "behind": "ffff"}),
    ],
)
def test_move_names_the_job_of_mine_that_it_goes_beside(gpushare, broker, golden, to, sent):
    """Between them: a running job, one of another project, of another priority, one that has run."""
    job = golden("job") | {"state": "queued", "ran_s": 0.0}
    others = {
        "b": {"project": "other"},
        "bb": {"priority": 7},
        "bbb": {"ran_s": 9.0},
        "r": {"state": "running"},
    }
    queue = [
        job | {"id": id} | others.get(id, {})
        for id in ["r", "bbb", "aaaa", "b", "cccc", "bb", "dddd", "eeee", "ffff"]
    ]
    broker.answer("GET jobs", {"jobs": queue})
    broker.answer("GET jobs/dddd", queue[6])
    broker.answer("PUT jobs/dddd/place", queue[6])
    ran = gpushare("move", "dddd", *to)
    assert ran.code == 0, ran.err
    (asked,) = broker.asked("PUT jobs/dddd/place")
    assert asked.json == sent


def test_move_of_the_first_up_says_that_it_is_the_first(gpushare, broker, golden):
    job = golden("job") | {"id": "aaaa", "state": "queued", "ran_s": 0.0}
    broker.answer("GET jobs", {"jobs": [job, job | {"id": "bbbb"}]})
    broker.answer("GET jobs/aaaa", job)
    ran = gpushare("move", "aaaa", "--up")
    assert (ran.code, broker.asked("PUT jobs/aaaa/place")) == (0, [])
    assert ran.err == "It is the first of yours already.\n"
    assert gpushare("move", "aaaa").code == 2
    assert gpushare("move", "aaaa", "--up", "--down").code == 2
