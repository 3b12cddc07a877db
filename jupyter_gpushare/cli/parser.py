"""What people type: verbs and options, with an example of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from jupyter_gpushare import __version__
from jupyter_gpushare.cli import verbs as run
from jupyter_gpushare.core.model import Survival


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the words for argparse, and what follows ``--`` in ``submit`` (None: no ``--``)."""
    if words[:1] == ["submit"] and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, None


def parser(services: Mapping[str, tuple[str, str]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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


def _add_reading_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _verb(verbs, "status", run.status, "my GPUs, my projects, my jobs", "gpushare status --json")
    jobs = _verb(verbs, "jobs", run.jobs, "my training jobs, newest first", "gpushare jobs --limit 50")
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
    cancel = _verb(
        verbs, "cancel", run.cancel, "take a job out of the queue, or stop it", "gpushare cancel k3v9m2x7qa"
    )
    cancel.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    _verb(
        verbs,
        "doctor",
        run.doctor,
        "check that GPUs, limits and the broker work here",
        "gpushare doctor",
        "gpushare doctor --json",
    )


def _add_submit(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = _verb(
        verbs,
        "submit",
        run.submit,
        "queue a command as a training job",
        "gpushare submit -- python train.py --epochs 10",
        "gpushare submit --gpus 0.5 --name night --wait -- python train.py",
        "gpushare submit --gpus 2 --project nlp --checkpoint sigterm --retries 3 -- ./train.sh",
        usage="gpushare submit [options] -- COMMAND [ARGUMENT ...]",
    )
    size = submit.add_mutually_exclusive_group()
    size.add_argument(
        "--gpus", default=None, metavar="G", help="0.5, 1/4 or 2; several are given together (default 1)"
    )
    size.add_argument("--memory", metavar="SIZE", help="GPU memory of one device instead, like 20GiB")
    size.add_argument("--profile", metavar="NAME", help="one MIG instance instead, like 1g.10gb")
    submit.add_argument("--project", metavar="P", help="whose quota it uses (default: the first of yours)")
    submit.add_argument("--name", metavar="N", help="for people (default: from the command)")
    submit.add_argument(
        "--checkpoint",
        type=Survival,
        choices=list(Survival),
        default=Survival.SUSPEND,
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
        "--wait", action="store_true", help="until it ends; exit code 1 if it did not succeed"
    )
    submit.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
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


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
