"""Every state has a badge and a sentence, and no sentence has a word that is kept away from people."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.observations import Companion
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.views.lease_sentences import badge, sentence, share
from jupyter_gpushare.broker.views.lease_view import Consent, LeaseView, LendingOutlook, TimeShare
from jupyter_gpushare.core.model import Kind, Lease, State, Why
from jupyter_gpushare.core.size import Size, fraction_text
from jupyter_gpushare.protocol.helper import ComputeShare, Overuse
from jupyter_gpushare.protocol.wire import Estimate, Text
from jupyter_gpushare.wall_clock import clock_time

AWAY = re.compile(r"\b(reclaim|evict|OOM|pending|cull|preempt|None|nan|inf)", re.IGNORECASE)
CODE = re.compile(r"[a-z]+_[a-z]+|State\.|Why\.|<|>")


def said(function, *args, **more) -> str:
    return messages.english(function(*args, **more))


# An idle session of half a GPU, whose owner is warned; unless a test gives other values.
_OF_LEASE = {"used_bytes": 7 * 1000**3, "saved_bytes": 7 * 1000**3, "lend_now": False, "wanted": False}
_OF_RECORD = {
    "why": Why.IDLE,
    "note": "",
    "given_to": "",
    "lost": False,
    "suspend_reason": "",
    "slept_on": (),
}
_OF_LENDING = {"lend_in_s": 300.0, "warned": True}
_OF_VIEW = {
    "memory_limit_bytes": 40 * 1000**3,
    "wall": "2031-05-06T14:20:00.000Z",
    "device_name": "H100-80GB",
    "idle_s": 600.0,
    "lent_to": messages.text("part.job_of_project", "nlp"),
    "waits": (messages.text("waiting.owner_gone"),),
    **dict.fromkeys(("obstacle", "stays_because", "taken_back_by"), ""),
    **dict.fromkeys(("damaged", "has_lost", "borrowed", "unclaimed", "is_timed_out"), False),
    **dict.fromkeys(("retries_at", "kept_until", "stays_until", "usually_wakes")),
    **dict.fromkeys(("drain", "processor_only", "held_up_s", "back", "position", "site_end")),
    **dict.fromkeys(("progress", "over", "unleased"), ()),
    "time_share": TimeShare(),
    "companion": None,
    "consent": Consent.NONE,
}


def seen(state: State, kind: Kind = Kind.BUILD, *, waiting: int = 2, **more) -> LeaseView:
    of_lease, of_record, of_lending = (
        {name: more.pop(name, value) for name, value in given.items()}
        for given in (_OF_LEASE, _OF_RECORD, _OF_LENDING)
    )
    assert more.keys() <= _OF_VIEW.keys()
    since = datetime.now().astimezone().replace(hour=14, minute=20).astimezone(UTC)
    lease = Lease(id="b7", project="p", kind=kind, size=Size(500), state=state, **of_lease)
    view = object.__new__(LeaseView)
    # What is set is not computed.
    vars(view).update(
        _OF_VIEW | more,
        lease=lease,
        record=LeaseRecord(lease=lease, since_at=since.isoformat(), **of_record),
        lending=LendingOutlook(**of_lending),
        cluster=SimpleNamespace(waiting=waiting),
    )
    return view


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", Kind)
def test_every_state_is_said_in_plain_words(state, kind):
    for why, wanted, borrowed, suspendable, moves, idle, lend in itertools.product(
        ["", *Why], (True, False), (True, False), (True, False), (True, False), (None, 0.0, 1e6), (None, 0.0)
    ):
        case = seen(
            state,
            kind,
            why=why,
            wanted=wanted,
            borrowed=borrowed,
            obstacle="" if suspendable else "it uses CUDA IPC",
            stays_because="" if moves else "it was submitted not to move",
            slept_on=("GPU-1",) if moves else (),
            idle_s=idle,
            lend_in_s=lend,
        )
        text, shown = said(sentence, case), said(badge, case)
        assert text.strip().endswith((".", "!"))
        assert shown
        assert len(shown) <= 20
        assert not AWAY.search(text + shown), text
        assert not CODE.search(text + shown), text


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kept", [None, 0.0, 0.937, 1.2])
def test_jobs_that_share_are_said_in_plain_words(state, kept):
    companions = [None, *(Companion(role, "j1", kept, 0.2, 5.0) for role in ("host", "guest"))]
    for companion, consent, borrowed in itertools.product(companions, Consent, (True, False)):
        case = seen(state, Kind.TRAIN, companion=companion, consent=consent, borrowed=borrowed)
        text, shown = said(sentence, case), said(badge, case)
        assert text.endswith(".")
        assert len(shown) <= 20
        assert not AWAY.search(text + shown), text
        assert not CODE.search(text + shown), text
    if state is State.RUNNING and kept == 0.937:
        assert "another job; it keeps 94 % of its speed." in said(
            sentence, seen(state, Kind.TRAIN, companion=companions[1])
        )


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        (
            Why.HOST_MEMORY_WANTED,
            "because the job whose GPU it shared needed the memory. Nothing",
        ),
        (Why.HOST_LEFT, "because the job whose GPU it shared gave that up. Nothing was lost."),
        (Why.PAIR_PARTED, "because to share a GPU with that job did not pay. Nothing was lost."),
    ],
)
def test_a_guest_that_left_reads_why(why, expected):
    case = seen(State.SUSPENDED, Kind.TRAIN, why=why, consent=Consent.SHARE)
    assert messages.is_preemption(why)
    assert expected in said(sentence, case)
    assert said(sentence, case).endswith("It may share its GPU with another job.")


def test_a_warned_owner_reads_what_waits_when_and_what_becomes_of_the_memory():
    text = said(sentence, seen(State.RUNNING))
    for part in ("Idle for 10 min", "2 jobs are waiting", "In 5 min", "RAM", "Your variables stay"):
        assert part in text
    assert said(badge, seen(State.RUNNING)) == "Lent in 5 min"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.BUILD, "Waits for the GPU that it was on; it cannot move to another because "),
        (
            Kind.TRAIN,
            "Nothing was lost. It waits for the GPU that it was on; it cannot move to another because ",
        ),
    ],
)
def test_what_may_not_move_reads_that_it_waits_for_its_own_gpu(kind, expected):
    because = "its processes may not be able to open another GPU"
    case = seen(State.SUSPENDED, kind, wanted=True, stays_because=because, unclaimed=True)
    assert f"{expected}{because}." in said(sentence, case)
    assert said(badge, case) == ("Paused" if kind is Kind.TRAIN else "Waiting to wake")


def test_an_owner_keeps_the_gpu_while_no_job_waits():
    case = seen(State.RUNNING, waiting=0, lend_in_s=None, warned=False)
    assert said(sentence, case) == "Idle for 10 min. Nobody is waiting, so your GPU stays with you."
    assert said(badge, case) == "Idle 10 min"


def test_an_owner_that_keeps_or_lends_the_gpu_reads_it():
    alone = {"waiting": 0, "lend_in_s": None, "warned": False}
    kept = seen(State.RUNNING, kept_until="15:10", stays_until="15:10", **alone)
    assert said(sentence, kept) == "Idle for 10 min. Your GPU stays with you until 15:10."
    busy = seen(State.RUNNING, idle_s=None, kept_until="15:10", **alone)
    assert said(sentence, busy) == "Your 1/2 GPU is in use. You keep it until 15:10."
    assert "the next who needs a GPU gets yours" in said(
        sentence, seen(State.RUNNING, lend_now=True, **alone)
    )


def test_a_sleeping_session_says_since_when_to_which_job_and_how_to_wake():
    text = said(sentence, seen(State.SUSPENDED))
    assert "since 14:20" in text
    assert "training job of project nlp" in text
    assert "Run any GPU cell" in text
    assert "Your GPU is unused just now" in said(sentence, seen(State.SUSPENDED, lent_to=None))
    assert said(badge, seen(State.SUSPENDED)) == "Asleep, GPU lent"
    assert said(badge, seen(State.SUSPENDED, lent_to=None)) == "Asleep"
    assert "to wake it; your variables are safe." in text
    assert "to wake it, usually 8 s (5-12)." in said(
        sentence, seen(State.SUSPENDED, usually_wakes=messages.usually(5.1, 8.4, 12.4))
    )
    asleep = seen(State.SUSPENDED, back=Estimate(low_s=5, high_s=42))
    assert "to wake it, which takes 5 to 42 s; your variables are safe." in said(sentence, asleep)


def test_an_owner_that_waits_for_more_than_its_quota_is_promised_nothing():
    guest = seen(State.SUSPENDED, wanted=True, unclaimed=True)
    assert "guaranteed" not in said(sentence, guest)
    assert said(badge, guest) == "Waiting to wake"


def test_a_job_with_gpu_memory_that_cannot_return_yet_reads_when_it_asks_again():
    told = "The cluster chose another GPU; memory returns to its own. It asks again at 14:21."
    job = seen(State.SUSPENDED, Kind.TRAIN, retries_at="14:21", position=2)
    assert said(sentence, job).endswith(f"Number 2. {told}")


def test_an_idle_owner_reads_until_when_the_gpu_stays_in_any_case():
    early = seen(State.RUNNING, warned=False, stays_until="14:20")
    assert said(sentence, early) == "Idle for 10 min. Your GPU stays with you until 14:20."
    over = seen(State.RUNNING, warned=False, lend_in_s=None)
    assert said(sentence, over) == (
        "Idle for 10 min. 2 jobs are waiting: your GPU is lent as soon as that helps. Your variables stay."
    )
    assert said(badge, over) == "Idle 10 min"


def test_a_job_on_borrowed_capacity_says_which_project_may_take_it_back():
    borrowed = seen(State.RUNNING, Kind.TRAIN, borrowed=True, taken_back_by="nlp")
    assert said(sentence, borrowed).endswith("It may be paused when project nlp needs its own.")
    of_several = seen(State.RUNNING, Kind.TRAIN, borrowed=True)
    assert said(sentence, of_several).endswith("It may be paused when another project needs its own.")


def test_a_session_that_cannot_sleep_says_why():
    case = seen(State.RUNNING, obstacle="it uses CUDA IPC", warned=False)
    assert "it uses CUDA IPC" in said(sentence, case)
    assert said(badge, case) == "Held"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDING, State.SUSPENDED, State.RESUMING])
def test_a_process_that_may_be_damaged_is_not_called_safe(state, kind):
    text = said(sentence, seen(state, kind, damaged=True))
    assert "may be damaged: check" in text
    assert text.endswith("Reference b7-1.")
    assert not re.search("safe|Nothing was lost", text)
    assert "damaged" not in said(sentence, seen(state, kind, damaged=True, lost=True))


@pytest.mark.parametrize("why", Why)
def test_every_reason_to_wait_is_a_sentence(why):
    text = said(messages.waiting, why, needs="2 GPUs", free_milli=1250, position=3)
    assert text.endswith(".")
    assert not AWAY.search(text)
    assert not CODE.search(text)


def test_waiting_says_number_need_and_what_is_free():
    assert said(messages.waiting, Why.NO_CAPACITY, needs="2 GPUs", free_milli=1250, position=3) == (
        "Number 3. Needs 2 GPUs; 1.25 are free."
    )
    assert "starts in a moment" in said(messages.waiting, "", needs="2 GPUs", free_milli=2000, position=None)
    assert "1 is free" in said(
        messages.waiting, Why.NO_CAPACITY, needs="2 GPUs", free_milli=1000, position=None
    )


def test_what_can_never_run_has_no_number():
    text = said(messages.waiting, Why.TOO_LARGE, needs="8 GPUs together", free_milli=0, position=3, largest=4)
    assert text == "Cannot start: asks for 8 GPUs together; the largest machine has 4 GPUs."


@pytest.mark.parametrize("why", Why)
@pytest.mark.parametrize("action", ["grant", "suspend", "resume", "requeue"])
def test_every_decision_is_a_sentence(action, why):
    job = messages.text("decision.job", "bo", "train", "1 GPU")
    session = messages.text("decision.session", "ada", "1/2 GPU")
    text = said(messages.decision, action, why, job, Kind.TRAIN, session)
    assert "sleep" not in text
    assert text.startswith("bo's job train (1 GPU) ")
    assert "for ada's session (1/2 GPU): " in text
    assert text.endswith(".")
    assert not AWAY.search(text)
    assert not CODE.search(text)


def test_a_reader_reads_of_your_session_and_others_of_adas():
    session = messages.text("decision.session", "ada", "1/2 GPU")
    job = messages.text("decision.job", "ada", "train", "1 GPU")
    other = messages.text("decision.job", "bo", "train", "1 GPU")
    texts = (messages.text("notice.of", session, "is here"), messages.text("notice.of", job, "is late"))
    assert messages.english(messages.to_reader(texts, "ada")) == (
        "Your session (1/2 GPU) is here. Your job train (1 GPU) is late."
    )
    for_ada = messages.text("decision.for", job, messages.text("decision.paused"), session, "wanted")
    assert messages.english(messages.to_reader((for_ada,), "ada")).startswith(
        "Your job train (1 GPU) is paused for your session (1/2 GPU)"
    )
    for_bo = messages.text("decision.for", session, messages.text("decision.put_to_sleep"), other, "idle")
    assert messages.english(messages.to_reader((for_bo,), "bo")).startswith(
        "ada's session (1/2 GPU) is put to sleep for your job train (1 GPU)"
    )
    asked = messages.text("notice.admin_stop", session, "root")
    assert messages.english(messages.to_reader((asked,), "ada")) == (
        "root asked to stop your session (1/2 GPU)."
    )
    assert messages.to_reader(texts, "bo") == texts


@pytest.mark.parametrize(
    ("milli", "text"), [(250, "1/4"), (333, "1/3"), (500, "1/2"), (123, "0.123"), (1000, "1"), (1250, "1.25")]
)
def test_fractions_are_written_as_people_write_them(milli, text):
    assert fraction_text(milli) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (89, "89 s"), (360, "6 min"), (7200, "2 h"), (1e6, "278 h")],
)
def test_durations_have_one_unit(seconds, text):
    assert messages.duration(seconds) == text


@pytest.mark.parametrize(
    "size",
    [
        *(Size(500), Size(120), Size(1000), Size(1000, 2), Size(1000, profile="1g.10gb")),
        *(Size(memory_bytes=20 << 30), Size(memory_bytes=1 << 29)),
    ],
)
def test_a_size_reads_the_same_before_and_after_translation(size):
    assert said(messages.size_text, size) == size.text


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ((1200, 3000), "20 to 50 min"),
        ((0.4, 20), "at most 20 s"),
        ((0, 0), "at most 1 s"),
        ((40, 180), "40 s to 3 min"),
        ((290, 310), "about 5 min"),
        ((7200, 29_000), "2 to 8 h"),
        ((86_400, 900_000), "24 h to 10 days"),
        ((200_000, 900_000), "2 to 10 days"),
    ],
)
def test_an_estimate_is_told_as_a_range(seconds, says):
    assert said(messages.range_text, *seconds) == says


@pytest.mark.parametrize(
    ("left_s", "says"), [(0, "at most 2 min"), (90, "52 s to 6 min"), (3_600, "45 min to 3 h")]
)
def test_a_job_ends_in_a_range_around_what_its_progress_says_is_left(left_s, says):
    ends = messages.ends_in(left_s)
    assert said(messages.range_text, ends.low_s, ends.high_s) == says


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
    local = [datetime.fromisoformat(each).astimezone() for each in (moment, "2026-11-21T08:00")]
    assert clock_time(*(each.isoformat(timespec="minutes") for each in local)) == told


def test_a_time_is_an_argument_that_each_reader_writes_in_an_own_zone(india):
    since = messages.time_text("2031-05-06T14:20:07.123Z")
    assert since.args == ["2031-05-06T14:20Z"]
    until = messages.time_text("2031-05-06T14:20:07.123Z", seconds=True)
    assert until.args == ["2031-05-06T14:20:07Z"]
    told = messages.text("job.requeued", since, messages.text("because.idle"))
    assert messages.english(told, time=str) == (
        "Paused at 2031-05-06T14:20Z because it was idle and others wait."
    )
    assert messages.english(messages.time_text("")) == ""
    said = messages.local("Paused at 14:20.", [told])
    assert said == "Paused at 6 May 19:50 because it was idle and others wait."
    assert messages.english(until) == "6 May 19:50:07"
    newer = Text(key="job.requeued", args=[since, Text(key="because.newer")])
    assert messages.local("As sent.", [newer]) == messages.local("As sent.", []) == "As sent."


@pytest.mark.parametrize("key", [key for key in messages.TEMPLATES if key.startswith("session.")])
def test_an_administrator_reads_no_sentence_that_addresses_the_owner(key):
    template = messages.TEMPLATES[key]
    for each in [template] if isinstance(template, str) else template:
        told = messages.about(each, "ada")
        assert not re.search(r"\b(you|your|yours)\b", told, re.IGNORECASE), told


def test_another_reader_is_told_of_the_owner_by_name():
    idle = "Idle for 10 min. Your GPU stays with you until 14:20."
    assert messages.about(idle, "ada") == "Idle for 10 min. ada's GPU stays with ada until 14:20."
    assert messages.about("Your \\1 GPU", "a\\1{b}") == "a\\1{b}'s \\1 GPU"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"saved_bytes": 0},
            "Your GPU is lent to a training job of project nlp; it comes back with your first GPU cell.",
        ),
        (
            {"saved_bytes": 0, "lent_to": None},
            "Your GPU is unused just now. It comes back with your first GPU cell.",
        ),
        (
            {"saved_bytes": 0, "wanted": True},
            "Getting the GPU back from a training job of project nlp. Your cell runs after that.",
        ),
    ],
)
def test_nothing_is_called_safe_or_copied_where_nothing_is_held(more, told):
    assert said(sentence, seen(State.SUSPENDED, **more)) == told


def test_no_copy_of_nothing_is_told():
    nothing = {"saved_bytes": 0, "used_bytes": 0}
    assert said(sentence, seen(State.RESUMING, **nothing)) == (
        "Getting the GPU back. Your cell runs after that."
    )
    assert said(sentence, seen(State.SUSPENDING, **nothing)) == (
        "Your GPU is being lent. If you run a cell now, it waits and then runs."
    )


def test_no_variables_are_promised_to_a_session_that_holds_no_memory():
    assert said(sentence, seen(State.RUNNING, used_bytes=0)) == (
        "Idle for 10 min and 2 jobs are waiting. In 5 min your GPU is lent; "
        "it comes back with your next GPU cell."
    )


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(
    ("limit_bytes", "pid", "says"),
    [
        (40 << 30, 0, "It uses 41 GiB of GPU memory, more than the 40 GiB that it was given"),
        (40 << 30, 4711, "Its process 4711 (python) uses 3.0 GiB of GPU memory past the limit, and takes it"),
        (0, 4711, "Its process 4711 (python) uses 3.0 GiB of a GPU that is not its own, and takes it from"),
        (0, 0, "Ended processes of it keep 41 GiB of a GPU that it does not have now"),
    ],
)
def test_a_lease_that_uses_more_than_its_limit_says_so(kind, limit_bytes, pid, says):
    more = Overuse(
        device="GPU-2",
        used_bytes=41 << 30,
        limit_bytes=limit_bytes,
        pid=pid,
        name="python",
        process_bytes=3 << 30,
    )
    for idle_s, over in itertools.product((None, 600.0), ((), (more,))):
        case = seen(State.RUNNING, kind, idle_s=idle_s, over=over)
        assert (says in said(sentence, case)) is bool(over)


# ---- shares of compute time

_FAIR, _STRICT = ComputeShare.FAIR, ComputeShare.STRICT
_LEVEL = "It is kept between kernels: a kernel of 300 ms is never cut."


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (TimeShare(), ""),
        (TimeShare(_FAIR, 25.0), f"Share of the GPU's time: 25 % granted. {_LEVEL}"),
        (
            TimeShare(_FAIR, 25.0, 31.2),
            "Share of the GPU's time: 25 % granted, 31 % measured while others computed beside it in the "
            f"last minute. {_LEVEL}",
        ),
        (TimeShare(_STRICT, 33.3), f"Share of the GPU's time: at most 33.3 %. {_LEVEL}"),
        (
            TimeShare(_STRICT, 33.3, 0.0),
            "Share of the GPU's time: at most 33.3 %, 0 % measured while it computed in the last minute. "
            f"{_LEVEL}",
        ),
        (
            TimeShare(reason="its device has no library that could hold calls"),
            "Its share of the GPU's time is not in force: its device has no library that could hold calls.",
        ),
    ],
)
def test_a_share_of_time_is_said_as_granted_and_as_measured(found, expected):
    text = said(share, seen(State.RUNNING, time_share=found))
    assert text == expected
    assert not AWAY.search(text)
