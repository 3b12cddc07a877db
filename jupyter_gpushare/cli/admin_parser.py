"""The verbs of `gpushare admin`: one table, with the options and an example of each."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.cli import administer, drains, export, owners, processes
from jupyter_gpushare.cli.administer import MODES
from jupyter_gpushare.cli.options import PRIORITY, YES, job_id
from jupyter_gpushare.command_line import Option, Verb, count

_LEASE = Option("ID", "as `gpushare admin leases` shows it", job_id)
_GPU = "UUID, its beginning, or `machine` for all"
_OWNER = (
    Option("[OWNER]", "as `gpushare admin owners` shows it", dest="name"),
    Option("--all", "all of them"),
)

ADMIN_HELP = "what administrators change while users work"
ADMIN: Mapping[str, Verb] = {
    "lending": Verb(
        administer.lending,
        "whether GPUs of idle sessions are lent",
        [
            "gpushare admin lending          the mode in force, and how suspensions went",
            "gpushare admin lending watch    log what would be lent, touch no process",
            "gpushare admin lending off      wake all sessions, lend nothing",
            "gpushare admin lending default  as configured",
        ],
        [Option("[mode]", kind=[*MODES, "default"])],
    ),
    "leases": Verb(
        administer.leases,
        "sessions and jobs of all users, with their ids",
        ["gpushare admin leases --json"],
    ),
    "wake": Verb(
        administer.wake,
        "get the GPU of a sleeping session back",
        ["gpushare admin wake k3v9m2x7qa"],
        [_LEASE],
    ),
    "lend": Verb(
        administer.lend, "lend the GPU of a session now", ["gpushare admin lend k3v9m2x7qa"], [_LEASE]
    ),
    "stop": Verb(
        administer.stop,
        "stop a session with its kernels, or a job",
        ["gpushare admin stop k3v9m2x7qa"],
        [_LEASE, YES],
    ),
    "priority": Verb(
        administer.priority,
        "raise or lower the priority of a job, beyond its project's right too",
        ["gpushare admin priority k3v9m2x7qa 20"],
        [Option("JOB", kind=job_id, dest="id"), Option("N", "-100 to 100", PRIORITY, dest="priority")],
    ),
    "drain": Verb(
        drains.drain,
        "let a GPU or the machine take nothing new, and ask owners there to finish",
        [
            "gpushare admin drain                        which take nothing new, and what is still there",
            "gpushare admin drain GPU-5f2 --by 18:00     its UUID, or how that begins",
            "gpushare admin drain machine",
        ],
        [
            Option("[GPU]", _GPU, dest="device"),
            Option("--by TIME", "like 18:00; stops nothing", drains.time_of_day),
        ],
    ),
    "undrain": Verb(
        drains.undrain,
        "let a GPU or the machine take work again",
        ["gpushare admin undrain machine"],
        [Option("GPU", _GPU, dest="device")],
    ),
    "release": Verb(
        processes.release,
        "end a process that uses a GPU without a lease",
        [
            "gpushare admin release           those that there are, and which are left alone",
            "gpushare admin release 4711      SIGTERM, and SIGKILL 5 s later; asks first",
        ],
        [Option("[PID]", "as `gpushare admin release` shows it", int), YES],
    ),
    "owners": Verb(
        owners.owners,
        "owners of sessions and jobs that are absent from the Hub, or were made anew",
        ["gpushare admin owners --json"],
    ),
    "adopt": Verb(
        owners.adopt,
        "give what belongs to such an owner to a user of the Hub",
        [
            "gpushare admin adopt ada              to the ada of the Hub now",
            "gpushare admin adopt ada --to lovelace",
            "gpushare admin adopt --all            each to the present user of the name",
        ],
        [Option("--to USER", "another name at the Hub"), *_OWNER],
    ),
    "end": Verb(
        owners.end, "fail the waiting jobs of such an owner", ["gpushare admin end ada"], [YES, *_OWNER]
    ),
    "usage": Verb(
        administer.usage,
        "GPU-hours of all users, for chargeback",
        [
            "gpushare admin usage                                this month, by user, project and GPU model",
            "gpushare admin usage --by project,month --since 2026-01-01",
            "gpushare admin usage --by user,day --user ada --csv",
        ],
        [
            Option("--by COLUMNS", "of user, project, gpu and day or month, with commas"),
            Option("--since DAY", "the first, like 2026-11-01 (UTC)"),
            Option("--until DAY", "the last (default: today)"),
            Option("--user NAME", "only of this user"),
            Option("--project P", "only of this project"),
            Option("--csv", "print CSV"),
        ],
    ),
    "export": Verb(
        export.export,
        "what ran on this site, as a trace for `gpushare simulate`",
        [
            "gpushare admin export jobs jobs.csv",
            "gpushare simulate jobs jobs.csv --gpus 8",
            "gpushare admin export cells cells.csv",
            "gpushare simulate notebooks cells.csv --gpus 8 --jobs jobs.csv --idle-timeout 900",
        ],
        [
            Option("kind", "ended jobs, or the work of sessions", ["jobs", "cells"]),
            Option("FILE", "is made anew; -: the output"),
            Option("--names", "of users and projects; else they are numbered"),
        ],
    ),
    "quota": Verb(
        administer.quota,
        "the numbers of projects",
        [
            "gpushare admin quota                       all projects",
            "gpushare admin quota nlp --quota 1.5       guaranteed GPUs; --weight and --limit likewise",
            "gpushare admin quota nlp --reset           as configured",
        ],
        [
            Option("[PROJECT]"),
            Option("--quota G", "guaranteed GPUs", float),
            Option("--weight N", "share of what is over", count(0, 1_000)),
            Option("--limit G", "the most GPUs that it may hold", float),
            Option("--priority-max N", "highest priority that members give to jobs", count(0, 100)),
            Option("--force", "also more than the machine has"),
            Option("--reset", "take all changes back"),
        ],
    ),
}
