"""Messages about training jobs: submission, state, timeline, and the dialog that submits them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from jupyter_gpushare.core.model import CheckpointMode
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol.wire.codec import Answer, Message, Text

# Names of servers that run jobs: ``j`` and 10 characters of the job's id, ``-``, and the attempt.
JOB_SERVER_NAME = re.compile(r"j[a-z0-9]{10}-[0-9]+")
MAX_COMMAND_ARGS = 1_000
MAX_ENV = 200
# A job's command and environment travel in one environment variable: at most 128 KiB
# (MAX_ARG_STRLEN of execve(2)) with its name and the rest of the job.
MAX_JOB_BYTES = 120 << 10
# In the unit of the job.
MAX_PROGRESS = 1e15
Progress = Annotated[float, msgspec.Meta(ge=0, le=MAX_PROGRESS)]


class JobSource(Message, frozen=True):
    """Origin of a job, for display and for duplicates; the broker stores it without reading it."""

    path: str  # of the notebook or script, below the root of the user's files
    kernel: str = ""  # name of the environment (kernelspec)
    output: str = ""  # the notebook that is being written, below the same root
    arguments: str = ""  # of a script, as they were typed
    parameters: dict[str, str] = {}  # of a notebook, as they were typed


class JobTerms(Answer, frozen=True):
    """The terms of a job; a stored `JobRequest` can be read as this, without its large fields."""

    gpus: str = "1"  # "0.5", "1/2", "2"
    memory: str | None = None  # instead of a fraction: "20GiB"
    profile: str | None = None  # instead of a fraction: one MIG instance, "1g.10gb"
    checkpoint: CheckpointMode = CheckpointMode.SUSPEND  # how it survives preemption
    borrow: bool = True  # false: runs only within its project's quota
    move: bool = True  # false: once suspended it resumes only on the GPUs that it had
    share: bool = False  # it may run on one GPU with another job, as host or guest, if the site allows it
    priority: int = 0  # -100 to 100, within the project; above 0 as far as its ``priority_max`` allows
    retries: int = 0  # attempts after a failure, 0 to 10
    grace_s: float | None = None  # between SIGTERM and SIGKILL; None: the site's
    max_run_s: float | None = None  # maximum run time without pauses; then it is stopped; None: no maximum
    notify: bool = True  # notify its owner in JupyterLab when it ends or is paused
    notify_url: str = ""  # its runner posts starts, stops and ends there (docs/jobs.md)
    notify_mail: bool = False  # mail its owner as well, where the site sends mail

    @property
    def terms(self) -> dict[str, Any]:
        """Return the values of these fields, for another message about the job."""
        return {name: getattr(self, name) for name in JobTerms.__struct_fields__}

    def requested_size(self) -> Size:
        """Return the requested size.

        Raises:
            InvalidRequest: several sizes are given, or one cannot be parsed.
        """
        if self.profile is not None:
            # CUDA uses one MIG instance per process, even if several are named.
            if self.memory is not None or self.gpus != "1":
                raise InvalidRequest(
                    "a MIG profile asks for one instance: give neither gpus nor memory with it"
                )
            return Size.of_profile(self.profile)
        return Size.of_gpus(self.gpus) if self.memory is None else Size.of_memory(self.memory)


# The terms that ``GET offers`` takes as parameters, to ask about a job before it is submitted.
REQUESTED_TERMS = ("gpus", "memory", "profile", "borrow", "share")


def requested_terms(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the `REQUESTED_TERMS` in the parameters of a request: texts, and ``0`` or ``1`` for booleans."""
    defaults, given = JobTerms(), dict[str, Any]()
    for name in REQUESTED_TERMS:
        text, default = parameters.get(name, ""), getattr(defaults, name)
        if isinstance(default, bool):
            given[name] = text != "0" if default else text == "1"
        elif text:
            given[name] = text
    return given


class JobRequest(JobTerms, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST jobs``."""

    command: list[str]
    project: str | None = None
    name: str | None = None
    cwd: str | None = None  # absolute; default: the home directory
    env: dict[str, str] = {}
    source: JobSource | None = None


class JobChange(Message, frozen=True):
    """Body of ``PUT jobs/{id}``: given fields replace those of a job in the queue."""

    gpus: str | None = None  # one of these three replaces the size
    memory: str | None = None
    profile: str | None = None
    project: str | None = None
    priority: int | None = None
    max_run_s: float | None = None  # 0: no maximum

    def of(self, request: JobRequest) -> JobRequest:
        """Return the request with this change, unchecked."""
        if self.gpus is not None or self.memory is not None or self.profile is not None:
            gpus = "1" if self.gpus is None else self.gpus
            request = msgspec.structs.replace(request, gpus=gpus, memory=self.memory, profile=self.profile)
        if self.max_run_s is not None:
            request = msgspec.structs.replace(request, max_run_s=self.max_run_s or None)
        return msgspec.structs.replace(
            request,
            project=request.project if self.project is None else self.project,
            priority=request.priority if self.priority is None else self.priority,
        )


class JobPlace(Message, frozen=True):
    """Body of ``PUT jobs/{id}/place``: another job of the same user, project and priority in the queue.

    The job comes directly before or behind it among these jobs; give one of the two.
    """

    before: str | None = None
    behind: str | None = None


class LaunchRequest(JobTerms, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of the Jupyter server's ``POST gpushare/launch``: the fields of the launch dialog.

    ``path`` names a notebook or script below the root of the server's files; without
    it ``command`` is run.
    """

    path: str = ""
    command: str = ""  # shell words and quotes, no other syntax
    arguments: str = ""  # of a script, in the same syntax
    parameters: dict[str, str] = {}  # of a notebook
    kernel: str = ""  # name of the environment; "": the notebook's, or that of the server
    cwd: str | None = None  # absolute; default: the folder of the file, or the root
    variables: list[str] = []  # "NAME=VALUE", or "NAME" with the server's own value
    project: str | None = None
    name: str | None = None
    at: str = ""  # when it was first sent (ISO 8601), for the name of a notebook's output; "": now


class JobReport(Message, frozen=True):
    """From the job runner: a hint about its own attempt.

    ``ended`` with the exit code (negative: the signal that ended it); ``progress`` without ``done``
    withdraws what the attempt reported before.
    """

    state: Literal["started", "stopping", "ended", "progress"]  # stopping: it was requested to stop
    exit_code: int | None = None
    reason: str = ""
    stopped: bool = False  # the runner was requested to stop before the command ended by itself
    done: Progress | None = None  # progress, in the job's own unit
    total: Progress | None = None


JobState = Literal[
    "queued", "starting", "running", "suspended", "stopping", "succeeded", "failed", "cancelled", "timed_out"
]


class JobOutcome(Answer, frozen=True):
    """Answer to a runner's ``stopping`` and ``ended``: the state of the job after the attempt."""

    state: JobState  # queued: another attempt follows
    reason: str  # a sentence


class JobSpec(Answer, frozen=True):
    """Command and environment of one attempt, from the broker through the spawner to the runner."""

    id: str
    attempt: int
    name: str
    command: list[str]
    cwd: str | None
    env: dict[str, str]
    grace_s: float
    notify_url: str = ""  # called by the runner, as its user
    settled: int = 0  # newest attempt whose outcome the broker knows; a later one may have run unseen


class Estimate(Answer, frozen=True):
    """Seconds until something happens: in about 80 % of the cases within this range."""

    low_s: float
    high_s: float


class Job(JobTerms, frozen=True, kw_only=True):
    """A job as its owner sees it."""

    id: str
    name: str
    state: JobState
    exit_code: int | None
    attempt: int
    user: str
    project: str
    command: list[str]
    checkpoint: CheckpointMode
    source: JobSource | None = None
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
    left_s: float | None = None  # remaining run time by its progress; None: not known
    ends_in: Estimate | None = None  # of a running job, pauses included; None: its progress is not measured
    shared: Literal["", "host", "guest"] = ""  # it runs on one GPU with another job
    shared_with: str = ""  # as in `LeaseStatus`, like the next
    kept_speed_percent: float | None = None
    size: str = ""
    size_texts: list[Text] = []  # ``size`` for translation
    reason: str = ""  # a sentence
    reason_texts: list[Text] = []  # ``reason`` for translation


class JobList(Answer, frozen=True):
    """Answer to ``GET jobs``: started, requeued, queued (the next to start first), ended."""

    jobs: list[Job]


class JobMoment(Answer, frozen=True):
    """One event in the timeline of a job."""

    at: str
    what: str  # "submitted", "grant", "started", "progress", "suspend", "resume", "requeue", "ended"
    sentence: str = ""
    sentence_texts: list[Text] = []  # ``sentence`` for translation


class JobTimeline(Answer, frozen=True):
    """Answer to ``GET jobs/{id}/timeline``: what happened to a job, oldest first."""

    moments: list[JobMoment]  # oldest first


class JobOutlook(Answer, frozen=True):
    """Outcome of a job that would be submitted now."""

    starts: Literal["now", "soon", "no"]  # soon: other work is being preempted for it
    position: int | None  # in the queue
    borrowed: bool  # it would run over its project's quota and may be preempted
    sentence: str = ""
    sentence_texts: list[Text] = []  # ``sentence`` for translation


class Environment(Answer, frozen=True):
    """A kernelspec as an environment for jobs."""

    name: str
    display_name: str
    language: str


class LaunchForm(Answer, frozen=True):
    """Defaults of the launch dialog for a file: answer of the Jupyter server's ``GET gpushare/launch``."""

    path: str
    kind: Literal["notebook", "script", "command"]
    cwd: str
    kernel: str
    environments: list[Environment]
    parameters: dict[str, str]  # names and defaults of the notebook's cell tagged "parameters"
