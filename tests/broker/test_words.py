"""Every state has a badge and a sentence, and no sentence has a word that is kept away from people."""

from __future__ import annotations

import itertools
import re
from datetime import datetime

import pytest

from jupyter_gpushare import words
from jupyter_gpushare.broker.facts import clock_time
from jupyter_gpushare.core.model import Kind, State, Why
from jupyter_gpushare.words import DecisionFacts, LeaseFacts

AWAY = re.compile(r"\b(reclaim|evict|OOM|pending|cull|preempt|None|nan|inf)", re.IGNORECASE)
CODE = re.compile(r"[a-z]+_[a-z]+|State\.|Why\.|<|>")


def facts(state: State, kind: Kind = Kind.BUILD, **more) -> LeaseFacts:
    given = {
        "size": "1/2 GPU",
        "device_name": "H100-80GB",
        "memory_limit_bytes": 40 * 1000**3,
        "memory_used_bytes": 7 * 1000**3,
        "memory_saved_bytes": 7 * 1000**3,
        "idle_s": 600.0,
        "lend_in_s": 300.0,
        "warned": True,
        "waiting": 2,
        "why": Why.IDLE,
        "note": "",
        "borrowed": False,
        "wanted": False,
        "since": "14:20",
        "lent_to": "a training job of project nlp",
        "suspendable": True,
        "suspend_reason": "",
    }
    return LeaseFacts(kind=kind, state=state, **given | more)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", Kind)
def test_every_state_is_said_in_plain_words(state, kind):
    for why, wanted, borrowed, suspendable, idle, lend in itertools.product(
        ["", *Why], (True, False), (True, False), (True, False), (None, 0.0, 1e6), (None, 0.0)
    ):
        case = facts(
            state,
            kind,
            why=why,
            wanted=wanted,
            borrowed=borrowed,
            suspendable=suspendable,
            suspend_reason="" if suspendable else "it uses CUDA IPC",
            idle_s=idle,
            lend_in_s=lend,
        )
        text, badge = words.sentence(case), words.badge(case)
        assert text.strip().endswith((".", "!"))
        assert badge
        assert len(badge) <= 20
        assert not AWAY.search(text + badge), text
        assert not CODE.search(text + badge), text


def test_a_warned_owner_reads_who_waits_when_and_what_becomes_of_the_memory():
    text = words.sentence(facts(State.RUNNING))
    for part in ("Idle for 10 min", "2 jobs are waiting", "In 5 min", "RAM", "Your variables stay"):
        assert part in text
    assert words.badge(facts(State.RUNNING)) == "Lent in 5 min"


def test_an_owner_whom_nobody_waits_for_keeps_the_gpu():
    case = facts(State.RUNNING, waiting=0, lend_in_s=None, warned=False)
    assert words.sentence(case) == "Idle for 10 min. Nobody is waiting, so your GPU stays with you."
    assert words.badge(case) == "Idle 10 min"


def test_who_keeps_or_lends_the_gpu_reads_it():
    alone = {"waiting": 0, "lend_in_s": None, "warned": False}
    kept = facts(State.RUNNING, kept_until="15:10", stays_until="15:10", **alone)
    assert words.sentence(kept) == "Idle for 10 min. Your GPU stays with you until 15:10."
    busy = facts(State.RUNNING, idle_s=None, kept_until="15:10", **alone)
    assert words.sentence(busy) == "Your 1/2 GPU is in use. You keep it until 15:10."
    assert "the next who needs a GPU gets yours" in words.sentence(
        facts(State.RUNNING, lend_now=True, **alone)
    )


def test_a_sleeping_session_says_since_when_to_whom_and_how_to_wake():
    text = words.sentence(facts(State.SUSPENDED))
    assert "since 14:20" in text
    assert "training job of project nlp" in text
    assert "Run any GPU cell" in text
    assert "Nobody uses your GPU" in words.sentence(facts(State.SUSPENDED, lent_to=""))
    assert words.badge(facts(State.SUSPENDED)) == "Asleep, GPU lent"
    assert words.badge(facts(State.SUSPENDED, lent_to="")) == "Asleep"
    assert "to wake it; your variables are safe." in text
    assert "to wake it, usually 8 s (5-12)." in words.sentence(
        facts(State.SUSPENDED, usually_wakes=words.usually(5.1, 8.4, 12.4))
    )


def test_waking_up_says_who_gives_the_gpu_back_and_how_long_the_copy_takes():
    gives = facts(State.SUSPENDED, wanted=True, copy_s=4.6)
    assert words.sentence(gives) == (
        "Getting the GPU back from a training job of project nlp, then copying 6.5 GB (about 5 s). "
        "Your cell runs after that."
    )
    assert words.badge(gives) == "Waking up"
    copies = facts(State.RESUMING, copy_s=None)
    assert words.sentence(copies) == "Copying 6.5 GB back to the GPU. Your cell runs after that."


def test_who_has_to_wait_for_the_own_gpu_reads_for_whom_and_how_long():
    saves = facts(State.SUSPENDED, wanted=True, held_up_s=30.2)
    assert words.sentence(saves) == (
        "Your GPU is guaranteed but busy for up to 30 s more: a job is saving its checkpoint."
    )
    assert words.badge(saves) == "Waiting to wake"
    guest = facts(State.SUSPENDED, wanted=True, unclaimed=True)
    assert "guaranteed" not in words.sentence(guest)
    assert words.badge(guest) == "Waiting to wake"


def test_an_idle_owner_reads_until_when_the_gpu_stays_whoever_waits():
    early = facts(State.RUNNING, warned=False, stays_until="14:20")
    assert words.sentence(early) == "Idle for 10 min. Your GPU stays with you until 14:20."
    over = facts(State.RUNNING, warned=False, lend_in_s=None)
    assert words.sentence(over) == (
        "Idle for 10 min. 2 jobs are waiting: your GPU is lent as soon as that helps. Your variables stay."
    )
    assert words.badge(over) == "Idle 10 min"


def test_a_paused_job_says_why_that_nothing_was_lost_and_where_it_stands():
    paused = facts(
        State.SUSPENDED,
        Kind.TRAIN,
        why=Why.OVER_QUOTA,
        note=words.because_of(Why.OVER_QUOTA, "nlp"),
        position=1,
    )
    assert words.sentence(paused) == (
        "Paused at 14:20 because nlp took back its guaranteed GPU. Nothing was lost. Number 1."
    )
    requeued = words.requeued(
        "14:20", words.because_of(Why.OVER_QUOTA), words.GOES_ON["sigterm"], "Number 1."
    )
    assert requeued == (
        "Paused at 14:20 because another project took back its guaranteed GPU. "
        "It goes on from its own checkpoint. Number 1."
    )


def test_a_job_on_borrowed_room_says_who_may_take_it_back():
    borrowed = facts(State.RUNNING, Kind.TRAIN, borrowed=True, taken_back_by="project nlp")
    assert words.sentence(borrowed).endswith("It may be paused when project nlp needs its own.")
    of_several = facts(State.RUNNING, Kind.TRAIN, borrowed=True)
    assert words.sentence(of_several).endswith("It may be paused when another project needs its own.")


def test_a_session_that_cannot_sleep_says_why():
    case = facts(State.RUNNING, suspendable=False, suspend_reason="it uses CUDA IPC", warned=False)
    assert "it uses CUDA IPC" in words.sentence(case)
    assert words.badge(case) == "Held"


def test_lost_state_says_what_to_do():
    lost = facts(State.RUNNING, note=words.STATE_LOST, suspend_reason="the driver lost it", reference="b7-1")
    text = words.sentence(lost)
    assert words.badge(lost) == "GPU state lost"
    assert "restart" in text
    assert "(the driver lost it)" in text
    assert text.endswith("Files are safe. Reference b7-1.")


@pytest.mark.parametrize("why", Why)
def test_every_reason_to_wait_is_a_sentence(why):
    text = words.waiting(why, needs="2 GPUs", free_milli=1250, position=3)
    assert text.endswith(".")
    assert not AWAY.search(text)
    assert not CODE.search(text)


def test_waiting_says_number_need_and_what_is_free():
    assert words.waiting(Why.NO_ROOM, needs="2 GPUs", free_milli=1250, position=3) == (
        "Number 3. Needs 2 GPUs; 1.25 are free."
    )
    assert "starts in a moment" in words.waiting("", needs="2 GPUs", free_milli=2000, position=None)
    assert "1 is free" in words.waiting(Why.NO_ROOM, needs="2 GPUs", free_milli=1000, position=None)


def test_what_can_never_run_has_no_number():
    text = words.waiting(Why.TOO_LARGE, needs="8 GPUs together", free_milli=0, position=3, largest=4)
    assert text == "Cannot start: asks for 8 GPUs together; the largest machine has 4 GPUs."


@pytest.mark.parametrize("why", Why)
@pytest.mark.parametrize("action", ["grant", "suspend", "resume", "requeue"])
def test_every_decision_is_a_sentence(action, why):
    text = words.decision(
        DecisionFacts(action=action, why=why, who="bo's job train", kind=Kind.TRAIN, for_whom="ada's session")
    )
    assert "sleep" not in text
    assert text.startswith("bo's job train ")
    assert "for ada's session: " in text
    assert text.endswith(".")
    assert not AWAY.search(text)
    assert not CODE.search(text)


@pytest.mark.parametrize(
    ("milli", "text"), [(250, "1/4"), (333, "1/3"), (500, "1/2"), (123, "0.123"), (1000, "1"), (1250, "1.25")]
)
def test_fractions_are_written_as_people_write_them(milli, text):
    assert words.fraction(milli) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (89, "89 s"), (360, "6 min"), (7200, "2 h"), (1e6, "278 h")],
)
def test_durations_have_one_unit(seconds, text):
    assert words.duration(seconds) == text


def test_sizes_are_written_as_asked_for():
    assert words.size(500, 1) == "1/2 GPU"
    assert words.size(1000, 2) == "2 GPUs"
    assert words.size(0, 1, 20 * 1024**3).endswith("of a GPU")
    assert words.size(1000, 1, profile="1g.10gb") == "MIG 1g.10gb"
    assert words.size_as_written("1", None, "1g.10gb") == "MIG 1g.10gb"
    assert words.size_as_written("2", None, None) == "2 GPUs"
    assert words.size_as_written("1", None, None) == "1 GPU"
    assert words.size_as_written("1/2", None, None) == "1/2 GPU"
    assert words.size_as_written("1", "20GiB", None) == "20GiB of a GPU"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ((600, 1500, 3000), "Starts in about 25 min (10-50)."),
        ((0, 10, 20), "Starts in about 10 s (1-20)."),
        ((3600, 7200, 90_000), "Starts in about 2 h (1-25)."),
        ((86_400, 400_000, 900_000), "Starts in about 5 days (1-10)."),
    ],
)
def test_a_start_is_told_as_a_range_in_one_unit(seconds, says):
    assert words.starts_in(*seconds) == says


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        ("2026-11-21T00:05", "00:05"),
        ("2026-11-20T23:50", "23:50"),  # last night
        ("2026-11-22T00:10", "Sun 00:10"),
        ("2026-11-20T09:30", "Fri 09:30"),
        ("2026-11-16T09:30", "Mon 09:30"),
        ("2026-11-06T09:30", "6 Nov 09:30"),
        ("2025-11-21T08:00", "21 Nov 08:00"),
    ],
)
def test_a_time_of_another_day_has_its_day(moment: str, told: str) -> None:
    local = [datetime.fromisoformat(each).astimezone().isoformat() for each in (moment, "2026-11-21T08:00")]
    assert clock_time(*local) == told
