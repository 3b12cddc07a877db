"""Parsers of the command line: verbs and options, with an example of each."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from jupyter_gpushare import __version__
from jupyter_gpushare.cli import administer, queue, sessions
from jupyter_gpushare.cli import verbs as run
from jupyter_gpushare.cli.administer import MODES
from jupyter_gpushare.core.model import CheckpointMode

_INVALID_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
# As JupyterLab's dialog reads them (`ui/src/times.ts`).
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
# Options of `submit` that have no value.
_FLAGS = frozenset({"--wait", "--json", "--no-borrow", "--no-notify"})


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the closest verb for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2, the usage and the message; a misspelt verb gets a suggestion."""
        if unknown := _INVALID_CHOICE.search(message):
            near = difflib.get_close_matches(unknown[1], re.findall(r"[\w-]+", unknown[2]), 1)
            message += f": did you mean {near[0]}?" if near else ""
        super().error(message)


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the words for argparse, and what follows ``--`` in ``submit`` (None: no ``--``).

    Without ``--`` a notebook comes last, so that its options may stand on both sides of it.
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
    """Return the parser of all verbs; ``services``: the help text (second) of each service by name."""
    parser = Parser(
        prog="gpushare",
        description="Shared GPUs: what is mine, what waits, what runs.",
        epilog="Exit codes: 0 done, 1 refused with a reason, 2 usage, 3 the broker does not answer.",
    )
    parser.add_argument("--version", action="version", version=f"gpushare {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_reading_verbs(verbs)
    _add_submit(verbs)
    for name, (_, text) in services.items():
        verbs.add_parser(name, help=text, add_help=False)
    return parser


def _add_reading_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    _verb(verbs, "status", run.status, "my GPUs, my projects, my jobs", "gpushare status --json")
    jobs = _verb(verbs, "jobs", run.jobs, "my training jobs, the next first", "gpushare jobs --limit 50")
    jobs.add_argument(
        "--limit", type=_count(1, 1_000), default=20, metavar="N", help="at most N (default 20)"
    )
    logs = _verb(
        verbs,
        "logs",
        run.logs,
        "what a job printed",
        "gpushare logs k3v9m2x7qa",
        "gpushare logs -f k3v9m2x7qa        until the job ends",
        "gpushare logs --attempt 1 k3v9m2x7qa",
        json_help="one JSON object per line",
    )
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on until the job ends, over all attempts"
    )
    logs.add_argument(
        "--attempt", type=_count(1, 1_000_000), metavar="N", help="only this attempt (default: all)"
    )
    logs.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    retry = _verb(verbs, "retry", run.retry, "submit a job again that has ended", "gpushare retry k3v9m2x7qa")
    retry.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    show = _verb(
        verbs, "show", run.show, "one job, with every pause and its reason", "gpushare show k3v9m2x7qa"
    )
    show.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    _add_queue_verbs(verbs)
    _add_session_verbs(verbs)
    _add_lease_verbs(verbs)
    doctor = _verb(
        verbs,
        "doctor",
        run.doctor,
        "check that GPUs, limits and the broker work here",
        "gpushare doctor",
        "gpushare doctor --json",
        "gpushare doctor --site             before users come, as root",
    )
    doctor.add_argument("--site", action="store_true", help="check the configuration of Hub and broker")
    doctor.add_argument(
        "--hub-config", type=Path, default=Path("/etc/jupyterhub/jupyterhub_config.py"), metavar="FILE"
    )
    doctor.add_argument(
        "--broker-config", type=Path, default=Path("/etc/gpushare/broker_config.py"), metavar="FILE"
    )


def _add_queue_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    cancel = _verb(
        verbs,
        "cancel",
        queue.cancel,
        "take jobs out of the queue, or stop them",
        "gpushare cancel k3v9m2x7qa",
        "gpushare cancel k3v9m2x7qa p4w8n1y6rb",
    )
    cancel.add_argument("ids", nargs="+", metavar="ID", help="of the jobs, as `gpushare jobs` shows them")
    edit = _verb(
        verbs,
        "edit",
        queue.edit,
        "change what a job in the queue asks for",
        "gpushare edit k3v9m2x7qa --gpus 2",
        "gpushare edit k3v9m2x7qa --project nlp --priority -5",
        "gpushare edit k3v9m2x7qa --max-run 4h      none: no maximum",
    )
    edit.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    size = edit.add_mutually_exclusive_group()
    size.add_argument("--gpus", metavar="G", help="0.5, 1/4 or 2; several are given together")
    size.add_argument("--memory", metavar="SIZE", help="GPU memory of one device instead, like 20GiB")
    size.add_argument("--profile", metavar="NAME", help="one MIG instance instead, like 1g.10gb")
    edit.add_argument("--project", metavar="P", help="it goes to the end of that project's queue")
    edit.add_argument("--priority", type=_count(-100, 100), metavar="N", help="within the project")
    edit.add_argument("--max-run", type=_limit, metavar="TIME", help="like 30m, 4h or 2d; none: no maximum")
    move = _verb(
        verbs,
        "move",
        queue.move,
        "move a job in the queue among my own of its project and priority",
        "gpushare move k3v9m2x7qa --before p4w8n1y6rb",
        "gpushare move k3v9m2x7qa --up",
    )
    move.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    place = move.add_mutually_exclusive_group(required=True)
    place.add_argument("--before", metavar="JOB", help="to start before this one")
    place.add_argument("--behind", metavar="JOB", help="to start after this one")
    for to, text in (
        ("up", "by one"),
        ("down", "by one"),
        ("first", "before all of mine"),
        ("last", "behind all of mine"),
    ):
        place.add_argument(f"--{to}", dest="to", action="store_const", const=to, help=text)


def _add_session_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    wake = _verb(verbs, "wake", sessions.wake, "get the GPU of my sleeping session back", "gpushare wake")
    keep = _verb(
        verbs,
        "keep",
        sessions.keep,
        "keep the GPU of my idle session for a while, out of today's budget",
        "gpushare keep",
        "gpushare keep --minutes 60",
        "gpushare keep --minutes 0         undo it",
    )
    keep.add_argument(
        "--minutes", type=_count(0, 1_440), default=30, metavar="N", help="default 30; 0: not any more"
    )
    lend = _verb(verbs, "lend", sessions.lend, "lend the GPU of my session now", "gpushare lend")
    for verb in (wake, keep, lend):
        verb.add_argument("--server", metavar="NAME", help="name of the server (default: this one)")
    _verb(verbs, "usage", sessions.usage, "my GPU-hours of the last seven days", "gpushare usage --json")


def _add_lease_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    sleep = _verb(
        verbs,
        "sleep",
        sessions.sleep,
        "whether my sessions may be put to sleep",
        "gpushare sleep never            this server keeps its GPU, if its project has that right",
        "gpushare sleep allow",
    )
    sleep.add_argument("may", choices=["never", "allow"])
    sleep.add_argument("--server", metavar="NAME", help="name of the server (default: this one)")
    text = "what administrators change while users work"
    admin = verbs.add_parser("admin", help=text, description=f"{text.capitalize()}.")
    settings = admin.add_subparsers(metavar="SETTING", required=True)
    lending = _verb(
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
    _add_usage(settings)
    quota = _verb(
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
    quota.add_argument("--weight", type=_count(0, 1_000), metavar="N", help="share of what is over")
    quota.add_argument("--limit", type=float, metavar="G", help="the most GPUs that it may hold")
    quota.add_argument("--force", action="store_true", help="also more than the machine has")
    quota.add_argument("--reset", action="store_true", help="take all changes back")


def _add_acts(settings: argparse._SubParsersAction[Parser]) -> None:
    _verb(
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
        verb = _verb(settings, name, administer.act, text, f"gpushare admin {name} k3v9m2x7qa")
        verb.add_argument("id", metavar="ID", help="as `gpushare admin leases` shows it")
        verb.set_defaults(action=action)
        if action == "stop":
            verb.add_argument("--yes", action="store_true", help="do not ask")
    priority = _verb(
        settings,
        "priority",
        administer.priority,
        "raise or lower the priority of a job, beyond its project's right too",
        "gpushare admin priority k3v9m2x7qa 20",
    )
    priority.add_argument("id", metavar="JOB")
    priority.add_argument("priority", type=_count(-100, 100), metavar="N", help="-100 to 100")


def _add_usage(settings: argparse._SubParsersAction[Parser]) -> None:
    usage = _verb(
        settings,
        "usage",
        administer.usage,
        "GPU-hours of all users, for chargeback",
        "gpushare admin usage                                this month, by user, project and GPU model",
        "gpushare admin usage --by project,month --since 2026-01-01",
        "gpushare admin usage --by user,day --user ada --csv",
    )
    usage.add_argument(
        "--by", metavar="COLUMNS", help="of user, project, gpu and one of day and month, with commas"
    )
    usage.add_argument("--since", metavar="DAY", help="the first, like 2026-11-01 (UTC)")
    usage.add_argument("--until", metavar="DAY", help="the last (default: today)")
    usage.add_argument("--user", metavar="NAME", help="only of this user")
    usage.add_argument("--project", metavar="P", help="only of this project")
    usage.add_argument("--csv", action="store_true", help="print CSV")


def _add_submit(verbs: argparse._SubParsersAction[Parser]) -> None:
    submit = _verb(
        verbs,
        "submit",
        run.submit,
        "queue a command or a notebook as a training job",
        "gpushare submit -- python train.py --epochs 10",
        "gpushare submit notebook.ipynb -p steps=5",
        "gpushare submit --gpus 0.5 --name night --wait -- python train.py",
        "gpushare submit --gpus 2 --project nlp --checkpoint sigterm --retries 3 -- ./train.sh",
        usage="gpushare submit [options] -- COMMAND [ARGUMENT ...]\n"
        "       gpushare submit [options] NOTEBOOK.ipynb [-p NAME=VALUE ...]",
    )
    submit.add_argument(
        "-p",
        "--parameter",
        dest="parameters",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_pair,
        help="of the notebook; may be repeated",
    )
    size = submit.add_mutually_exclusive_group()
    size.add_argument(
        "--gpus", default=None, metavar="G", help="0.5, 1/4 or 2; several are given together (default 1)"
    )
    size.add_argument("--memory", metavar="SIZE", help="GPU memory of one device instead, like 20GiB")
    size.add_argument("--profile", metavar="NAME", help="one MIG instance instead, like 1g.10gb")
    submit.add_argument("--project", metavar="P", help="project to charge (default: the first of yours)")
    submit.add_argument("--name", metavar="N", help="for people (default: from the command)")
    submit.add_argument(
        "--checkpoint",
        type=CheckpointMode,
        choices=list(CheckpointMode),
        default=CheckpointMode.SUSPEND,
        metavar="{suspend,sigterm,none}",
        help="when its GPU is needed: suspend (default) parks the GPU memory and goes on later; sigterm"
        " stops it with grace, it starts again from its own checkpoint; none: from the beginning",
    )
    submit.add_argument(
        "--no-borrow",
        dest="borrow",
        action="store_false",
        help="start only on what the project is guaranteed, never on GPUs that are lent or over its quota",
    )
    submit.add_argument(
        "--no-notify",
        dest="notify",
        action="store_false",
        help="no notification in JupyterLab when it is paused or ends",
    )
    submit.add_argument("--cwd", metavar="D", help="where it runs (default: here)")
    submit.add_argument(
        "--env", metavar="K=V", action="append", default=[], type=_pair, help="may be repeated"
    )
    submit.add_argument(
        "--priority", type=_count(-100, 100), default=0, metavar="N", help="within the project"
    )
    submit.add_argument(
        "--retries", type=_count(0, 10), default=0, metavar="N", help="after a failure (0 to 10)"
    )
    submit.add_argument("--grace", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL")
    submit.add_argument(
        "--max-run",
        type=_seconds,
        metavar="TIME",
        help="stop it after so much run time, like 30m, 4h or 2d; pauses do not count",
    )
    submit.add_argument(
        "--wait", action="store_true", help="until it ends; exit code 1 if it did not succeed"
    )
    submit.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _verb(
    verbs: argparse._SubParsersAction[Parser],
    name: str,
    does: Callable[[argparse.Namespace], int],
    text: str,
    *examples: str,
    usage: str | None = None,
    json_help: str = "print JSON",
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=text,
        usage=usage,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n  " + "\n  ".join(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help=json_help)
    verb.add_argument("--url", help="of the Hub or its broker (default: $GPUSHARE_API_URL)")
    verb.add_argument("--token", help="default: $GPUSHARE_API_TOKEN, else $JUPYTERHUB_API_TOKEN")
    verb.set_defaults(run=does, parser=verb, command=[])
    return verb


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time with its unit, like 30m, 4h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _limit(text: str) -> float:
    return 0.0 if text == "none" else _seconds(text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
