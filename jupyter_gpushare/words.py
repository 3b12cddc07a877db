"""What people read: one table of sentences for JupyterLab, Hub pages, command line and log.

Every sentence says what is true now, what happens next and when, and what one
can do.  Never an estimate without a range.  Words kept away from users:
reclaim, evict, pending, cull.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_gpushare.core.model import WHOLE_GPU, Kind, Lease, State, Why

# As the vendors of GPUs count: an 80 GB H100 has 80 times 2**30 bytes.
_GB = 1 << 30
_NICE = {250: "1/4", 333: "1/3", 500: "1/2", 666: "2/3", 750: "3/4"}


def gigabytes(count: int) -> str:
    """``40 GB``; below ten with one digit."""
    value = count / _GB
    return f"{value:.1f} GB" if 0 < value < 9.95 else f"{value:.0f} GB"


def fraction(milli: int) -> str:
    """``1/2`` where people would write it so, else ``0.123``."""
    return _NICE.get(milli) or f"{milli / WHOLE_GPU:g}"


def size(fraction_milli: int, device_count: int, memory_bytes: int = 0, profile: str = "") -> str:
    """``1/2 GPU``, ``2 GPUs``, ``20 GB of a GPU``, ``MIG 1g.10gb``: what was asked for."""
    if profile:
        return f"MIG {profile}"
    if memory_bytes:
        return f"{gigabytes(memory_bytes)} of a GPU"
    if device_count > 1:
        return f"{device_count} GPUs"
    return f"{fraction(fraction_milli)} GPU"


# Who keeps the limit of a lease.
LEVELS: Mapping[str, str] = {
    "whole_gpu": "whole device",
    "mig": "the hardware (MIG)",
    "cgroup": "the driver",
    "preload": "a library in each process, and a watchdog",
    "hints": "nobody: frameworks are only asked",
}


def size_of(lease: Lease) -> str:
    """What a lease asks for (`size`)."""
    return size(lease.fraction_milli, lease.device_count, lease.memory_bytes, lease.profile)


def needs_of(lease: Lease) -> str:
    """What a job that waits needs: ``2 GPUs together``."""
    return f"{size_of(lease)}{' together' if lease.device_count > 1 else ''}"


def size_as_written(gpus: str, memory: str | None, profile: str | None) -> str:
    """``2 GPUs``, ``1/2 GPU``, ``20GiB of a GPU``, ``MIG 1g.10gb``: a size as its owner wrote it."""
    if profile:
        return f"MIG {profile}"
    if memory:
        return f"{memory} of a GPU"
    return f"{gpus} GPUs" if gpus.isdigit() and gpus != "1" else f"{gpus} GPU"


def duration(seconds: float) -> str:
    """``5 s``, ``6 min``, ``2 h``: one unit, rounded."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{round(seconds / 3600)} h"


# Note of a lease whose memory the driver could not bring back, and reason why a job starts again.
STATE_LOST = "state_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """What a sentence about a lease depends on."""

    kind: Kind
    state: State
    size: str
    device_name: str
    memory_limit_bytes: int
    memory_used_bytes: int
    memory_saved_bytes: int
    idle_s: float | None  # None: active
    lend_in_s: float | None  # None: nobody waits, or it cannot be lent
    warned: bool
    waiting: int  # how many wait for room
    why: str  # reason of the last decision (core `Why`)
    note: str
    borrowed: bool
    wanted: bool
    since: str  # local time of the state, HH:MM
    lent_to: str  # "a training job of project nlp"
    suspendable: bool
    suspend_reason: str
    kept_until: str = ""  # local time: its owner keeps it, idle or not
    unclaimed: bool = False  # asleep, beyond the quota of its project
    stays_until: str = ""  # local time: idle, but not lent before, whoever waits
    lend_now: bool = False  # its owner lends it to whoever comes
    usually_wakes: str = ""  # `usually`
    held_up_s: float | None = None  # its room is held by work that has been told to stop, for so long at most
    copy_s: float | None = None  # bringing its memory back takes about so long
    taken_back_by: str = ""  # "project nlp", whose room it borrows; empty: of several
    position: int | None = None  # in the queue
    goes_on: str = ""  # what a job does when it starts again (`GOES_ON`)
    reference: str = ""  # finds it in the logs


def badge(facts: LeaseFacts) -> str:
    """The two or three words of the status bar."""
    match facts.state:
        case State.RUNNING if facts.kind is Kind.TRAIN:
            return "Running, borrowed" if facts.borrowed else "Running"
        case State.RUNNING if facts.note == STATE_LOST:
            return "GPU state lost"
        case State.RUNNING if facts.idle_s is None:
            return "Active"
        case State.RUNNING if facts.warned and facts.lend_in_s is not None:
            return f"Lent in {duration(facts.lend_in_s)}"
        case State.RUNNING if not facts.suspendable:
            return "Held"
        case State.RUNNING:
            return f"Idle {duration(facts.idle_s or 0.0)}"
        case State.SUSPENDED if facts.kind is Kind.TRAIN:
            return "Paused"
        case State.SUSPENDED if facts.wanted:
            return "Waiting to wake" if facts.held_up_s is not None or facts.unclaimed else "Waking up"
        case State.SUSPENDED if not facts.lent_to:
            return "Asleep"
        case _:
            return _BADGES[facts.state]


_BADGES: Mapping[State, str] = {
    State.PENDING: "Queued",
    State.GRANTED: "Starting",
    State.RUNNING: "Running",
    State.SUSPENDING: "Going to sleep",
    State.SUSPENDED: "Asleep, GPU lent",
    State.RESUMING: "Waking up",
    State.STOPPING: "Stopping",
    State.RELEASED: "Ended",
    State.FAILED: "Failed",
}


def sentence(facts: LeaseFacts) -> str:
    """The sentence of the panel, for a session or for the job of a lease."""
    return _job_sentence(facts) if facts.kind is Kind.TRAIN else _session_sentence(facts)


def _session_sentence(facts: LeaseFacts) -> str:
    saved, used = gigabytes(facts.memory_saved_bytes), gigabytes(facts.memory_used_bytes)
    match facts.state:
        case State.PENDING | State.GRANTED:
            of = f" of an {facts.device_name}" if facts.device_name else ""
            return f"Getting your {facts.size} ({gigabytes(facts.memory_limit_bytes)}{of})."
        case State.RUNNING:
            return _awake_sentence(facts, used)
        case State.SUSPENDING:
            return f"Saving {used} of GPU memory. If you run a cell now, it waits and then runs."
        case State.SUSPENDED if facts.wanted:
            return _waking_sentence(facts, saved)
        case State.SUSPENDED:
            lent = (
                f"Your GPU is lent to {facts.lent_to}. "
                if facts.lent_to
                else "Nobody uses your GPU just now. "
            )
            usually = f", {facts.usually_wakes}" if facts.usually_wakes else "; your variables are safe"
            return f"Asleep since {facts.since}. {lent}Run any GPU cell to wake it{usually}."
        case State.RESUMING:
            return f"Copying {saved} back to the GPU{_about(facts.copy_s)}. Your cell runs after that."
        case State.STOPPING:
            return "The server has ended; its GPU memory is being freed."
        case State.FAILED:
            return f"The GPU was lost: {facts.note or 'see the log'}."
        case State.RELEASED:
            return "This server has ended and holds no GPU."


def _waking_sentence(facts: LeaseFacts, saved: str) -> str:
    if facts.unclaimed:
        return (
            "Your GPU was borrowed and others use it: it comes back when there is room, then your cell runs."
        )
    if facts.held_up_s is not None:
        return (
            f"Your GPU is guaranteed but busy for up to {duration(facts.held_up_s)} more: "
            "a job is saving its checkpoint."
        )
    whom = f" from {facts.lent_to}" if facts.lent_to else ""
    copying = f"then copying {saved}{_about(facts.copy_s)}"
    return f"Getting the GPU back{whom}, {copying}. Your cell runs after that."


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f" (about {duration(max(1.0, seconds))})"


def _awake_sentence(facts: LeaseFacts, used: str) -> str:
    if facts.note == STATE_LOST:
        why = f" ({facts.suspend_reason})" if facts.suspend_reason else ""
        return (
            f"Your GPU memory could not be brought back{why}, so the kernels that used it have to restart. "
            f"Files are safe. Reference {facts.reference}."
        )
    borrowed = " It is borrowed: it may sleep when its project needs it." if facts.borrowed else ""
    if facts.idle_s is None:
        kept = f" You keep it until {facts.kept_until}." if facts.kept_until else ""
        return f"Your {facts.size} is in use.{borrowed}{kept}"
    idle = f"Idle for {duration(facts.idle_s)}"
    if not facts.suspendable:
        return f"{idle}. This session cannot be put to sleep ({facts.suspend_reason}), so it keeps its GPU."
    waiting = "1 job is waiting" if facts.waiting == 1 else f"{facts.waiting} jobs are waiting"
    if facts.warned and facts.lend_in_s is not None:
        return (
            f"{idle} and {waiting}. In {duration(facts.lend_in_s)} your GPU memory ({used}) moves to this "
            "machine's RAM and the GPU is lent. Your variables stay."
        )
    if facts.stays_until:
        return f"{idle}. Your GPU stays with you until {facts.stays_until}."
    if facts.waiting:
        return f"{idle}. {waiting}: your GPU is lent as soon as that helps. Your variables stay."
    if facts.lend_now:
        return f"{idle}. Nobody is waiting; the next who needs a GPU gets yours. Your variables stay."
    return f"{idle}. Nobody is waiting, so your GPU stays with you."


def _job_sentence(facts: LeaseFacts) -> str:
    because = facts.note if facts.why in _BECAUSE and facts.note else because_of(facts.why)
    number = f" Number {facts.position}." if facts.position else ""
    match facts.state:
        case State.PENDING:
            return facts.note or f"Waits for {facts.size}."
        case State.GRANTED:
            return f"Starting on {facts.size}."
        case State.RUNNING if facts.borrowed:
            owner = facts.taken_back_by or "another project"
            return f"Running on {facts.size}, borrowed. It may be paused when {owner} needs its own."
        case State.RUNNING:
            return f"Running on {facts.size}."
        case State.SUSPENDING:
            return f"Pausing: {because}."
        case State.SUSPENDED:
            return f"Paused at {facts.since} because {because}. Nothing was lost.{number}"
        case State.RESUMING:
            return "Going on: its GPU memory is being copied back."
        case State.STOPPING:
            return f"Stopping{': ' + because if facts.why in _BECAUSE else ''}."
        case State.RELEASED | State.FAILED:
            return facts.note or "Ended."


# What a job does when it starts again, by how it survives a pause.
GOES_ON: Mapping[str, str] = {
    "sigterm": "It goes on from its own checkpoint.",
    "none": "It starts again from the beginning.",
}


def requeued(since: str, because: str, goes_on: str, waits: str) -> str:
    """Why a job that had run waits again."""
    return f"Paused at {since} because {because}. {goes_on or GOES_ON['none']} {waits}"


def because_of(why: str, project: str = "") -> str:
    """Why work had to give its room up, as a part of a sentence; ``project`` has it now."""
    if why == Why.OVER_QUOTA and project:
        return f"{project} took back its guaranteed GPU"
    return _BECAUSE.get(why, "its room is needed")


def gave_up_room(why: str) -> bool:
    """Return whether this is a reason for which work gives its room up."""
    return why in _BECAUSE


_BECAUSE: Mapping[str, str] = {
    Why.LENDER_RETURNED: "the owner of the GPU came back",
    Why.OVER_QUOTA: "another project took back its guaranteed GPU",
    Why.PRIORITY: "work of higher priority in its project came first",
    Why.ORDER: "a job of its project that has had less GPU time came first",
    Why.MOVED: "a larger job needs GPUs that lie together; it goes on elsewhere",
    Why.IDLE: "it was idle and others wait",
    Why.LEND_NOW: "its owner lent the GPU",
    STATE_LOST: "its GPU memory could not be brought back",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFacts:
    action: str  # "grant", "suspend", "resume", "requeue", ...
    why: str
    who: str  # "bo's job train (2 GPUs)", "ada's session (1/2 GPU)"
    kind: Kind
    for_whom: str = ""


def decision(facts: DecisionFacts) -> str:
    """One line of the decision log."""
    because = {
        Why.FREE_ROOM: "there is free room",
        Why.CLAIM: "it is guaranteed to its project",
        Why.ROOM_BACK: "there is room again",
        Why.WANTED: "its owner needs the GPU again",
        **_BECAUSE,
    }.get(facts.why, facts.why.replace("_", " "))
    job = facts.kind is Kind.TRAIN
    done = {
        "grant": "gets its room",
        "suspend": "is paused" if job else "is put to sleep",
        "resume": "goes on" if job else "is woken",
        "requeue": "is stopped and goes back to the queue",
    }.get(facts.action, facts.action)
    whom = f" for {facts.for_whom}" if facts.for_whom else ""
    return f"{facts.who} {done}{whom}: {because}."


def starts_in(low_s: float, likely_s: float, high_s: float) -> str:
    """A start that nobody can promise: ``Starts in about 25 min (10-50).``, one unit for all three."""
    size, unit = next(
        ((size, unit) for size, unit in ((1, "s"), (60, "min"), (3600, "h")) if likely_s < 90 * size),
        (86_400, "days"),
    )
    low, likely, high = (max(1, round(s / size)) for s in (low_s, likely_s, high_s))
    return f"Starts in about {likely} {unit} ({low}-{high})."


def usually(low_s: float, likely_s: float, high_s: float) -> str:
    """How long something took before: ``usually 8 s (5-12)``."""
    low, likely, high = (max(1, round(s)) for s in (low_s, likely_s, high_s))
    return f"usually {likely} s" + (f" ({low}-{high})" if low < high else "")


def waiting(
    why: str, *, needs: str, free_milli: int, position: int | None, largest: int | None = None
) -> str:
    """Why a job waits: ``Number 3. Needs 2 GPUs together; 1.25 are free.``

    ``largest`` is the number of GPUs of the largest machine.
    """
    number = f"Number {position}. " if position else ""
    free = f"{free_milli / WHOLE_GPU:g}"
    match why:
        case "":
            return f"Needs {needs}; there is room, so it starts in a moment."
        case Why.PROJECT_LIMIT:
            return f"{number}Its project is at its limit; it starts when other work of the project ends."
        case Why.QUOTA:
            return (
                f"{number}Needs {needs} of what its project is guaranteed, and that is taken; "
                "it was submitted not to borrow."
            )
        case Why.TOO_LARGE:
            has = "less" if largest is None else f"{largest} GPU{'' if largest == 1 else 's'}"
            return f"Cannot start: asks for {needs}; the largest machine has {has}."
        case Why.WAITS_FOR_ROOM:
            return f"{number}Needs {needs}; room is being made."
        case Why.HOST_MEMORY:
            return f"{number}Needs {needs}; there is not enough RAM to put more idle sessions to sleep."
        case Why.RESERVED:
            return f"{number}Needs {needs}; it has waited for long, so no job behind it gets that room."
        case Why.IN_LINE:
            return f"{number}Needs {needs}; the job before it starts first."
        case Why.NOT_WORTH_IT:
            return f"{number}Needs {needs}; pausing others for it would cost more than it gains."
        case Why.BACKING_OFF:
            return f"{number}Its last start failed; it is tried again in a moment."
        case Why.DEVICE_BROKEN:
            return f"{number}Needs {needs}; a GPU is out of order."
        case _:
            return f"{number}Needs {needs}; {free} {'is' if free == '1' else 'are'} free."
