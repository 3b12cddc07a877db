"""One record of each kind, with no field at its default."""

from __future__ import annotations

from jupyter_gpushare.broker.state.records import (
    DecisionRecord,
    JobRecord,
    Lags,
    LeaseRecord,
    ProjectOverride,
    UsageRecord,
    UserLags,
)
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol.wire import Text

LEASE = LeaseRecord(
    lease=Lease(
        id="jabcdefghij",
        project="nlp",
        kind=Kind.TRAIN,
        size=Size(333, 2, 3 << 33, "1g.10gb"),
        user="bö",
        server="s",
        state=State.SUSPENDED,
        devices=("GPU-1", "GPU-0"),
        held_milli=334,
        priority=-7,
        survival=CheckpointMode.SIGTERM,
        submitted_at=1.5,
        queued_at=2.5,
        waits_since_at=2.75,
        granted_at=3.5,
        keep_until_at=4.5,
        lend_now=True,
        suspendable=False,
        saved_bytes=5 << 33,
        attained_gpu_s=6.25,
        attained_at=2.25,
        turns=2,
        cancelled=True,
        borrow=False,
        share=True,
        host="jklmnopqrst",
        borrowed=True,
    ),
    uid=4_000_000_000,
    attempt=3,
    since_at="2025-01-02T03:04:05.678Z",
    entered_at=7.5,
    counted_at=8.5,
    why="idle",
    requeue=True,
    note="a note",
    given_to="nlp",
    suspend_reason="IPC",
    limits={"GPU-1": 1 << 36, "GPU-0": 1},
    tries=2,
    moves=True,
    slept_on=("GPU-0",),
    unprepared=True,
)
JOB = JobRecord(
    id="abcdefghij",
    user="bö",
    project="nlp",
    name="train",
    command=("python", "a b", ""),
    cwd="/home/bo",
    env={"A": "1", "B": "é"},
    retries=3,
    grace_s=7.5,
    request='{"command":[]}',
    submitted_at="2025-01-02T03:04:05.678Z",
    started_at="2025-01-02T03:04:06.678Z",
    ended_at=None,
    result="",
    exit_code=-15,
    stopped=True,
    reason_texts=(Text(key="job.ended_with", args=["2"]),),
    attempts=1,
    failures=2,
    preemptions=4,
    ran_s=8.5,
    done=1.5,
    total=9.5,
    idempotency_key="k",
    request_digest="5f",
)
DECISION = DecisionRecord(
    seq=1,
    at="2025-01-02T03:04:05.678Z",
    lease="jabcdefghij",
    user="bö",
    project="nlp",
    action="suspend",
    why="idle",
    for_lease="bxyz",
    texts=(Text(key="verbatim", args=[Text(key="duration.seconds", args=["5"])]),),
)
OVERRIDE = ProjectOverride(name="nlp", quota_milli=1500, weight=2, limit_milli=None)
USAGE = UsageRecord(
    day="2025-01-02",
    user="bö",
    project="nlp",
    gpu="NVIDIA H200",
    used_gpu_s=1.5,
    computing_gpu_s=0.75,
    borrowed_gpu_s=0.25,
    lent_gpu_s=2.5,
    saved_gib_s=3.5,
    kept_s=4.5,
)
LAGS = Lags(gpu_s={"nlp": -1.5, "bö": 1.5})
USER_LAGS = UserLags(gpu_s={"nlp": {"ada": 1.5}})
RECORDS = (LEASE, JOB, DECISION, OVERRIDE, USAGE, LAGS, USER_LAGS)
