"""Every message between processes, one schema: JSON in, JSON out.

Who speaks to whom (all HTTP below ``/services/gpushare/api/v1/``):

* people, their servers and the command line -> broker: `JobRequest`, `Status`, ...
* the Hub's spawner -> broker, with a token of its own: `SpawnRequest` ...
* the job runner and the server extension -> broker, with the token of their
  server: `JobReport`, `ActivityReport`; these are hints a user can forge.

`decode` refuses unknown fields, NaN, infinities and duplicate keys, and says
in one sentence what is wrong.  Moments for people are ISO 8601 in UTC
(``*_at``), durations are seconds (``*_s``).
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

import msgspec

from jupyter_gpushare.core.model import Kind, State, Survival
from jupyter_gpushare.errors import InvalidRequest

MAX_BODY_BYTES = 1 << 20
MAX_COMMAND_ARGS = 1_000
MAX_ENV = 200
# A job's command and environment travel in one environment variable: at most 128 KiB
# (MAX_ARG_STRLEN of execve(2)) with its name and the rest of the job.
MAX_JOB_BYTES = 120 << 10

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what comes in: unknown fields are errors."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what goes out: readers ignore fields they do not know."""


# ---- what is asked for -------------------------------------------------------


class GpuRequest(Message, frozen=True):
    """``user_options["gpushare"]``: exactly one of the four sizes."""

    fraction: str | None = None  # "0.5", "1/2"
    memory: str | None = None  # "20GiB", of one device
    gpus: int | None = None  # whole GPUs together; 0: none
    profile: str | None = None  # "1g.10gb": one MIG instance
    project: str | None = None


class JobSource(Message, frozen=True):
    """Where a job came from, for people and for submitting it again; the broker only keeps it."""

    path: str  # of the notebook or script, below the root of the user's files
    kernel: str = ""  # name of the environment (kernelspec)
    output: str = ""  # the notebook that is being written, below the same root
    arguments: str = ""  # of a script, as they were typed
    parameters: dict[str, str] = {}  # of a notebook, as they were typed


class JobRequest(Message, frozen=True):
    """Body of ``POST jobs``."""

    command: list[str]
    gpus: str = "1"  # "0.5", "1/2", "2"
    memory: str | None = None  # instead of a fraction: "20GiB"
    profile: str | None = None  # instead of a fraction: one MIG instance, "1g.10gb"
    project: str | None = None
    name: str | None = None
    checkpoint: Survival = Survival.SUSPEND  # how it outlives a pause
    borrow: bool = True  # false: it starts only on what its project is guaranteed
    cwd: str | None = None  # absolute; default: the home directory
    env: dict[str, str] = {}
    priority: int = 0  # -100 to 100, within the project
    retries: int = 0  # how often a failed attempt is tried again, 0 to 10
    grace_s: float | None = None  # between SIGTERM and SIGKILL
    source: JobSource | None = None
    notify: bool = True  # tell its owner in JupyterLab when it ends or is paused


class LaunchRequest(Message, frozen=True):
    """Body of the server's own ``POST gpushare/launch``: what the dialog of the page says.

    ``path`` names a notebook or script below the root of the server's files; without
    it ``command`` is run.
    """

    path: str = ""
    command: str = ""  # as in a shell: words and quotes, nothing else
    arguments: str = ""  # of a script, the same way
    parameters: dict[str, str] = {}  # of a notebook
    kernel: str = ""  # name of the environment; "": the notebook's, or that of the server
    cwd: str | None = None  # absolute; default: the folder of the file, or the root
    variables: list[str] = []  # "NAME=VALUE", or "NAME" with the server's own value
    gpus: str = "1"
    memory: str | None = None
    profile: str | None = None
    project: str | None = None
    name: str | None = None
    checkpoint: Survival = Survival.SUSPEND
    borrow: bool = True
    retries: int = 0
    priority: int = 0
    grace_s: float | None = None  # between SIGTERM and SIGKILL; None: the site's
    notify: bool = True


class KernelActivity(Message, frozen=True):
    id: str
    busy: bool
    idle_s: float  # since the last message of the kernel
    name: str = ""  # notebook path or kernel name, for people


class ActivityReport(Message, frozen=True):
    """From the server extension: a hint."""

    kernels: list[KernelActivity]
    terminals: int = 0


class JobReport(Message, frozen=True):
    """From the job runner: a hint about its own attempt.

    ``ended`` with the exit code (negative: the signal that ended it).
    """

    state: Literal["started", "ended", "progress"]
    exit_code: int | None = None
    reason: str = ""
    stopped: bool = False  # the runner was told to stop before the command ended by itself
    done: float | None = None  # progress, in units of the job's own
    total: float | None = None


class SpawnRequest(Message, frozen=True):
    """From the spawner: this server is about to start."""

    user: str
    server: str  # "" is the default server
    groups: list[str]
    uid: int  # the server will run as
    options: GpuRequest | None = None
    admin: bool = False


class SpawnStop(Message, frozen=True):
    """From the spawner: this server has ended, however."""

    user: str
    server: str


# ---- what is answered --------------------------------------------------------


class ErrorAnswer(Answer, frozen=True):
    """Every 4xx and 5xx: ``message`` is for the user and says what to change."""

    status: int
    reason: str  # a stable word: "no_room", "not_found", ...
    message: str


class JobSpec(Answer, frozen=True):
    """What the runner is to run; goes from broker to spawner to runner."""

    id: str
    attempt: int
    name: str
    command: list[str]
    cwd: str | None
    env: dict[str, str]
    grace_s: float


class SpawnGrant(Answer, frozen=True):
    """Answer to a `SpawnRequest`; ``lease`` is None for a server without GPU."""

    lease: str | None
    kind: Kind
    env: dict[str, str]  # complete values, but LD_PRELOAD, which is prepended
    devices: list[str] = []
    memory_limit_bytes: int = 0
    asleep: bool = False  # starts asleep: its room is lent, and comes with the first GPU cell
    borrowed: bool = False  # may be taken back (it then sleeps)
    message: str = ""  # for the progress page
    job: JobSpec | None = None


class Offer(Answer, frozen=True):
    """One size on the spawn page or for a job."""

    label: str  # "1/2 GPU"
    options: dict[str, str | int]  # what to send as user_options["gpushare"]
    memory_bytes: int  # all devices together
    starts: Literal["now", "soon", "no"]
    guaranteed: bool
    reason: str = ""  # why not, or why not guaranteed: a sentence
    device: str = ""  # "H100-80GB"


class ProjectUse(Answer, frozen=True):
    """GPUs of a project, in thousandths of a GPU, and the host memory that its sleepers take."""

    name: str
    quota_milli: int
    weight: int
    limit_milli: int | None
    in_use_milli: int
    borrowed_milli: int
    lent_milli: int  # claimed by sleeping sessions of this project and used by others
    fair_share_milli: int
    waiting: int  # queued jobs
    overridden: bool = False  # quota set through the API, not by the configuration
    saved_bytes: int = 0  # device memory of its sleeping sessions and jobs, parked in host memory


class JobOutlook(Answer, frozen=True):
    """What would become of a job that is submitted now."""

    starts: Literal["now", "soon", "no"]  # soon: room is being made
    position: int | None  # in the queue, where it would wait
    borrowed: bool  # it would start on room that may be taken back
    sentence: str


class Offers(Answer, frozen=True):
    project: str
    projects: list[str]  # the user's own
    offers: list[Offer]
    use: ProjectUse
    free_milli: int
    total_milli: int
    idle_timeout_s: float
    job: JobOutlook | None = None  # of a job of the size in the query


class ProcessUse(Answer, frozen=True):
    pid: int
    name: str
    kernel: str  # path of its notebook, or the kernel's name
    used_bytes: int
    kernel_id: str = ""


class LeaseStatus(Answer, frozen=True):
    id: str
    user: str
    server: str
    project: str
    kind: Kind
    state: State
    size: str  # "1/2 GPU"
    fraction_milli: int  # per device
    device_count: int
    devices: list[str]
    device_name: str
    memory_limit_bytes: int  # all devices
    memory_used_bytes: int
    memory_saved_bytes: int
    utilization_percent: int | None
    level: str  # enforcement in force: "preload", "whole_gpu", ...
    suspendable: bool
    borrowed: bool
    wanted: bool
    badge: str
    sentence: str
    idle_s: float | None  # None: active
    lend_in_s: float | None  # until it may be lent, where somebody waits
    since_at: str  # of this state
    job: str | None = None
    processes: list[ProcessUse] = []
    lost: bool = False  # its GPU memory could not be brought back; until who used it has ended


JobState = Literal[
    "queued", "starting", "running", "suspended", "stopping", "succeeded", "failed", "cancelled"
]


class StartEstimate(Answer, frozen=True):
    """In how many seconds a job gets room, from a replay of the work that is there."""

    low_s: float
    likely_s: float
    high_s: float


class Job(Answer, frozen=True):
    id: str
    name: str
    state: JobState
    exit_code: int | None
    attempt: int
    reason: str  # a sentence
    user: str
    project: str
    size: str
    command: list[str]
    checkpoint: Survival
    position: int | None
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    waited_s: float
    ran_s: float
    preemptions: int
    server: str | None  # of the current attempt
    log: str | None = None  # folder of its logs in the user's files, one per attempt
    done: float | None = None
    total: float | None = None
    cwd: str | None = None
    variables: list[str] = []  # names of the environment variables it was given
    gpus: str = "1"  # as it was asked for, like the next three
    memory: str | None = None
    profile: str | None = None
    retries: int = 0
    borrow: bool = True
    source: JobSource | None = None
    estimate: StartEstimate | None = None  # of a job that waits, once ended jobs tell how long jobs take
    notify: bool = True
    priority: int = 0
    grace_s: float | None = None  # None: the site's


class JobMoment(Answer, frozen=True):
    """One step in the life of a job."""

    at: str
    what: str  # "submitted", "grant", "started", "suspend", "resume", "requeue", "ended"
    sentence: str


class JobTimeline(Answer, frozen=True):
    moments: list[JobMoment]  # oldest first


class Environment(Answer, frozen=True):
    """A kernelspec, as an environment that jobs can run in."""

    name: str
    display_name: str
    language: str


class LaunchForm(Answer, frozen=True):
    """What the dialog begins with for a file: the server's own ``GET gpushare/launch``."""

    path: str
    kind: Literal["notebook", "script", "command"]
    cwd: str
    kernel: str
    environments: list[Environment]
    parameters: dict[str, str]  # names and defaults of the notebook's cell tagged "parameters"


class DayUse(Answer, frozen=True):
    """What one user took in one project on one day (UTC, of the end of each stretch)."""

    day: str  # "2031-05-06"
    project: str
    used_gpu_s: float  # held by sessions and jobs
    lent_gpu_s: float  # what others used of the room of sleeping sessions
    saved_gib_s: float = 0.0  # GiB-seconds of host memory that sleeping sessions and jobs took


class History(Answer, frozen=True):
    """The last seven days of a user."""

    days: list[DayUse]
    used_gpu_s: float
    lent_gpu_s: float
    helped_jobs: int  # jobs that sessions of the user were put to sleep for
    saved_gib_s: float = 0.0


class JobList(Answer, frozen=True):
    jobs: list[Job]


class Decision(Answer, frozen=True):
    seq: int
    at: str
    lease: str
    user: str
    project: str
    action: str
    why: str
    for_lease: str | None
    sentence: str


class Status(Answer, frozen=True):
    """Answer of ``GET status``: everything that is mine."""

    seq: int  # hand back as ?after= to wait for the next change
    at: str
    user: str
    admin: bool
    leases: list[LeaseStatus]
    jobs: list[Job]  # the newest 100
    projects: list[ProjectUse]
    events: list[Decision] = []  # the newest 20 that concern me
    devices_known: bool = True  # False: the device helper does not answer
    keep_left_minutes: float | None = None  # of today's budget for "Keep it"


class Rung(Answer, frozen=True):
    """One level of enforcement on one device."""

    level: str
    offered: bool  # its self-test passed there
    reason: str  # why not


class DeviceStatus(Answer, frozen=True):
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    utilization_percent: int
    healthy: bool
    reason: str
    level: str
    suspendable: bool
    suspend_reason: str
    held_milli: int
    claimed_milli: int
    ladder: list[Rung] = []  # all levels, strongest first; empty before the self-test


class Devices(Answer, frozen=True):
    devices: list[DeviceStatus]
    driver: str
    simulated: bool
    host_budget_bytes: int
    host_saved_bytes: int
    # About memory beyond a limit and processes without a lease: tell, also stop them, or do not look.
    watchdog: Literal["warn", "stop", "off"] = "warn"


class Leases(Answer, frozen=True):
    leases: list[LeaseStatus]


class Projects(Answer, frozen=True):
    projects: list[ProjectUse]


class ProjectChange(Message, frozen=True):
    """Body of ``PUT projects/{name}``: what is given replaces the configured value."""

    quota: float | None = None  # GPUs
    weight: int | None = None
    limit: float | None = None


class KeepRequest(Message, frozen=True):
    """Body of ``POST leases/{id}/keep``."""

    minutes: float = 30


class Decisions(Answer, frozen=True):
    decisions: list[Decision]


class Health(Answer, frozen=True):
    status: Literal["ok", "degraded"]
    version: str
    epoch: int
    reasons: list[str]  # what is wrong, a sentence each


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequest(f"the key {key[:40]!r} occurs twice")
        found[key] = value
    return found


def _no_constant(text: str) -> Any:
    raise InvalidRequest(f"{text} is not a number in JSON")


def decode(body: bytes, kind: type[T]) -> T:
    """Return the message in a request's body.

    Raises:
        InvalidRequest: too long, not JSON, or not of this shape.
    """
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequest(f"the body has {len(body)} bytes; at most {MAX_BODY_BYTES} are read")
    try:
        plain = json.loads(body, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"not a valid {kind.__name__}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def encode(message: Any) -> bytes:
    """Return the JSON of a message (NaN cannot occur in one)."""
    return msgspec.json.encode(message)
