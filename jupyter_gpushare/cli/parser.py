"""Parsers of the command line: verbs and options, with an example of each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from jupyter_gpushare import __version__
from jupyter_gpushare.cli import queue, sessions
from jupyter_gpushare.cli import verbs as run
from jupyter_gpushare.cli.admin_parser import add_admin_verbs
from jupyter_gpushare.cli.options import Parser, add_verb, count, limit, pair, seconds
from jupyter_gpushare.core.model import CheckpointMode

# Options of `submit` that have no value.
_FLAGS = frozenset({"--wait", "--json", "--no-borrow", "--no-notify", "--mail"})


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
        epilog="examples:\n"
        "  gpushare status\n"
        "  gpushare submit --gpus 0.5 -- python train.py\n"
        "  gpushare jobs\n"
        "  gpushare submit --help\n\n"
        "Options stand behind the verb.  Exit codes: 0 done, 1 refused with a reason,\n"
        "2 usage, 3 the broker does not answer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpushare {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_reading_verbs(verbs)
    _add_submit(verbs)
    for name, (_, text) in services.items():
        verbs.add_parser(name, help=text, add_help=False)
    return parser


def _add_reading_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    add_verb(
        verbs,
        "status",
        run.status,
        "my GPUs, my projects, my jobs",
        "gpushare status",
        "gpushare status --json",
    )
    jobs = add_verb(verbs, "jobs", run.jobs, "my training jobs, the next first", "gpushare jobs --limit 50")
    jobs.add_argument("--limit", type=count(1, 1_000), default=20, metavar="N", help="at most N (default 20)")
    logs = add_verb(
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
        "--attempt", type=count(1, 1_000_000), metavar="N", help="only this attempt (default: all)"
    )
    logs.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    retry = add_verb(
        verbs, "retry", run.retry, "submit a job again that has ended", "gpushare retry k3v9m2x7qa"
    )
    retry.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    show = add_verb(
        verbs, "show", run.show, "one job, with every pause and its reason", "gpushare show k3v9m2x7qa"
    )
    show.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    _add_queue_verbs(verbs)
    _add_session_verbs(verbs)
    _add_lease_verbs(verbs)
    doctor = add_verb(
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
        "--hub-config",
        type=Path,
        default=Path("/etc/jupyterhub/jupyterhub_config.py"),
        metavar="FILE",
        help="of the Hub (default: %(default)s)",
    )
    doctor.add_argument(
        "--broker-config",
        type=Path,
        default=Path("/etc/gpushare/broker_config.py"),
        metavar="FILE",
        help="of the broker (default: %(default)s)",
    )


def _add_queue_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    cancel = add_verb(
        verbs,
        "cancel",
        queue.cancel,
        "take jobs out of the queue, or stop them",
        "gpushare cancel k3v9m2x7qa",
        "gpushare cancel k3v9m2x7qa p4w8n1y6rb",
    )
    cancel.add_argument("ids", nargs="+", metavar="ID", help="of the jobs, as `gpushare jobs` shows them")
    edit = add_verb(
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
    edit.add_argument("--priority", type=count(-100, 100), metavar="N", help="within the project")
    edit.add_argument("--max-run", type=limit, metavar="TIME", help="like 30m, 4h or 2d; none: no maximum")
    move = add_verb(
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
    wake = add_verb(verbs, "wake", sessions.wake, "get the GPU of my sleeping session back", "gpushare wake")
    keep = add_verb(
        verbs,
        "keep",
        sessions.keep,
        "keep the GPU of my idle session for a while, out of today's budget",
        "gpushare keep",
        "gpushare keep --minutes 60",
        "gpushare keep --minutes 0         undo it",
    )
    keep.add_argument(
        "--minutes", type=count(0, 1_440), default=30, metavar="N", help="default 30; 0: not any more"
    )
    lend = add_verb(verbs, "lend", sessions.lend, "lend the GPU of my session now", "gpushare lend")
    resize = add_verb(
        verbs,
        "resize",
        sessions.resize,
        "make the part of a GPU of my running session larger or smaller",
        "gpushare resize --gpus 1/2",
        "gpushare resize --memory 20GiB",
        "gpushare resize --gpus 1 --borrow     also beyond what my project is guaranteed",
    )
    size = resize.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpus", metavar="G", help="a part of the GPU like 0.5 or 1/4; 1: all of it")
    size.add_argument("--memory", metavar="SIZE", help="GPU memory instead, like 20GiB")
    resize.add_argument(
        "--borrow", action="store_true", help="it may sleep when others need the GPU, if it is over the quota"
    )
    for verb in (wake, keep, lend, resize):
        verb.add_argument("--server", metavar="NAME", help="name of the server (default: this one)")
    add_verb(
        verbs,
        "usage",
        sessions.usage,
        "my GPU-hours of the last seven days",
        "gpushare usage",
        "gpushare usage --json",
    )


def _add_lease_verbs(verbs: argparse._SubParsersAction[Parser]) -> None:
    sleep = add_verb(
        verbs,
        "sleep",
        sessions.sleep,
        "whether my sessions may be put to sleep",
        "gpushare sleep never            this server keeps its GPU, if its project has that right",
        "gpushare sleep allow",
    )
    sleep.add_argument("may", choices=["never", "allow"])
    sleep.add_argument("--server", metavar="NAME", help="name of the server (default: this one)")
    add_admin_verbs(verbs)


def _add_submit(verbs: argparse._SubParsersAction[Parser]) -> None:
    submit = add_verb(
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
        type=pair,
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
        choices=[mode.value for mode in CheckpointMode],
        default=CheckpointMode.SUSPEND.value,
        help="when its GPU is needed: suspend (default) moves its GPU memory to RAM and goes on later;"
        " sigterm stops it with grace, and it starts again from its own checkpoint; none: from the beginning",
    )
    submit.add_argument(
        "--no-borrow",
        dest="borrow",
        action="store_false",
        help="start only on what the project is guaranteed, never on GPUs that are lent or over its quota",
    )
    submit.add_argument(
        "--no-notify", dest="notify", action="store_false", help="no notification in JupyterLab"
    )
    submit.add_argument(
        "--notify", dest="notify_url", default="", metavar="URL", help="webhook for the job to tell"
    )
    submit.add_argument("--mail", action="store_true", help="mail me as well, where the site sends mail")
    submit.add_argument("--cwd", metavar="D", help="where it runs (default: here)")
    submit.add_argument(
        "--env", metavar="K=V", action="append", default=[], type=pair, help="may be repeated"
    )
    submit.add_argument(
        "--priority", type=count(-100, 100), default=0, metavar="N", help="within the project"
    )
    submit.add_argument(
        "--retries", type=count(0, 10), default=0, metavar="N", help="after a failure (0 to 10)"
    )
    submit.add_argument("--grace", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL")
    submit.add_argument(
        "--max-run",
        type=seconds,
        metavar="TIME",
        help="stop it after so much run time, like 30m, 4h or 2d; pauses do not count",
    )
    submit.add_argument(
        "--wait", action="store_true", help="until it ends; exit code 1 if it did not succeed"
    )
    submit.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
