"""The table of sentences: one English template per key, with ``%1``, ``%2``, ... for arguments.

The broker sends the key, the arguments and the English text.  JupyterLab translates by key
(``ui/src/catalogue.ts`` is generated from this table); the command line, the log and pages
show the English text.  A time in a sentence is an argument, which the reader's program writes
in its own time zone.

Every sentence says what is true now, what happens next and when, and what the user
can do.  Estimates are ranges.  These words are not used: reclaim, evict, pending, cull.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# A pair has the singular and the plural; its first argument is the number.
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
        "part.and_then": "%1; %2",
        "part.or_earlier": "%1 or earlier",
        "part.after": "after %1",
        "part.any_moment": "at any moment",
        "part.some_time": "at some point",
        # ---- reasons, parsed with the first template that matches (`texts`) ----
        "reason.uses": "it uses %1",
        "taint.managed": "managed memory",
        "taint.ipc": "CUDA IPC",
        "taint.exported": "memory shared with another process or with graphics",
        "taint.peer": "peer access between GPUs",
        "taint.traced": "tracing with CUPTI (torch.profiler)",
        "taint.fabric": "memory with fabric handles",
        "taint.nccl": "NCCL between processes",
        "reason.broken_account": "its account file is broken",
        "reason.no_library": "a process in it does not load the library that limits memory",
        "reason.left": "GPU memory of an ended process is kept by processes that it started",
        "reason.out_of_service": "the device is out of service: %1",
        "reason.left_out": "the device helper left it out at its start",
        "reason.out_of_step": "the driver fails at every call about process %1",
        "reason.untested": "the self-test has not finished",
        "reason.deaths": "%1 processes ended while the driver suspended or resumed them on this device; "
        "stop and start the device helper to try again",
        "reason.container": "driver %1 cannot suspend in a container with some of the machine's GPUs",
        "reason.mig": "the driver cannot checkpoint on MIG",
        "reason.blind": "the driver does not say how much memory a process holds here",
        "reason.no_pids": (
            "the driver does not show processes by their pids here (a container without the host's?)"
        ),
        "reason.watched": "lending is only watched on this machine",
        "reason.switched_off": "lending is switched off on this machine",
        "reason.marked": "it is marked never to be put to sleep",
        "reason.no_move": "it was submitted not to move",
        "reason.sees_no_other": "its processes may not be able to open another GPU",
        "reason.stays_here": "it cannot move from this GPU",
        "reason.files_closed": "only the users of leases may open the device files (--own-device-files)",
        "reason.no_other": "no other device of the same model",
        "reason.moves_not": "the driver %1 restores a process on its own device alone (r580 or later moves)",
        "reason.no_uuid": "%1 is not the UUID of a GPU",
        "reason.mps": "it runs under MPS",
        "reason.holds_no_calls": "its device has no library that could hold calls",
        "reason.no_proof": "its driver cannot tell when a process has nothing left to run (before CUDA 12.5)",
        "reason.call_not_held": "a process of it runs without the library that holds calls",
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
        "reason.guest_has_host": "lease %1 is a guest whose host is there: suspend it first",
        "reason.guest_runs": "lease %1 runs: it becomes a guest when it resumes",
        "reason.host_uses": "lease %1 uses %2, with a guest %3 are left",
        "reason.resumed_unasked": "lease %1 was resumed on its device while no broker answered",
        "reason.no_memory": "%1 (and a margin of %2) are needed on %3, %4 are free",
        "reason.host_budget": "the copy needs %1 of host memory, %2 of the budget are left",
        "reason.host_memory": "the copy needs %1 of host memory, %2 are available",
        "reason.host_cgroup": "the copy needs %1 in the memory cgroup of the lease, %2 are left",
        "reason.unknown_bytes": "the driver does not say how much memory process %1 holds",
        "reason.lock_slow": "locking the processes of the lease took too long",
        "reason.no_rest": "process %1 did not come to rest: %2",
        "reason.needs_root": "%1: the helper needs root or CAP_SYS_PTRACE",
        "reason.no_persistence": "%1: persistence mode is off on %2",
        "reason.not_supported": "%1: this GPU or driver may not support it",
        "reason.cannot_lock": "the driver cannot lock it (%1)",
        "reason.damaged": "the driver failed to checkpoint it (%1): its GPU state may be damaged",
        "reason.not_checkpointed": "the driver failed to checkpoint it (%1)",
        "reason.ended_within": "process %1 ended within %2 of the driver",
        "reason.closed_lease": "a lease uses memory of it that it was not granted",
        "reason.closed_unleased": "a process uses memory of it without a lease",
        "reason.over_lent": "uses %1 of a device that is lent",
        "reason.over_granted": "uses %1, its limit is %2",
        "reason.unleased": "a process without a lease uses this device",
        "reason.test_failed": "self-test failed: %1",
        "reason.move_failed": "self-test of a move failed: %1",
        "reason.test_no_memory": "no free memory on the device for the self-test",
        "reason.test_no_room": "no free memory on the other device for the self-test of a move",
        "reason.test_still_shown": "the driver still shows its memory after the checkpoint",
        "reason.test_not_there": "the driver does not show its memory on the other device",
        "reason.test_still_here": "the driver still shows its memory on its first device",
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
        "reason.released": "an administrator released it",
        "reason.server_ended": "its server ended",
        "reason.server_ended_itself": "its server ended without a request of the Hub",
        "reason.server_stopped": "the Hub stopped its server",
        "reason.server_aged": "the Hub stopped its server, which had run longer than its service %1 allows",
        "reason.server_culled": "the Hub stopped its server, idle longer than its service %1 allows",
        "reason.node_lost": "the cluster lost its node",
        "reason.server_replaced": "a new server of this name starts",
        "reason.not_started": "its server did not start",
        "reason.earlier_broker": "an earlier broker had asked for its server",
        "reason.hub_failed": "the Hub could not start its server",
        "reason.not_a_member": "%1 is no member of project %2",
        "reason.hub_start": "the Hub did not start %1: %2",
        "reason.hub_stop": "the Hub did not stop %1: %2",
        "reason.hub_user": "the Hub did not answer about %1: %2",
        "reason.hub_servers": "the Hub did not list its servers: %1",
        "reason.hub_users": "the Hub has more users than the broker reads",
        "reason.hub_unread": "the Hub's answer is not understood: %1",
        "reason.hub_silent": "the Hub does not answer (%1)",
        "reason.hub_status": "status %1",
        "reason.last_printed": "%1 It last printed:\n%2",
        "reason.log_lacks": "%1 %2 bytes of its log were not written: %3.",
        "reason.disk_silent": "the disk does not answer",
        "reason.stopped_early": "Stopped before it was started.",
        "reason.start_hung": "Stopped before it was started: %1.",
        "reason.runner_killed": "Its runner was killed, and the command with it.",
        "reason.stopped_late": "Stopped; it had not ended %1 s after the request and was killed.",
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
        # The driver's errors, which may be part of any reason: call, code, name.
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
        "badge.running_guest": "Running as a guest",
        "badge.running_shared": "Running, shared",
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
        "session.drains": "This GPU takes nothing new. The administrator asks to have your server stopped.",
        "session.drains_by": (
            "This GPU takes nothing new. The administrator asks to have your server stopped by %1."
        ),
        "session.moved": "It resumed on another GPU; your variables stay.",
        "session.kept": "You keep it until %1.",
        "session.processor_only": "No GPU work for %1, so this session counts as idle.",
        "session.processor_until": "No GPU work for %1; from %2 on this session counts as idle.",
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
        "session.how_to_wake_only": "Run any GPU cell to wake it.",
        "session.how_to_wake_usually": "Run any GPU cell to wake it, %1.",
        "session.how_to_wake_in": "Run any GPU cell to wake it, which takes %1; your variables are safe.",
        "session.how_to_wake_only_in": "Run any GPU cell to wake it, which takes %1.",
        "session.kernel_ends": (
            "If it stays idle, its server shuts its kernel down %2 (%1), and the variables are lost."
        ),
        "session.server_ends": (
            "If it stays idle, %1 (a service of the Hub) stops its server %2, and the variables are lost."
        ),
        "session.server_ages": (
            "Even if it is used, %1 (a service of the Hub) stops its server %2, and the variables are lost."
        ),
        "session.waits_for_own": ("Waits for the GPU that it was on; it cannot move to another because %1."),
        "session.back_in": "The GPU is back in %1.",
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
        "spawn.reserved": "Your %1 is reserved for %2: the server starts now.",
        "session.stopping": "The server has ended; its GPU memory is being freed.",
        "session.failed": "The GPU was lost: %1.",
        "session.failed_unknown": "The GPU was lost: see the log.",
        "session.ended": "This server has ended and holds no GPU.",
        "lease.misplaced": "The cluster chose another GPU; memory returns to its own. It asks again at %1.",
        "lease.over_own": (
            "Its process %1 (%2) uses %3 of GPU memory past the limit, and takes it from others. %4"
        ),
        "lease.over_elsewhere": (
            "Its process %1 (%2) uses %3 of a GPU that is not its own, and takes it from others. %4"
        ),
        "lease.over_lent": (
            "Its process %1 (%2) uses %3 of the GPU that is lent while it sleeps, and takes it from others. "
            "%4"
        ),
        "lease.over_left": (
            "Ended processes of it keep %1 of a GPU that it does not have now: end what they started."
        ),
        "lease.unleased": "Your process %1 (%2) uses %3 of a GPU without a lease. %4",
        "part.with_environment": (
            "End it, or start it from this server with the server's variables, LD_PRELOAD among them."
        ),
        "lease.over_limit": (
            "It uses %1 of GPU memory, more than the %2 that it was given: free some, or processes of it may "
            "be stopped."
        ),
        "share.fair": "Share of the GPU's time: %1 % granted.",
        "share.fair_measured": (
            "Share of the GPU's time: %1 % granted, %2 % measured while others computed beside it in the "
            "last minute."
        ),
        "share.strict": "Share of the GPU's time: at most %1 %.",
        "share.strict_measured": (
            "Share of the GPU's time: at most %1 %, %2 % measured while it computed in the last minute."
        ),
        "share.level": "It is kept between kernels: a kernel of 300 ms is never cut.",
        "share.not_in_force": "Its share of the GPU's time is not in force: %1.",
        # ---- jobs that share a GPU ------------------------------------------
        "guest.host": "Shares its GPU with another job, which gives way when this one needs it.",
        "guest.host_keeps": "Shares its GPU with another job; it keeps %1 % of its speed.",
        "guest.runs": "Runs as a guest on the GPU of another job, and gives way when that needs it.",
        "guest.keeps": "It has %1 % of the speed that it has alone.",
        "guest.may_share": "It may share its GPU with another job.",
        "guest.may_come": "It may also run as a guest on the GPU of another job.",
        "guest.may_host": "Other jobs may run as guests on its GPUs; it is never one itself.",
        "guest.no_effect": (
            "Sharing has no effect on it: only a job with whole GPUs has guests, and only one that is "
            "suspended for others, on one GPU, is a guest."
        ),
        "guest.off": "Sharing has no effect here: this site lets no jobs share a GPU.",
        # ---- parts of sentences ----------------------------------------------
        "part.jobs_waiting": ("%1 job is waiting", "%1 jobs are waiting"),
        "part.usually": "usually %1 s",
        "part.usually_range": "usually %1 s (%2-%3)",
        "part.job_of_project": "a training job of project %1",
        "part.session_of_project": "a session of project %1",
        "part.project": "project %1",
        "part.machine": "this machine",
        "part.another_project": "another project",
        # ---- jobs ------------------------------------------------------------
        "job.waits": "Waits for %1.",
        "job.starting": "Starting on %1.",
        "job.running": "Running on %1.",
        "job.running_borrowed": "Running on %1, borrowed. It may be paused when %2 needs its own.",
        "job.pausing": "Pausing: %1.",
        "job.paused": "Paused at %1 because %2. Nothing was lost.",
        "job.requeued": "Paused at %1 because %2.",
        "job.number": "Number %1.",
        "job.waits_for_own": "It waits for the GPU that it was on; it cannot move to another because %1.",
        "job.moved": "It resumed on another GPU.",
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
        "job.back_in_queue": "It is back in the queue.",
        "job.ended_with": "It ended with exit code %1.",
        "job.cancelled": "It was stopped on request.",
        "job.cancelled_early": "It was stopped on request, before it started.",
        "job.vanished": "It ended without a report (killed, or the machine failed).",
        "job.not_started": "It could not be started: %1",
        "job.owner_gone": "It did not start: the Hub does not have its owner %1 any more.",
        "job.runs_until": "It is stopped at %1, after its maximum run time.",
        "job.stopped_in": "It is stopped in %1: that is its maximum run time.",
        "job.timed_out": "It was stopped after its maximum run time, %1.",
        "job.stopping_time": "Stopping: its maximum run time is over.",
        "job.goes_on_sigterm": "It goes on from its own checkpoint.",
        "job.goes_on_none": "It starts again from the beginning.",
        "job.now": "Would start now.",
        "job.now_borrowed": ("Would start now on a borrowed GPU; it may be paused when its owner needs it."),
        "job.now_guest": (
            "Would start now as a guest on the GPU of another job, and gives way when that needs it."
        ),
        "job.smaller": "With %1 it would start now.",
        "job.ends_in": "Ends in %1.",
        # ---- why a job waits -------------------------------------------------
        "waiting.next": "Needs %1; there is free capacity, so it starts in a moment.",
        "waiting.project_limit": (
            "Its project is at its limit; guaranteed sessions count, also while they sleep. It starts when "
            "other work of the project ends. You can stop a session, or ask for fewer GPUs or a higher limit."
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
        "waiting.owner_gone": "Does not start: the Hub does not have its owner now.",
        "waiting.draining": (
            "Needs %1; GPUs here take nothing new: an administrator empties them, or memory of them is used "
            "that was not granted."
        ),
        "waiting.own_devices": "Needs the GPUs that it was on (%1), which are in use.",
        "waiting.one_free": "Needs %1; 1 is free.",
        "waiting.free": "Needs %1; %2 are free.",
        # ---- the progress of a session's start, on a cluster ------------------
        "start.placing": "Waiting for the cluster to place your GPU.",
        "start.freeing": "Your GPU is found; what uses it ends or goes to sleep first.",
        "start.freeing_within": "Your GPU is found; what uses it ends or goes to sleep first, within %1.",
        "start.reserving": "Your GPU is found; the cluster reserves it, which takes up to 40 s.",
        "start.connecting": "Your GPU is found; its node prepares it, the first time with an image.",
        # ---- what ended a suspended process ----------------------------------
        "ended.kernel_idle": "its kernel %1 was shut down after it had been idle for longer than %2 allows",
        "ended.kernel_shut_down": "its kernel %1 was shut down on request",
        "ended.kernel_restarted": "its kernel %1 was restarted",
        "ended.kernel_killed": "its kernel %1 was killed (SIGKILL), as happens when memory runs out",
        "ended.kernel_signal": "its kernel %1 was ended by %2",
        "ended.kernel_exit": "its kernel %1 ended with exit code %2",
        "ended.kernel_died": "its kernel %1 died",
        "ended.process": "its process %1 (%2) ended",
        "ended.unknown": "one of its processes ended",
        # ---- because ---------------------------------------------------------
        "because.lender_returned": "the session that lent the GPU needs it",
        "because.over_quota": "another project took back its guaranteed GPU",
        "because.over_quota_of": "%1 took back its guaranteed GPU",
        "because.priority": "work of higher priority in its project came first",
        "because.order": "a job of its project that has had less GPU time came first",
        "because.moved": "a larger job needs GPUs that lie together; it goes on elsewhere",
        "because.idle": "it was idle and others wait",
        "because.lend_now": "its GPU was offered to others",
        "because.state_lost": "its GPU memory could not be brought back",
        "because.needed": "its GPU is needed",
        "because.free_capacity": "the GPUs that it needs are free",
        "because.put_to_sleep": "others were put to sleep for it",
        "because.made_way": "others were stopped for it",
        "because.claim": "it is guaranteed to its project",
        "because.guest": "another job leaves part of its GPU unused",
        "because.host_left": "the job whose GPU it shared gave that up",
        "because.host_memory_wanted": "the job whose GPU it shared needed the memory",
        "because.own_memory_wanted": "it needs more memory than the job whose GPU it shared leaves",
        "because.cannot_yield": "it cannot be suspended any more for the job whose GPU it shared",
        "because.pair_parted": "to share a GPU with that job did not pay",
        "because.capacity_back": "there is free capacity again",
        "because.wanted": "it needs its GPU again",
        "until.used": "it was used",
        "until.server_ended": "its server ended",
        "until.not_needed": "no job needed it any more",
        "until.switched": "lending was switched to %1",
        # ---- notices in the log of decisions ------------------------------------
        "notice.machine": "This machine: %1.",
        "notice.of": "%1 %2.",
        "notice.process_ended": "%1 lost a process to the GPU driver: %2.",
        "notice.evicted": "The cluster took the GPU of %1, and its GPU processes were ended: %2.",
        "notice.device_out": "%1 lost its GPU for now: %2.",
        "notice.device_back": "%1 has its GPU back in service.",
        "notice.low_use": "%1 has kept its GPU busy for %2 without computing: utilization stayed below 2 %.",
        "notice.resized": "%1 has a new size, before: %2.",
        "notice.guest_came": "%1 shares its GPU with another job from now on.",
        "notice.guest_left": "%1 has its GPU to itself again: its guest has left.",
        "notice.guest_gave_way": "The guest of %1 left after %2: the job needed the memory.",
        "notice.guest_slowed": "The guest of %1 left: the job kept only %2 % of its speed beside it.",
        "notice.moved_session": "%1 resumed on another GPU; its variables stay.",
        "notice.moved_job": "%1 resumed on another GPU.",
        "notice.time_left": "%1 has about %2 left, by its progress.",
        "notice.time_limit": "%1 is stopped in %2: that is its maximum run time.",
        "notice.job_changed": "%1 was changed: %2; before: %3.",
        "notice.job_before": "%1 was moved before %2 in the queue.",
        "notice.job_behind": "%1 was moved behind %2 in the queue.",
        "job.numbers": "%1, project %2, priority %3",
        "job.numbers_limit": "%1, project %2, priority %3, at most %4",
        "notice.lost": "%1 lost its GPU memory: %2 (%3).",
        "notice.saved_lost": "%1 lost %2 of saved GPU memory at %3: %4.",
        "notice.node_lost": "%1 has ended: the cluster lost its node.",
        "notice.unleased_process": "process %1 (%2) of %3 on GPU %4: %5",
        "notice.unleased_of_user": "%1 belongs to the user of %2.",
        "notice.process_stopped": "%1; process %2 (%3) was stopped",
        "notice.process_to_stop": "%1; process %2 (%3) should be stopped",
        "notice.lending_set": "%1 set lending to %2, was %3.",
        "notice.lending_unset": "%1 set lending to %2 (as configured), was %3.",
        "notice.drain": "%1 empties %2: it takes nothing new.",
        "notice.drain_until": "%1 empties %2 until %3: it takes nothing new.",
        "notice.drain_over": "%1 lets %2 take work again.",
        "notice.owner_adopted": "%1 gave what belongs to %2, an absent owner, to %3.",
        "notice.owner_ended": "%1 ended the waiting jobs of %2, an absent owner.",
        "notice.project_set": "%1 set project %2 to %3, was %4.",
        "notice.project_unset": "%1 set project %2 to %3, as configured, was %4.",
        "notice.admin_resume": "%2 asked to wake %1.",
        "notice.admin_stay-asleep": "%2 asked that %1 stays asleep.",
        "notice.admin_keep": "%2 asked that %1 keeps its GPU for a while.",
        "notice.admin_lend": "%2 asked to lend the GPU of %1.",
        "notice.admin_release": "%2 asked to free GPU memory that an ended process of %1 left behind.",
        "notice.admin_never-sleep": "%2 asked that %1 is never put to sleep.",
        "notice.admin_may-sleep": "%2 asked that %1 may be put to sleep again.",
        "notice.admin_stop": "%2 asked to stop %1.",
        "notice.admin_end_process": "%1 asked to end process %2 (%3) of uid %4 on GPU %5: it has no lease.",
        "notice.admin_priority": "%1 got priority %3 from %2, was %4.",
        "project.numbers": "quota %1, weight %2",
        "project.numbers_limit": "quota %1, weight %2, limit %3",
        "project.priority": "%1, priority at most %2",
        # ---- decisions -------------------------------------------------------
        "decision": "%1 %2: %3.",
        "decision.for": "%1 %2 for %3: %4.",
        "decision.job": "%1's job %2 (%3)",
        "decision.session": "%1's session (%2)",
        "decision.your_job": "Your job %1 (%2)",
        "decision.your_session": "Your session (%1)",
        # The same within a sentence.
        "part.your_job": "your job %1 (%2)",
        "part.your_session": "your session (%1)",
        "decision.grant": "starts",
        "decision.paused": "is paused",
        "decision.put_to_sleep": "is put to sleep",
        "decision.would_sleep": "would be put to sleep",
        "decision.would_have_lent": "%1 would have been asleep for %2, until %3.",
        "decision.goes_on": "goes on",
        "decision.keeps": "has the GPU for its own",
        "decision.woken": "is woken",
        "decision.requeue": "is stopped and goes back to the queue",
    }
)
