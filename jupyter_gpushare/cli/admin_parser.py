"""Parsers of `gpushare admin`: verbs for administrators, with an example of each."""

from __future__ import annotations

import argparse

from jupyter_gpushare.cli import administer, drains, export, owners, processes
from jupyter_gpushare.cli.administer import MODES
from jupyter_gpushare.cli.options import Parser, add_verb, count


def add_admin_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    """Add `admin` with its verbs."""
    text = "what administrators change while users work"
    admin = verbs.add_parser(
        "admin",
        help=text,
        description=f"{text.capitalize()}.",
        epilog="examples:\n"
        "  gpushare admin leases\n"
        "  gpushare admin drain machine --by 18:00\n"
        "  gpushare admin usage --csv\n"
        "  gpushare admin drain --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = admin.add_subparsers(metavar="VERB", required=True)
    lending = add_verb(
        settings,
        "lending",
        administer.lending,
        "whether GPUs of idle sessions are lent",
        "gpushare admin lending          the mode in force, and how suspensions went",
        "gpushare admin lending watch    log what would be lent, touch no process",
        "gpushare admin lending off      wake all sessions, lend nothing",
        "gpushare admin lending default  as configured",
    )
    lending.add_argument("mode", nargs="?", choices=[*MODES, "default"])
    _add_acts(settings)
    _add_drains(settings)
    _add_owners(settings)
    _add_usage(settings)
    _add_export(settings)
    quota = add_verb(
        settings,
        "quota",
        administer.quota,
        "the numbers of projects",
        "gpushare admin quota                       all projects",
        "gpushare admin quota nlp --quota 1.5       guaranteed GPUs; --weight and --limit likewise",
        "gpushare admin quota nlp --reset           as configured",
    )
    quota.add_argument("project", nargs="?", metavar="PROJECT")
    quota.add_argument("--quota", type=float, metavar="G", help="guaranteed GPUs")
    quota.add_argument("--weight", type=count(0, 1_000), metavar="N", help="share of what is over")
    quota.add_argument("--limit", type=float, metavar="G", help="the most GPUs that it may hold")
    quota.add_argument(
        "--priority-max", type=count(0, 100), metavar="N", help="highest priority that members give to jobs"
    )
    quota.add_argument("--force", action="store_true", help="also more than the machine has")
    quota.add_argument("--reset", action="store_true", help="take all changes back")


def _add_acts(settings: argparse._SubParsersAction[Parser]) -> None:
    add_verb(
        settings,
        "leases",
        administer.leases,
        "sessions and jobs of all users, with their ids",
        "gpushare admin leases --json",
    )
    for name, action, text in (
        ("wake", "resume", "get the GPU of a sleeping session back"),
        ("lend", "lend", "lend the GPU of a session now"),
        ("stop", "stop", "stop a session with its kernels, or a job"),
    ):
        verb = add_verb(settings, name, administer.act, text, f"gpushare admin {name} k3v9m2x7qa")
        verb.add_argument("id", metavar="ID", help="as `gpushare admin leases` shows it")
        verb.set_defaults(action=action)
        if action == "stop":
            verb.add_argument("--yes", action="store_true", help="do not ask")
    priority = add_verb(
        settings,
        "priority",
        administer.priority,
        "raise or lower the priority of a job, beyond its project's right too",
        "gpushare admin priority k3v9m2x7qa 20",
    )
    priority.add_argument("id", metavar="JOB")
    priority.add_argument("priority", type=count(-100, 100), metavar="N", help="-100 to 100")


def _add_drains(settings: argparse._SubParsersAction[Parser]) -> None:
    drain = add_verb(
        settings,
        "drain",
        drains.drain,
        "let a GPU or the machine take nothing new, and ask owners there to finish",
        "gpushare admin drain                        which take nothing new, and what is still there",
        "gpushare admin drain GPU-5f2 --by 18:00     its UUID, or how that begins",
        "gpushare admin drain machine",
    )
    drain.add_argument("device", nargs="?", metavar="GPU", help="UUID, its beginning, or `machine` for all")
    drain.add_argument("--by", type=drains.time_of_day, metavar="TIME", help="like 18:00; stops nothing")
    undrain = add_verb(
        settings,
        "undrain",
        drains.undrain,
        "let a GPU or the machine take work again",
        "gpushare admin undrain machine",
    )
    undrain.add_argument("device", metavar="GPU", help="UUID, its beginning, or `machine` for all")
    release = add_verb(
        settings,
        "release",
        processes.release,
        "end a process that uses a GPU without a lease",
        "gpushare admin release           those that there are, and which are left alone",
        "gpushare admin release 4711      SIGTERM, and SIGKILL 5 s later; asks first",
    )
    release.add_argument(
        "pid", nargs="?", type=int, metavar="PID", help="as `gpushare admin release` shows it"
    )
    release.add_argument("--yes", action="store_true", help="do not ask")


def _add_owners(settings: argparse._SubParsersAction[Parser]) -> None:
    add_verb(
        settings,
        "owners",
        owners.owners,
        "owners of sessions and jobs that are absent from the Hub, or were made anew",
        "gpushare admin owners --json",
    )
    adopt = add_verb(
        settings,
        "adopt",
        owners.adopt,
        "give what belongs to such an owner to a user of the Hub",
        "gpushare admin adopt ada              to the ada of the Hub now",
        "gpushare admin adopt ada --to lovelace",
        "gpushare admin adopt --all            each to the present user of the name",
    )
    adopt.add_argument("--to", metavar="USER", help="another name at the Hub")
    end = add_verb(
        settings, "end", owners.end, "fail the waiting jobs of such an owner", "gpushare admin end ada"
    )
    end.add_argument("--yes", action="store_true", help="do not ask")
    for verb in (adopt, end):
        verb.add_argument("name", nargs="?", metavar="OWNER", help="as `gpushare admin owners` shows it")
        verb.add_argument("--all", action="store_true", help="all of them")


def _add_export(settings: argparse._SubParsersAction[Parser]) -> None:
    trace = add_verb(
        settings,
        "export",
        export.export,
        "what ran on this site, as a trace for `gpushare simulate`",
        "gpushare admin export jobs jobs.csv",
        "gpushare simulate jobs jobs.csv --gpus 8",
        "gpushare admin export cells cells.csv",
        "gpushare simulate notebooks cells.csv --gpus 8 --jobs jobs.csv --idle-timeout 900",
    )
    trace.add_argument("kind", choices=["jobs", "cells"], help="ended jobs, or the work of sessions")
    trace.add_argument("file", metavar="FILE", help="is made anew; -: the output")
    trace.add_argument("--names", action="store_true", help="of users and projects; else they are numbered")


def _add_usage(settings: argparse._SubParsersAction[Parser]) -> None:
    usage = add_verb(
        settings,
        "usage",
        administer.usage,
        "GPU-hours of all users, for chargeback",
        "gpushare admin usage                                this month, by user, project and GPU model",
        "gpushare admin usage --by project,month --since 2026-01-01",
        "gpushare admin usage --by user,day --user ada --csv",
    )
    usage.add_argument("--by", metavar="COLUMNS", help="of user, project, gpu and day or month, with commas")
    usage.add_argument("--since", metavar="DAY", help="the first, like 2026-11-01 (UTC)")
    usage.add_argument("--until", metavar="DAY", help="the last (default: today)")
    usage.add_argument("--user", metavar="NAME", help="only of this user")
    usage.add_argument("--project", metavar="P", help="only of this project")
    usage.add_argument("--csv", action="store_true", help="print CSV")
