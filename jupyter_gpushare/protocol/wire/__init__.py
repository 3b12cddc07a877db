"""The schema of all messages between processes, in JSON.

Clients of the broker (HTTP below ``/services/gpushare/api/v1/``):

* users, their servers and the command line: `JobRequest`, `Status`, ...
* the Hub's spawner, with its own token: `SpawnRequest`, ...
* the job runner and the server extension, with the token of their server:
  `JobReport`, `ActivityReport`; users can forge both, so they are hints only.

`decode` refuses unknown fields, NaN, infinities and duplicate keys; the error names
the fault in one sentence.  Times are ISO 8601 in UTC (``*_at``), durations are
seconds (``*_s``).
"""

from jupyter_gpushare.protocol.wire.codec import (
    MAX_BODY_BYTES,
    Answer,
    Message,
    Text,
    decode,
    decode_answer,
    decode_stored,
    digest,
    encode,
    encode_ascii,
    indented,
    replace,
)
from jupyter_gpushare.protocol.wire.jobs import (
    JOB_SERVER_NAME,
    MAX_COMMAND_ARGS,
    MAX_ENV,
    MAX_JOB_BYTES,
    MAX_PROGRESS,
    REQUESTED_TERMS,
    Environment,
    Estimate,
    Job,
    JobChange,
    JobList,
    JobMoment,
    JobOutcome,
    JobOutlook,
    JobPlace,
    JobReport,
    JobRequest,
    JobSource,
    JobSpec,
    JobState,
    JobTerms,
    JobTimeline,
    LaunchForm,
    LaunchRequest,
    requested_terms,
)
from jupyter_gpushare.protocol.wire.spawner import (
    NOT_THE_SPAWNER,
    TICKET_OPTION,
    UNVERIFIED_CHANNEL,
    GpuRequest,
    HostMount,
    Offer,
    Offers,
    SpawnFault,
    SpawnGrant,
    SpawnProgress,
    SpawnRequest,
    SpawnStop,
    SpawnWait,
)
from jupyter_gpushare.protocol.wire.status import (
    NO_SUCH_PATH,
    ActivityReport,
    Adoption,
    DayUse,
    Decision,
    Decisions,
    Devices,
    DeviceStatus,
    Drain,
    DrainRequest,
    ErrorAnswer,
    Health,
    History,
    KeepRequest,
    KernelActivity,
    KernelEnd,
    Leases,
    LeaseStatus,
    Lending,
    LendingChange,
    Owner,
    Owners,
    ProcessUse,
    ProjectChange,
    Projects,
    ProjectUse,
    Rung,
    SizedLease,
    SizeRequest,
    Status,
    Trace,
    TraceRow,
    UnleasedProcess,
    Usage,
    UsageRow,
    WaitingSession,
)
