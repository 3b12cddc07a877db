"""Messages about leases, projects and devices, and reports of activity."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from jupyter_gpushare.core.model import Kind, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import GpuShareError, InvalidRequest
from jupyter_gpushare.protocol.wire.codec import Answer, Message, Text
from jupyter_gpushare.protocol.wire.jobs import Estimate, Job


class KernelActivity(Message, frozen=True, omit_defaults=True):
    """One kernel of a server, as its messages show it."""

    id: str
    busy: bool  # it runs a cell
    idle_s: Annotated[float, msgspec.Meta(le=1e9)]  # since its last cell ended, or its server began
    name: str = ""  # notebook path or kernel name, for people
    runs: Annotated[int, msgspec.Meta(ge=0)] = 0  # cells that it began, as far as its server counts
    handles_request: bool = False  # for a second or longer, a cell or another one: it may wait for the GPU
    # Seconds until its server's settings may end it if it stays idle; None: they do not.
    ends_in_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] | None = None


class KernelEnd(Message, frozen=True):
    """How the process of a kernel ended."""

    id: str
    how: Literal["idle", "died", "shut_down", "restarted"]  # idle: by a setting of its server
    ago_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # when the report was sent
    name: str = ""  # as in `KernelActivity`
    code: Annotated[int, msgspec.Meta(ge=-255, le=1 << 32)] | None = (
        None  # exit code of a process that died, or the negative number of a signal
    )


class ActivityReport(Message, frozen=True, omit_defaults=True):
    """Kernel and terminal activity, from the server extension; users can forge it."""

    kernels: Annotated[list[KernelActivity], msgspec.Meta(max_length=1_000)]
    terminals: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    ended: Annotated[list[KernelEnd], msgspec.Meta(max_length=100)] = []  # since the last report


class KeepRequest(Message, frozen=True):
    """Body of ``POST leases/{id}/keep``."""

    minutes: float = 30  # from now on; 0: not any more


class SizeRequest(Message, frozen=True):
    """Body of ``PUT leases/{id}/size``: one of the two sizes, on the device of the session if it has one."""

    gpus: str | None = None  # "0.5", "1/4", "1"
    memory: str | None = None  # "20GiB"
    borrow: bool = False  # also a size beyond what its project is guaranteed: it may sleep then
    project: str | None = None  # of a server without a GPU; None: the first of its user

    def size(self) -> Size:
        """Return the requested size.

        Raises:
            InvalidRequest: none or both are given, or the size cannot be parsed.
        """
        if (self.gpus is None) == (self.memory is None):
            raise InvalidRequest('ask for either "gpus" or "memory"')
        return Size.of_gpus(self.gpus or "") if self.memory is None else Size.of_memory(self.memory)


NO_SUCH_PATH = "no_such_path"  # a reason: the caller has a wrong address, or another version


class ErrorAnswer(Answer, frozen=True):
    """Every 4xx and 5xx: ``message`` is for the user and says what to change."""

    status: int
    reason: str  # stable identifier: "no_capacity", "not_found", ...
    message: str
    message_texts: list[Text] = []  # ``message`` for translation; its key is the English template

    @classmethod
    def of(cls, error: GpuShareError, status: int, reason: str) -> ErrorAnswer:
        """Return the answer for ``error``."""
        text = Text(key=error.template, args=list(error.values))
        return cls(status=status, reason=reason, message=str(error), message_texts=[text])

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the template and the values of the error, to raise it again, else only the message."""
        if len(self.message_texts) == 1:
            (text,) = self.message_texts
            return text.key, *(value for value in text.args if isinstance(value, str))
        return (self.message,)


class ProjectUse(Answer, frozen=True):
    """Usage of a project in thousandths of a GPU, and the host memory of its suspended leases."""

    name: str
    quota_milli: int
    weight: int
    limit_milli: int | None
    in_use_milli: int
    borrowed_milli: int
    lent_milli: int  # claimed by suspended sessions of this project and used by other leases
    fair_share_milli: int
    waiting: int  # queued jobs
    overridden: bool = False  # quota set through the API instead of the configuration
    saved_bytes: int = 0  # GPU memory of its suspended sessions and jobs, in host memory
    priority_max: int = 0  # the highest that members may give to their jobs


class LendingChange(Message, frozen=True):
    """Body of ``PUT lending``: the mode from now on; null: as configured."""

    mode: Literal["on", "watch", "off"] | None


class Lending(Answer, frozen=True):
    """Whether GPUs of idle sessions are lent, and the outcomes of suspensions on this machine."""

    mode: Literal["on", "watch", "off"]  # in force
    configured: Literal["on", "watch", "off"]
    set_by: str  # the administrator that changed it; empty: as configured
    set_at: str  # when
    tried: int  # suspensions that were requested of the driver
    failed: int  # of these: those that failed; the processes continued
    lost: int  # suspended leases that could not be resumed
    last_reason: str = ""  # of the last failure or loss
    last_at: str = ""


class ProjectChange(Message, frozen=True):
    """Body of ``PUT projects/{name}``: given fields replace the configured values until ``DELETE``."""

    quota: float | None = None  # GPUs
    weight: int | None = None
    limit: float | None = None
    priority_max: int | None = None  # the highest that members may give to their jobs
    force: bool = False  # accept guarantees of more GPUs than the machine has


class ProcessUse(Answer, frozen=True):
    """Device memory of one process of a lease."""

    pid: int
    name: str
    kernel: str  # path of its notebook, or the kernel's name
    used_bytes: int
    kernel_id: str = ""
    keeps: bool = False  # the memory of a process that forked it and has ended


class LeaseStatus(Answer, frozen=True):
    """A session or job with its GPU, as its owner sees it."""

    id: str
    user: str
    server: str
    project: str
    kind: Kind
    state: State
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
    idle_s: float | None  # None: active
    lend_in_s: float | None  # until it may be lent; None: no waiting work, or it cannot be lent
    since_at: str  # of this state
    back_in: Estimate | None = None  # of a suspended session that is used; None: not known
    job: str | None = None
    processes: list[ProcessUse] = []
    lost: bool = False  # its GPU memory could not be restored; until the affected processes have ended
    keep_until: str | None = None  # kept by its owner until then, idle or not
    keep_left_minutes: float | None = None  # of today's budget for "Keep it" there; None: a job
    resizable: bool = False  # it may become larger or smaller on its device while it runs
    warned: bool = False  # the GPU may be lent in ``lend_in_s``, and its owner is notified
    saved_lost: bool = False  # saved memory of it was lost since it fell asleep last
    compute_share: Literal["off", "fair", "strict"] = "off"  # how its devices' time is shared, in force now
    share_percent: float | None = None  # of the time of each of its devices, as granted; None: off
    measured_share_percent: float | None = None  # in the last minute while others computed too; None: never
    shared: Literal["", "host", "guest"] = ""  # a job that runs on one GPU with another job
    shared_with: str = ""  # id of that job; empty: the reader may not see it
    # A host's speed beside its guest, or a guest's, in percent of its speed alone; None: not known.
    kept_speed_percent: float | None = None
    # When a setting of the site may end a session, or a kernel of it; None: none does, or it is not known.
    ends_at: str | None = None
    ends_by: str = ""  # that setting, or the service of the Hub that has it
    size: str = ""  # "1/2 GPU"
    size_texts: list[Text] = []  # ``size`` for translation
    badge: str = ""
    badge_texts: list[Text] = []  # ``badge`` for translation
    sentence: str = ""
    sentence_texts: list[Text] = []  # ``sentence`` for translation
    share: str = ""  # its share of time as a sentence, or why the requested share is not in force
    share_texts: list[Text] = []  # ``share`` for translation


class SizedLease(LeaseStatus, frozen=True):
    """Answer to ``PUT leases/{id}/size``: the session with its new size."""

    env: dict[str, str] = {}  # for a server that requested its first GPU: as in `SpawnGrant`
    restart: list[str] = []  # from a Jupyter server: kernels that need a restart to see its first GPU

    @classmethod
    def of(cls, lease: LeaseStatus, env: dict[str, str]) -> SizedLease:
        """Return ``lease`` as an answer with ``env``."""
        return cls(**msgspec.structs.asdict(lease), env=env)


class Decision(Answer, frozen=True):
    """One line of the decision log."""

    seq: int
    at: str
    lease: str
    user: str
    project: str
    action: str
    why: str
    for_lease: str | None
    sentence: str = ""
    sentence_texts: list[Text] = []  # ``sentence`` for translation


class WaitingSession(Answer, frozen=True):
    """A session that waits on the spawn page for its start."""

    user: str
    server: str
    project: str
    size: str
    position: int  # among the sessions that wait, 1 is next
    sentence: str = ""
    sentence_texts: list[Text] = []


class Status(Answer, frozen=True):
    """Answer of ``GET status``: leases, jobs, projects and events of the user."""

    seq: int  # send as ?after= to wait for the next change
    at: str
    user: str
    admin: bool
    leases: list[LeaseStatus]
    jobs: list[Job]  # the newest 100
    projects: list[ProjectUse]
    events: list[Decision] = []  # the newest 20 about the user's leases
    devices_known: bool = True  # False: the device helper does not answer
    keep_left_minutes: float | None = None  # of the site's budget today for "Keep it"
    waiting: list[WaitingSession] = []  # sessions of the user that wait for their start

    def lease_of(self, server: str) -> LeaseStatus | None:
        """Return the lease of the user's server of this name; None if it has no GPU."""
        return next((lease for lease in self.leases if lease.server == server), None)


class Rung(Answer, frozen=True):
    """One level of enforcement on one device."""

    level: str
    offered: bool  # its self-test passed there
    reason: str  # why not
    by: str = ""  # for a whole GPU: the means that keeps other users from opening its device file


class DrainRequest(Message, frozen=True):
    """Body of ``PUT devices/{name}/drain``."""

    until: str | None = None  # ISO 8601 with a zone: owners of sessions are asked to finish by then


class Drain(Answer, frozen=True):
    """The draining of a device by an administrator: it takes nothing new."""

    by: str
    at: str
    until: str  # owners of sessions are asked to finish by then; empty: no time is named
    machine: bool  # all devices are being emptied, not this one alone
    sessions: int  # that are still there, asleep or not
    jobs: int


class UnleasedProcess(Answer, frozen=True):
    """A process without a lease that uses a device."""

    process: str  # its id in ``DELETE devices/{name}/processes/{process}``
    pid: int
    uid: int
    name: str  # chosen by the process
    used_bytes: int  # on this device; 0 if the driver does not show it
    kept: str  # why it is left alone; empty: it may be ended
    ending: bool  # it was requested to end


class DeviceStatus(Answer, frozen=True):
    """One device with its leases and its health."""

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
    drain: Drain | None = None  # None: it takes work
    unleased: list[UnleasedProcess] = []  # for administrators: processes without a lease, 16 at most
    movable: bool = False  # suspended leases can resume on another device of its machine and model
    move_reason: str = ""  # why not
    closed: str = ""  # why it takes nothing new although it works: memory is used that was not granted


class Devices(Answer, frozen=True):
    """Answer to ``GET devices``."""

    devices: list[DeviceStatus]
    driver: str
    simulated: bool
    host_budget_bytes: int
    host_saved_bytes: int
    # Action on processes beyond their limit or without a lease: report, stop, or none.
    watchdog: Literal["warn", "stop", "off"] = "warn"
    guaranteed_milli: int = 0  # quotas of all projects together, in thousandths of a GPU
    left_out: list[str] = []  # a sentence for each device that cannot be leased


class Leases(Answer, frozen=True):
    """Answer to ``GET leases``."""

    leases: list[LeaseStatus]
    waiting: list[WaitingSession] = []  # the next to start first


class Projects(Answer, frozen=True):
    """Answer to ``GET projects``."""

    projects: list[ProjectUse]


class Decisions(Answer, frozen=True):
    """Answer to ``GET decisions``: the newest first."""

    decisions: list[Decision]


class DayUse(Answer, frozen=True):
    """Usage of one user in one project on one day (UTC, by the end of each interval)."""

    day: str  # "2031-05-06"
    project: str
    used_gpu_s: float  # held by sessions and jobs
    lent_gpu_s: float  # used by other leases on GPUs of suspended sessions
    saved_gib_s: float = 0.0  # GiB-seconds of host memory of suspended sessions and jobs


class History(Answer, frozen=True):
    """Usage of the last seven days of a user."""

    days: list[DayUse]
    used_gpu_s: float
    lent_gpu_s: float
    helped_jobs: int  # jobs that sessions of the user were suspended for
    saved_gib_s: float = 0.0


class UsageRow(Answer, frozen=True):
    """GPU-hours of one group; a column that the rows are not grouped by is None."""

    held_gpu_h: float  # held by sessions and jobs that run
    computing_gpu_h: float  # of it seen to use the GPU
    borrowed_gpu_h: float  # of it over the guarantee of the project
    lent_gpu_h: float  # used by other leases on GPUs of suspended sessions
    user: str | None = None
    project: str | None = None
    gpu: str | None = None  # model of the GPUs; empty: not known
    day: str | None = None  # UTC, "2031-05-06"
    month: str | None = None  # "2031-05"


class Usage(Answer, frozen=True):
    """Answer to ``GET usage``: GPU-hours for chargeback."""

    since: str  # first day, UTC
    until: str  # last day
    by: list[str]  # of user, project, gpu, day, month
    rows: list[UsageRow]
    total: UsageRow
    kept_days: int  # use of earlier days is deleted


class TraceRow(Answer, frozen=True):
    """An ended job, or one stretch of work of a session between two pauses."""

    session: str  # rows of one session have one name; of a job empty
    user: str  # "u1", "u2", ... unless names are asked for
    project: str  # likewise
    num_gpu: int  # whole GPUs, for the simulator; a part counts as one
    gpus: float
    submit_s: float  # after the first row
    duration_s: float  # run time without pauses


class Trace(Answer, frozen=True):
    """Answer to ``GET trace/{kind}``: what ran here, for ``gpushare simulate``."""

    rows: list[TraceRow]  # by time; of sessions, session by session, the last to begin first
    left_out: int  # jobs that never ran
    since: str  # wall clock of the first row; empty: there is none


class Owner(Answer, frozen=True):
    """An owner of leases that is absent from the Hub, or was created again."""

    name: str
    user: str  # as in `Job.user`: the name, or with the moment at which the Hub made the user
    created: str  # that moment; empty: not known
    jobs: int  # that wait
    others: int  # sessions, and jobs that do not wait
    held: bool  # the jobs wait until an administrator adopts or ends them; else they fail at the next check


class Owners(Answer, frozen=True):
    """Answer to ``GET owners``."""

    owners: list[Owner]


class Adoption(Message, frozen=True):
    """Body of ``PUT owners/{name}``: the user that gets the jobs; null: the current user of that name."""

    to: str | None = None


class Health(Answer, frozen=True):
    """Answer to ``GET health``: whether the broker can decide and act."""

    status: Literal["ok", "degraded"]
    version: str
    epoch: int
    reasons: list[str]  # one sentence per fault
    # A parent holds the broker's sockets open while it restarts; else its port is free for that time.
    sockets_inherited: bool = True
    sample_age_s: float | None = None  # age of the last measurement of the GPUs; None: there is none
    held_jobs: int = 0  # of owners that are absent from the Hub: an administrator adopts or ends them
