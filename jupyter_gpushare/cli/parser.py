"""The verbs of the command line, with their options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from jupyter_gpushare import __version__
from jupyter_gpushare.cli import administer, verbs
from jupyter_gpushare.cli.administer import MODES
from jupyter_gpushare.cli.options import (
    JOB,
    MEMORY,
    OF_EVERY_VERB,
    PRIORITY,
    PROFILE,
    SERVER,
    YES,
    job_id,
    pair,
    seconds,
    yes_or_no,
)
from jupyter_gpushare.command_line import OneOf, Option, Parser, Verb, count
from jupyter_gpushare.core.model import CheckpointMode

# ---- the verbs of `gpushare admin`, with their options -----------------------

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
        administer.drain,
        Option("[GPU]", _GPU, dest="device"),
        Option("--by TIME", "like 18:00; stops nothing", administer.time_of_day),
    ),
    Verb(administer.undrain, Option("GPU", _GPU, dest="device")),
    Verb(administer.release, Option("[PID]", "as `gpushare admin release` shows it", int), YES),
    Verb(administer.owners),
    Verb(administer.adopt, Option("--to USER", "another name at the Hub"), *_OWNER),
    Verb(administer.end, YES, *_OWNER),
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
        administer.export,
        Option("kind", "ended jobs, or the work of sessions", ["jobs", "cells"]),
        Option("FILE", "a new file; -: standard output"),
        Option("--names", "of users and projects; else they are numbered"),
    ),
    Verb(
        administer.quota,
        Option("[PROJECT]"),
        Option("--quota G", "guaranteed GPUs", float),
        Option("--weight N", "share of what is over", count(0, 1_000)),
        Option("--limit G", "maximum number of GPUs that it may hold", float),
        Option("--priority-max N", "highest priority that members give to jobs", count(0, 100)),
        Option("--force", "also more than the machine has"),
        Option("--reset", "take all changes back"),
    ),
)


# ---- users -------------------------------------------------------------------

_SUBMIT: tuple[Option | OneOf, ...] = (
    Option("-p --parameter NAME=VALUE ...", "of the notebook; may be repeated", pair, dest="parameters"),
    OneOf(Option("--gpus G", "0.5, 1/4 or 2; several are given together (default 1)"), MEMORY, PROFILE),
    Option("--project P", "project to charge (default: the first of yours)"),
    Option("--name N", "for people (default: from the command)"),
    Option(
        "--checkpoint MODE",
        "when its GPU is needed: suspend (default) moves its GPU memory to RAM and goes on later;"
        " sigterm stops it with grace, and it starts again from its own checkpoint; suspend,sigterm"
        " suspends it, or stops it where that is better; none: it starts again from the beginning",
        [mode.value for mode in CheckpointMode],
        default=CheckpointMode.SUSPEND.value,
    ),
    Option(
        "--no-borrow",
        "start only on what the project is guaranteed, never on GPUs that are lent or over its quota",
        dest="borrow",
        action="store_false",
    ),
    Option(
        "--no-move",
        "once suspended, resume only on the GPUs that it had, for a program that remembers them",
        dest="move",
        action="store_false",
    ),
    Option(
        "--share yes|no",
        "whether it may share a GPU with another job, where the site lets jobs do so (default no): as a host"
        " it has a guest in what it leaves unused, which gives way as soon as it needs that; as a guest it"
        " runs in what another job leaves, until there is a GPU for it alone",
        yes_or_no,
        default=False,
    ),
    Option("--no-notify", "no notification in JupyterLab", dest="notify", action="store_false"),
    Option("--notify URL", "webhook for the job to tell", dest="notify_url", default=""),
    Option("--mail", "mail me as well, where the site sends mail", dest="notify_mail"),
    Option("--cwd D", "where it runs (default: here)"),
    Option("--env K=V ...", "may be repeated", pair),
    Option("--priority N", "within the project", PRIORITY, default=0),
    Option("--retries N", "after a failure (0 to 10)", count(0, 10), default=0),
    Option("--grace S", "seconds between SIGTERM and SIGKILL", float, dest="grace_s"),
    Option(
        "--max-run TIME",
        "stop it after this run time, like 30m, 4h or 2d; pauses do not count",
        seconds,
        dest="max_run_s",
    ),
    Option("--wait", "until it ends; exit code 1 if it did not succeed"),
    Option("command", argparse.SUPPRESS, nargs=argparse.REMAINDER),
)
# Options of `submit` that have no value.
_FLAGS = {
    each.usage
    for each in (*OF_EVERY_VERB, *_SUBMIT)
    if isinstance(each, Option) and each.kind is None and " " not in each.usage
}

VERBS = (
    Verb(verbs.status),
    Verb(verbs.jobs, Option("--limit N", "at most N (default 20)", count(1, 1_000), default=20)),
    Verb(
        verbs.logs,
        Option("-f --follow", "continue until the job ends, over all attempts"),
        Option("--attempt N", "only this attempt (default: all)", count(1, 1_000_000)),
        JOB,
    ),
    Verb(verbs.retry, JOB),
    Verb(verbs.show, JOB),
    Verb(verbs.cancel, Option("ID ...", "of the jobs, as `gpushare jobs` shows them", job_id, dest="ids")),
    Verb(
        verbs.edit,
        JOB,
        OneOf(Option("--gpus G", "0.5, 1/4 or 2; several are given together"), MEMORY, PROFILE),
        Option("--project P", "it goes to the end of that project's queue"),
        Option("--priority N", "within the project", PRIORITY),
        Option(
            "--max-run TIME",
            "like 30m, 4h or 2d; none: no maximum",
            lambda text: 0.0 if text == "none" else seconds(text),
            dest="max_run_s",
        ),
    ),
    Verb(
        verbs.move,
        JOB,
        OneOf(
            Option("--before JOB", "to start before this one", job_id),
            Option("--behind JOB", "to start after this one", job_id),
            Option("--up", "by one", dest="to", action="store_const", const="up"),
            Option("--down", "by one", dest="to", action="store_const", const="down"),
            Option("--first", "before all of mine", dest="to", action="store_const", const="first"),
            Option("--last", "behind all of mine", dest="to", action="store_const", const="last"),
            required=True,
        ),
    ),
    Verb(verbs.wake, SERVER),
    Verb(
        verbs.keep,
        Option("--minutes N", "default 30; 0: not any more", count(0, 1_440), default=30),
        SERVER,
    ),
    Verb(verbs.lend, SERVER),
    Verb(
        verbs.resize,
        OneOf(
            Option("--gpus G", "a part of the GPU like 0.5 or 1/4; 1: all of it"),
            Option("--memory SIZE", "GPU memory instead, like 20GiB"),
            required=True,
        ),
        Option("--borrow", "it may sleep when others need the GPU, if it is over the quota"),
        SERVER,
    ),
    Verb(verbs.usage),
    Verb(verbs.sleep, Option("may", kind=["never", "allow"]), SERVER),
    Verb(
        verbs.doctor,
        Option("--site", "check the configuration of Hub and broker"),
        Option(
            "--hub-config FILE",
            "of the Hub (default: %(default)s)",
            Path,
            default=Path("/etc/jupyterhub/jupyterhub_config.py"),
        ),
        Option(
            "--broker-config FILE",
            "of the broker (default: %(default)s)",
            Path,
            default=Path("/etc/gpushare/broker_config.py"),
        ),
    ),
    Verb(
        verbs.submit,
        *_SUBMIT,
        usage="gpushare submit [options] -- COMMAND [ARGUMENT ...]\n"
        "       gpushare submit [options] NOTEBOOK.ipynb [-p NAME=VALUE ...]",
    ),
)


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the words for argparse, and the words after ``--`` of ``submit`` (None without ``--``).

    Without ``--`` a notebook is moved to the end, so that options may precede and follow it.
    """
    if words[:1] != ["submit"]:
        return words, None
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    for at, word in enumerate(words):
        is_value = words[at - 1].startswith("-") and words[at - 1] not in _FLAGS
        if word.endswith(".ipynb") and not is_value:
            return [*words[:at], *words[at + 1 :], word], None
    return words, None


def parser(services: Mapping[str, tuple[str, str]]) -> argparse.ArgumentParser:
    """Return the parser of all verbs; ``services`` has the module and the help text of services by name."""
    parser = Parser(
        prog="gpushare",
        description="Shared GPUs: what is mine, what waits, what runs.",
        examples=[
            "gpushare status",
            "gpushare submit --gpus 0.5 -- python train.py",
            "gpushare jobs",
            "gpushare submit --help",
        ],
        after="Options stand behind the verb.  Exit codes: 0 done, 1 refused with a reason,\n"
        "2 usage, 3 the broker does not answer.",
    )
    parser.add_argument("--version", action="version", version=f"gpushare {__version__}")
    verbs = parser.add_verbs(VERBS, *OF_EVERY_VERB)
    admin = verbs.add_parser(
        "admin",
        help="what administrators change while users work",
        description="What administrators change while users work.",
        examples=[
            "gpushare admin leases",
            "gpushare admin drain machine --by 18:00",
            "gpushare admin usage --csv",
            "gpushare admin drain --help",
        ],
    )
    admin.add_verbs(ADMIN, *OF_EVERY_VERB)
    for name, (_, text) in services.items():
        verbs.add_parser(name, help=text, add_help=False)
    return parser
