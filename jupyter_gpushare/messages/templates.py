"""The table of sentences: one English template per key, with ``%1``, ``%2``, ... for arguments.

The broker sends key, arguments and the English text.  JupyterLab translates by key
(``ui/src/catalogue.ts`` is generated from this table); command line, log and pages show
the English text.  A time in a sentence is an argument, which each of them writes in its
own zone.

Every sentence says what is true now, what happens next and when, and what the user
can do.  Estimates are ranges.  Words that users do not see: reclaim, evict, pending, cull.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from jupyter_gpushare.errors import fill
from jupyter_gpushare.protocol.wire import Text
from jupyter_gpushare.wall_clock import clock_time

# A pair is singular and plural; its first argument is the number.
TEMPLATES: Mapping[str, str | tuple[str, str]] = MappingProxyType(
    {
        "verbatim": "%1",
        "time": "%1",  # ISO 8601 in UTC, with seconds where they are shown
        "duration.seconds": "%1 s",
        "duration.minutes": "%1 min",
        "duration.hours": "%1 h",
        "duration.days": "%1 days",
        # Estimates: from %1 to %2 of a unit, and of two durations.
        "range.seconds": "%1 to %2 s",
        "range.minutes": "%1 to %2 min",
        "range.hours": "%1 to %2 h",
        "range.days": "%1 to %2 days",
        "range.mixed": "%1 to %2",
        "range.about": "about %1",
        "range.up_to": "at most %1",
        "memory": "%1 GiB",
        "part.list": "%1, %2",
        # ---- reasons, read by the first template that matches (`reasons`) -----
        "reason.uses": "it uses %1",
        "taint.managed": "managed memory",
        "taint.ipc": "CUDA IPC",
        "taint.exported": "memory shared with another process",
        "taint.peer": "peer access between GPUs",
        "taint.traced": "tracing with CUPTI (torch.profiler)",
        "taint.fabric": "memory with fabric handles",
        "taint.nccl": "NCCL between processes",
        "reason.broken_account": "its account file is broken",
        "reason.no_library": "preload library not loaded",
        "reason.out_of_service": "the device is out of service: %1",
        "reason.untested": "the self-test has not finished",
        "reason.deaths": "%1 processes ended while the driver suspended or resumed them on this device; "
        "stop and start the device helper to try again",
        "reason.mig": "the driver cannot checkpoint on MIG",
        "reason.blind": "the driver does not say how much memory a process holds here",
        "reason.no_pids": (
            "the driver does not show processes by their pids here (a container without the host's?)"
        ),
        "reason.watched": "lending is only watched on this machine",
        "reason.switched_off": "lending is switched off on this machine",
        "reason.marked": "it is marked never to be put to sleep",
        "reason.mps": "it runs under MPS",
        "reason.not_measured": "not measured",
        "reason.no_lease": "no lease %1 on this machine",
        "reason.no_driver": "the CUDA driver library cannot be loaded: %1",
        "reason.old_driver": "the driver has no %1: suspending needs driver r570 or later",
        "reason.cuda_call": "a process of the lease entered a CUDA call",
        "reason.unfinished": "the driver has not finished an earlier move of this lease",
        "reason.new_processes": "new processes of the lease keep appearing on the GPU",
        "reason.still_shown": "the driver still shows the memory of the lease",
        "reason.unwritable": "the state directory cannot be written: %1",
        "reason.lost": "its GPU memory could not be brought back: restart the kernel or job",
        "reason.process_silent": "process %1 does not answer",
        "reason.resumed_unasked": "lease %1 was resumed on its device while no broker answered",
        "reason.no_memory": "%1 (and a margin of %2) are needed on %3, %4 are free",
        "reason.host_budget": "the copy needs %1 of host memory, %2 of the budget are left",
        "reason.host_memory": "the copy needs %1 of host memory, %2 are available",
        "reason.host_cgroup": "the copy needs %1 in the memory cgroup of the lease, %2 are left",
        "reason.unknown_bytes": "the driver does not say how much memory process %1 holds",
        "reason.lock_slow": "locking the processes of the lease took too long",
        "reason.no_rest": "process %1 did not come to rest: %2",
        "reason.needs_root": "%1: the helper needs root or CAP_SYS_PTRACE",
        "reason.cannot_lock": "the driver cannot lock it (%1)",
        "reason.damaged": "the driver failed to checkpoint it (%1): its GPU state may be damaged",
        "reason.not_checkpointed": "the driver failed to checkpoint it (%1)",
        "reason.ended_within": "process %1 ended within %2 of the driver",
        "reason.over_lent": "uses %1 of a device that is lent",
        "reason.over_granted": "uses %1, %2 are granted",
        "reason.unleased": "a process without a lease uses this device",
        "reason.test_needs_root": "%1; suspending needs a helper that runs as root",
        "reason.test_failed": "self-test failed: %1",
        "reason.test_no_memory": "no free memory on the device for the self-test",
        "reason.test_still_shown": "the driver still shows its memory after the checkpoint",
        "reason.test_changed": "its memory came back changed",
        "reason.test_silent": "the child did not answer within %1 s",
        "reason.test_ended": "the child ended",
        "reason.test_said": "the child said %1",
        "reason.ecc": "%1 uncorrectable memory error(s)",
        "reason.xid": "XID %1: %2",
        "xid.46": "GPU stopped processing",
        "xid.48": "double-bit memory error",
        "xid.62": "internal micro-controller halted",
        "xid.64": "memory could not be remapped",
        "xid.74": "NVLink error",
        "xid.79": "GPU has fallen off the bus",
        "xid.95": "uncontained memory error",
        "xid.109": "context switch timed out",
        "xid.119": "GPU system processor does not answer",
        "xid.120": "GPU system processor failed",
        "xid.140": "unrecovered memory error",
        "xid.143": "GPU could not be initialized",
        "xid.other": "see NVIDIA's catalog of XIDs",
        "reason.recovery": "the driver asks to %1",
        "recovery.1": "reset the GPU",
        "recovery.2": "reboot the machine",
        "recovery.3": "end all peer-to-peer work of the GPU",
        "recovery.4": "end the work on the GPU, then reset it",
        "recovery.5": "recover the IMEX domain",
        "recovery.6": "reset the PCIe bus of the GPU",
        "recovery.7": "reboot the system",
        "recovery.other": "take recovery action %1",
        "reason.runner_ended": "its runner ended before it reported",
        "reason.server_gone": "its server is gone",
        "reason.server_replaced": "a new server of this name starts",
        "reason.not_started": "its server did not start",
        "reason.hub_failed": "the Hub could not start its server",
        "reason.hub_start": "the Hub did not start %1: %2",
        "reason.hub_stop": "the Hub did not stop %1: %2",
        "reason.hub_user": "the Hub did not answer about %1: %2",
        "reason.hub_servers": "the Hub did not list its servers: %1",
        "reason.hub_users": "the Hub has more users than the broker reads",
        "reason.hub_unread": "the Hub's answer is not understood: %1",
        "reason.hub_silent": "the Hub does not answer (%1)",
        "reason.hub_status": "status %1",
        "reason.last_printed": "%1 It last printed:\n%2",
        "reason.runner_killed": "Its runner was killed, and the command with it.",
        "reason.stopped_late": "Stopped; it had not ended %1 s after SIGTERM and was killed.",
        "reason.stopped": "Stopped.",
        "reason.exit_code": "Ended with exit code %1.",
        "reason.signal_number": "Ended by signal %1.",
        "reason.signal": "Ended by %1.",
        "reason.driver_old_nvml": "nvidia-ml-py is older than the driver's call",
        "reason.driver_stuck_in": "%1 of process %2 has not returned",
        "reason.driver_stuck_calls": "%1 driver calls have not returned",
        "reason.driver_stuck": "%1 has not returned",
        "reason.driver_busy": "%1 is busy",
        "reason.driver_silent": "no answer within %1 s",
        # The driver's own errors, which any reason may have in it: call, code, name.
        "reason.driver_named": "%1 failed with code %2 (%3)",
        "reason.driver": "%1 failed with code %2",
        "size.fraction": "%1 GPU",
        "size.gpus": ("%1 GPU", "%1 GPUs"),
        "size.memory": "%1 of a GPU",
        "size.profile": "MIG %1",
        "size.together": "%1 together",
        "size.less": "less",
        # ---- badges: two or three words --------------------------------------
        "badge.queued": "Queued",
        "badge.starting": "Starting",
        "badge.running": "Running",
        "badge.running_borrowed": "Running, borrowed",
        "badge.active": "Active",
        "badge.idle": "Idle %1",
        "badge.warned": "Lent in %1",
        "badge.held": "Held",
        "badge.lost": "GPU state lost",
        "badge.suspending": "Going to sleep",
        "badge.asleep": "Asleep",
        "badge.asleep_lent": "Asleep, GPU lent",
        "badge.paused": "Paused",
        "badge.waiting_to_wake": "Waiting to wake",
        "badge.waking": "Waking up",
        "badge.stopping": "Stopping",
        "badge.ended": "Ended",
        "badge.failed": "Failed",
        # ---- sessions --------------------------------------------------------
        "session.starting": "Getting your %1 (%2).",
        "session.starting_on": "Getting your %1 (%2 of an %3).",
        "session.active": "Your %1 is in use.",
        "session.borrowed": "It is borrowed: it may sleep when its project needs it.",
        "session.kept": "You keep it until %1.",
        "session.held": "Idle for %1. This session cannot be put to sleep (%2), so it keeps its GPU.",
        "session.warned": (
            "Idle for %1 and %2. In %3 your GPU memory (%4) moves to this machine's RAM and the GPU is lent. "
            "Your variables stay."
        ),
        "session.warned_empty": (
            "Idle for %1 and %2. In %3 your GPU is lent; it comes back with your next GPU cell."
        ),
        "session.stays": "Idle for %1. Your GPU stays with you until %2.",
        "session.overdue": ("Idle for %1. %2: your GPU is lent as soon as that helps. Your variables stay."),
        "session.lend_now": (
            "Idle for %1. Nobody is waiting; the next who needs a GPU gets yours. Your variables stay."
        ),
        "session.idle": "Idle for %1. Nobody is waiting, so your GPU stays with you.",
        "session.suspending": "Saving %1 of GPU memory. If you run a cell now, it waits and then runs.",
        "session.suspending_empty": "Your GPU is being lent. If you run a cell now, it waits and then runs.",
        "session.asleep": "Asleep since %1.",
        "session.lent_to": "Your GPU is lent to %1.",
        "session.lent_empty": "Your GPU is lent to %1; it comes back with your first GPU cell.",
        "session.not_used": "Your GPU is unused just now.",
        "session.how_to_wake": "Run any GPU cell to wake it; your variables are safe.",
        "session.how_to_wake_empty": "It comes back with your first GPU cell.",
        "session.how_to_wake_damaged": "Run any GPU cell to wake it.",
        "session.how_to_wake_usually": "Run any GPU cell to wake it, %1.",
        "session.how_to_wake_in": "Run any GPU cell to wake it, which takes %1; your variables are safe.",
        "session.back_in": "It is back in %1.",
        "session.waits_for_capacity": (
            "Your GPU was borrowed and others use it: it comes back when there is free capacity, "
            "then your cell runs."
        ),
        "session.waits_for_checkpoint": (
            "Your GPU is guaranteed but busy for up to %1 more: a job is saving its checkpoint."
        ),
        "session.waking": "Getting the GPU back, then copying %1. Your cell runs after that.",
        "session.waking_empty": "Getting the GPU back. Your cell runs after that.",
        "session.waking_empty_from": "Getting the GPU back from %1. Your cell runs after that.",
        "session.waking_from": "Getting the GPU back from %1, then copying %2. Your cell runs after that.",
        "session.copying": "Copying %1 back to the GPU. Your cell runs after that.",
        "session.lost": (
            "Your GPU memory could not be brought back, so the kernels that used it have to restart. "
            "Files are safe. Reference %1."
        ),
        "session.lost_because": (
            "Your GPU memory could not be brought back (%2), so the kernels that used it have to restart. "
            "Files are safe. Reference %1."
        ),
        "session.damaged": (
            "The GPU driver failed to put this session to sleep, so its kernel may be damaged: "
            "check your results, or restart the kernel. Reference %1."
        ),
        "session.stopping": "The server has ended; its GPU memory is being freed.",
        "session.failed": "The GPU was lost: %1.",
        "session.failed_unknown": "The GPU was lost: see the log.",
        "session.ended": "This server has ended and holds no GPU.",
        "lease.over_limit": (
            "It uses %1 of GPU memory, more than the %2 that it was given: free some, or processes of it may "
            "be stopped."
        ),
        # ---- parts of sentences ----------------------------------------------
        "part.jobs_waiting": ("%1 job is waiting", "%1 jobs are waiting"),
        "part.usually": "usually %1 s",
        "part.usually_range": "usually %1 s (%2-%3)",
        "part.job_of_project": "a training job of project %1",
        "part.session_of_project": "a session of project %1",
        "part.project": "project %1",
        "part.another_project": "another project",
        "part.doubt_late": "the first report came late",
        "part.doubt_restarted": "the total began again or changed",
        "part.doubt_changed": "the time left grew or fell too much",
        "part.doubt_overdue": "it runs for much longer than it said",
        # ---- jobs ------------------------------------------------------------
        "job.waits": "Waits for %1.",
        "job.starting": "Starting on %1.",
        "job.running": "Running on %1.",
        "job.running_borrowed": "Running on %1, borrowed. It may be paused when %2 needs its own.",
        "job.pausing": "Pausing: %1.",
        "job.paused": "Paused at %1 because %2. Nothing was lost.",
        "job.requeued": "Paused at %1 because %2.",
        "job.number": "Number %1.",
        "job.resuming": "Going on: its GPU memory is being copied back.",
        "job.damaged": (
            "The GPU driver failed to pause it, so it may be damaged: check its results, "
            "or start the job again. Reference %1."
        ),
        "job.stopping": "Stopping.",
        "job.stopping_because": "Stopping: %1.",
        "job.ended": "Ended.",
        "job.submitted": "Submitted.",
        "job.started": "Its command started.",
        "job.done": "It ran to its end.",
        "job.ended_with": "It ended with exit code %1.",
        "job.cancelled": "Stopped by its owner.",
        "job.cancelled_early": "Stopped by its owner before it started.",
        "job.vanished": "It ended without a report (killed, or the machine failed).",
        "job.not_started": "It could not be started: %1",
        "job.left": "About %1 left.",
        "job.runs_until": "It is stopped at %1, after its maximum run time.",
        "job.timed_out": "It was stopped after its maximum run time, %1.",
        "job.stopping_time": "Stopping: its maximum run time is over.",
        "job.doubt": "Its progress does not count: %1.",
        "job.goes_on_sigterm": "It goes on from its own checkpoint.",
        "job.goes_on_none": "It starts again from the beginning.",
        "job.now": "Would start now.",
        "job.now_borrowed": ("Would start now on a borrowed GPU; it may be paused when its owner needs it."),
        "job.smaller": "With %1 it would start now.",
        "job.starts_in": "Starts in %1.",
        "job.goes_on_in": "Goes on in %1.",
        "job.ends_in": "Ends in %1.",
        # ---- why a job waits -------------------------------------------------
        "waiting.next": "Needs %1; there is free capacity, so it starts in a moment.",
        "waiting.project_limit": (
            "Its project is at its limit; it starts when other work of the project ends."
        ),
        "waiting.quota": (
            "Needs %1 of what its project is guaranteed, and that is taken; it was submitted not to borrow."
        ),
        "waiting.too_large": "Cannot start: asks for %1; the largest machine has %2.",
        "waiting.being_freed": "Needs %1; GPUs are being freed for it.",
        "waiting.told": "Needs %1; the owner of an idle session was told, and it starts at %2 or soon after.",
        "waiting.host_memory": "Needs %1; there is not enough RAM to put more idle sessions to sleep.",
        "waiting.job_host_memory": (
            "Needs %1; there is not enough RAM to suspend it when the owner of a lent GPU comes back. "
            "A job that saves its own checkpoint needs no RAM."
        ),
        "waiting.reserved": (
            "Needs %1; it has waited for long, so GPUs that become free are kept for it "
            "while its project is within its share."
        ),
        "waiting.not_bypassed": (
            "Needs %1; it has waited for long, so of the jobs behind it in its project "
            "only those within its quota get those GPUs first."
        ),
        "waiting.in_order": "Needs %1; the job before it starts first.",
        "waiting.not_worth_it": "Needs %1; pausing others for it would cost more than it gains.",
        "waiting.backing_off": "Its last start failed; it is tried again in a moment.",
        "waiting.device_broken": "Needs %1; a GPU is out of order.",
        "waiting.one_free": "Needs %1; 1 is free.",
        "waiting.free": "Needs %1; %2 are free.",
        # ---- because ---------------------------------------------------------
        "because.lender_returned": "the owner of the GPU came back",
        "because.over_quota": "another project took back its guaranteed GPU",
        "because.over_quota_of": "%1 took back its guaranteed GPU",
        "because.priority": "work of higher priority in its project came first",
        "because.order": "a job of its project that has had less GPU time came first",
        "because.moved": "a larger job needs GPUs that lie together; it goes on elsewhere",
        "because.idle": "it was idle and others wait",
        "because.lend_now": "its owner lent the GPU",
        "because.state_lost": "its GPU memory could not be brought back",
        "because.needed": "its GPU is needed",
        "because.free_capacity": "the GPUs that it needs are free",
        "because.put_to_sleep": "others were put to sleep for it",
        "because.made_way": "others were stopped for it",
        "because.claim": "it is guaranteed to its project",
        "because.capacity_back": "there is free capacity again",
        "because.wanted": "its owner needs the GPU again",
        "until.used": "its owner used it",
        "until.server_ended": "its server ended",
        "until.not_needed": "no job needed it any more",
        "until.switched": "lending was switched to %1",
        # ---- notices in the log of decisions ------------------------------------
        "notice.machine": "This machine: %1.",
        "notice.of": "%1 %2.",
        "notice.process_ended": "%1 lost a process to the GPU driver: %2.",
        "notice.device_out": "%1 lost its GPU for now: %2.",
        "notice.device_back": "%1 has its GPU back in service.",
        "notice.time_left": "%1 has about %2 left, by its progress.",
        "notice.time_limit": "%1 is stopped in %2: that is its maximum run time.",
        "notice.job_changed": "%1 was changed by its owner: %2; before: %3.",
        "notice.job_before": "%1 was moved before %2 by its owner.",
        "notice.job_behind": "%1 was moved behind %2 by its owner.",
        "job.numbers": "%1, project %2, priority %3",
        "job.numbers_limit": "%1, project %2, priority %3, at most %4",
        "notice.doubt": "%1 is ordered without its progress: %2.",
        "notice.lost": "%1 lost its GPU memory: %2 (%3).",
        "notice.unleased_process": "process %1 (%2) of %3 on GPU %4: %5",
        "notice.unleased_of_user": "%1 belongs to the user of %2.",
        "notice.process_stopped": "%1; process %2 (%3) was stopped",
        "notice.process_to_stop": "%1; process %2 (%3) should be stopped",
        "notice.lending_set": "%1 set lending to %2, was %3.",
        "notice.lending_unset": "%1 set lending to %2 (as configured), was %3.",
        "notice.project_set": "%1 set project %2 to %3, was %4.",
        "notice.project_unset": "%1 set project %2 to %3, as configured, was %4.",
        "notice.admin_resume": "%1 was woken by %2.",
        "notice.admin_stay-asleep": "%1 stays asleep: %2 decided it.",
        "notice.admin_keep": "%1 keeps its GPU for a while: %2 decided it.",
        "notice.admin_lend": "%1 was lent by %2.",
        "notice.admin_never-sleep": "%1 is never put to sleep: %2 decided it.",
        "notice.admin_may-sleep": "%1 may be put to sleep again: %2 decided it.",
        "notice.admin_stop": "%1 was stopped by %2.",
        "notice.admin_priority": "%1 got priority %3 from %2, was %4.",
        "project.numbers": "quota %1, weight %2",
        "project.numbers_limit": "quota %1, weight %2, limit %3",
        # ---- decisions -------------------------------------------------------
        "decision": "%1 %2: %3.",
        "decision.for": "%1 %2 for %3: %4.",
        "decision.job": "%1's job %2 (%3)",
        "decision.session": "%1's session (%2)",
        "decision.grant": "starts",
        "decision.paused": "is paused",
        "decision.put_to_sleep": "is put to sleep",
        "decision.would_sleep": "would be put to sleep",
        "decision.would_have_lent": "%1 would have been asleep for %2, until %3.",
        "decision.goes_on": "goes on",
        "decision.woken": "is woken",
        "decision.requeue": "is stopped and goes back to the queue",
    }
)

# Sentences in their order, joined with spaces.
Texts = tuple[Text, ...]


def text(key: str, *args: str | int | Text) -> Text:
    """Return the text of ``key`` with ``args`` for ``%1``, ``%2``, ...

    Raises:
        KeyError: `TEMPLATES` has no such key.
    """
    TEMPLATES[key]
    return Text(key=key, args=[each if isinstance(each, Text) else str(each) for each in args])


def english(texts: Text | Iterable[Text], time: Callable[[str], str] = clock_time) -> str:
    """Return the English of one text, or of several joined with spaces.

    ``time`` writes the times in it, by default in the zone of this process.
    """
    if not isinstance(texts, Text):
        return " ".join(english(each, time) for each in texts)
    template = TEMPLATES.get(texts.key, texts.key)  # the key of an error is its template
    args = [each if isinstance(each, str) else english(each, time) for each in texts.args]
    if texts.key == "time":
        return time(args[0])
    if isinstance(template, tuple):
        template = template[0] if args[0] == "1" else template[1]
    return fill(template, args)


def local(sentence: str, texts: Iterable[Text]) -> str:
    """Return a broker's sentence with its times in the zone of this process.

    It is the sentence as sent where the broker sent no texts, or a newer one sent unknown keys.
    """
    texts = tuple(texts)
    try:
        return english(texts) if texts and all(map(_is_known, texts)) else sentence
    except (IndexError, ValueError):  # other arguments than this version knows
        return sentence


def _is_known(told: Text) -> bool:
    return told.key in TEMPLATES and all(isinstance(each, str) or _is_known(each) for each in told.args)
