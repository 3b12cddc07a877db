"""The verbs of `gpushare admin`, with their options."""

from __future__ import annotations

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

ADMIN = (
    Verb(administer.lending, Option("[mode]", kind=[*MODES, "default"])),
    Verb(administer.leases),
    Verb(administer.wake, _LEASE),
    Verb(administer.lend, _LEASE),
    Verb(administer.stop, _LEASE, YES),
    Verb(
        administer.priority,
        Option("JOB", kind=job_id, dest="id"),
        Option("N", "-100 to 100", PRIORITY, dest="priority"),
    ),
    Verb(
        drains.drain,
        Option("[GPU]", _GPU, dest="device"),
        Option("--by TIME", "like 18:00; stops nothing", drains.time_of_day),
    ),
    Verb(drains.undrain, Option("GPU", _GPU, dest="device")),
    Verb(processes.release, Option("[PID]", "as `gpushare admin release` shows it", int), YES),
    Verb(owners.owners),
    Verb(owners.adopt, Option("--to USER", "another name at the Hub"), *_OWNER),
    Verb(owners.end, YES, *_OWNER),
    Verb(
        administer.usage,
        Option("--by COLUMNS", "of user, project, gpu and day or month, with commas"),
        Option("--since DAY", "the first, like 2026-11-01 (UTC)"),
        Option("--until DAY", "the last (default: today)"),
        Option("--user NAME", "only of this user"),
        Option("--project P", "only of this project"),
        Option("--csv", "print CSV"),
    ),
    Verb(
        export.export,
        Option("kind", "ended jobs, or the work of sessions", ["jobs", "cells"]),
        Option("FILE", "is made anew; -: the output"),
        Option("--names", "of users and projects; else they are numbered"),
    ),
    Verb(
        administer.quota,
        Option("[PROJECT]"),
        Option("--quota G", "guaranteed GPUs", float),
        Option("--weight N", "share of what is over", count(0, 1_000)),
        Option("--limit G", "the most GPUs that it may hold", float),
        Option("--priority-max N", "highest priority that members give to jobs", count(0, 100)),
        Option("--force", "also more than the machine has"),
        Option("--reset", "take all changes back"),
    ),
)
