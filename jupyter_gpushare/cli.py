"""The command line: ``gpushare status``, ``submit``, ``jobs``, ``logs``, ...

Exit codes: 0 done, 1 refused (or the job did not succeed) with a reason,
2 usage, 3 the broker does not answer.  What was asked for goes to standard
output, everything else to standard error.  With ``--json`` both are JSON.

Verbs that talk to the broker need its address and a token: from ``--url`` and
``--token``, else from the environment that the Hub's spawner gives to every
server.  Start-up stays light: what a verb needs is imported by that verb.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jupyter_gpushare import __version__, wire
from jupyter_gpushare.core.model import Survival
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError, RequestError
from jupyter_gpushare.joblog import ENDED
from jupyter_gpushare.words import duration, gigabytes

if TYPE_CHECKING:
    from jupyter_gpushare.client import SyncBrokerClient

EXIT_OK, EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
EXIT_INTERRUPTED = 130  # as shells count SIGINT

API_PATH = "/services/gpushare/api/v1"

# A broker that restarts is back within seconds; one that is upgraded within minutes.
PATIENCE_S = 300.0
POLL_S = 1.0

# Verbs with command lines of their own.
SERVICES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "simulate": ("jupyter_gpushare.sim.run", "replay a trace against the policy"),
        "broker": ("jupyter_gpushare.broker.app", "run the broker (a JupyterHub service)"),
        "helper": ("jupyter_gpushare.gpu.helper", "run the device helper of a GPU machine"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code (see the module's text)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SERVICES:
        module = importlib.import_module(SERVICES[words[0]][0])
        return int(module.main(words[1:]) or EXIT_OK)
    words, command = _split_command(words)
    args = _parser().parse_args(words)
    if command is not None:
        if args.command:
            args.parser.error(
                f"{args.command[0]!r} stands before --; options come first, then -- and the command"
            )
        args.command = command
    try:
        return int(args.run(args))
    except RequestError as error:
        _complain(args, error.status, error.reason, str(error))
        return EXIT_REFUSED
    except BrokerUnavailable as error:
        _complain(args, error.status, "unreachable", str(error))
        return EXIT_UNREACHABLE
    except GpuShareError as error:
        _complain(args, 500, "failed", str(error))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


# ---- what people type --------------------------------------------------------


def _split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the words for argparse, and what follows ``--`` in ``submit`` (None: no ``--``)."""
    if words[:1] == ["submit"] and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpushare",
        description="Shared GPUs: what is mine, what waits, what runs.",
        epilog="Exit codes: 0 done, 1 refused with a reason, 2 usage, 3 the broker does not answer.",
    )
    parser.add_argument("--version", action="version", version=f"gpushare {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_reading_verbs(verbs)
    _add_submit(verbs)
    for name, (_, text) in SERVICES.items():
        verbs.add_parser(name, help=text, add_help=False)
    return parser


def _add_reading_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _verb(verbs, "status", _status, "my GPUs, my projects, my jobs", "gpushare status --json")
    jobs = _verb(verbs, "jobs", _jobs, "my training jobs, newest first", "gpushare jobs --limit 50")
    jobs.add_argument(
        "--limit", type=_count(1, 1_000), default=20, metavar="N", help="at most N (default 20)"
    )
    logs = _verb(
        verbs,
        "logs",
        _logs,
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
        verbs, "cancel", _cancel, "take a job out of the queue, or stop it", "gpushare cancel k3v9m2x7qa"
    )
    cancel.add_argument("id", metavar="ID", help="of the job, as `gpushare jobs` shows it")
    _verb(
        verbs,
        "doctor",
        _doctor,
        "check that GPUs, limits and the broker work here",
        "gpushare doctor",
        "gpushare doctor --json",
    )


def _add_submit(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    submit = _verb(
        verbs,
        "submit",
        _submit,
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
    submit.add_argument(
        "--project", metavar="P", help="whose quota it uses (default: yours, if there is one)"
    )
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
    run: Callable[[argparse.Namespace], int],
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
    verb.set_defaults(run=run, parser=verb, command=[])
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


# ---- verbs -------------------------------------------------------------------


def broker_url(given: str) -> str:
    """Return the base of the broker's API for what a user gave: that, or the Hub's address."""
    url = given.rstrip("/")
    if url.endswith("/api/v1"):
        return url
    return url + ("/api/v1" if url.endswith("/services/gpushare") else API_PATH)


def _token(args: argparse.Namespace) -> str:
    return args.token or os.environ.get("GPUSHARE_API_TOKEN") or os.environ.get("JUPYTERHUB_API_TOKEN", "")


def _connect(args: argparse.Namespace) -> SyncBrokerClient:
    from jupyter_gpushare.client import SyncBrokerClient

    url = args.url or os.environ.get("GPUSHARE_API_URL", "")
    if urlsplit(url).scheme not in ("http", "https"):
        args.parser.error(
            f"{url!r} is not the address of a broker: give --url http://... or set GPUSHARE_API_URL"
            if url
            else "no broker address: give --url, or set GPUSHARE_API_URL (servers of the Hub have it)"
        )
    token = _token(args)
    if not token:
        args.parser.error(
            "no token: give --token, or set GPUSHARE_API_TOKEN (make one on the Hub's token page)"
        )
    return SyncBrokerClient(broker_url(url), token)


def _status(args: argparse.Namespace) -> int:
    with closing(_connect(args)) as client:
        status = client.get("status", wire.Status)
    if args.json:
        _print_json(status)
        return EXIT_OK
    if not status.leases:
        print("No GPU is held.")
    for lease in status.leases:
        where = "" if lease.server == "" else f" ({lease.server})"
        used = f"{gigabytes(lease.memory_used_bytes)} of {gigabytes(lease.memory_limit_bytes)}"
        print(
            _clean(
                f"{lease.size}{where}  {used}  {lease.badge}  project {lease.project}, held by {lease.level}"
            )
        )
        print(_clean(f"  {lease.sentence}"))
    if not status.devices_known:
        print("The device helper does not answer: memory figures may be old.")
    if status.projects:
        print()
        _print_table(
            ["PROJECT", "GUARANTEED", "IN USE", "BORROWED", "LENT", "IN RAM", "WAITING"],
            [
                [
                    p.name,
                    *map(_gpus, (p.quota_milli, p.in_use_milli, p.borrowed_milli, p.lent_milli)),
                    gigabytes(p.saved_bytes) if p.saved_bytes else "-",
                    str(p.waiting),
                ]
                for p in status.projects
            ],
        )
    unfinished = [job for job in status.jobs if job.state not in ENDED]
    if unfinished:
        print()
        _print_jobs(unfinished)
    return EXIT_OK


def _jobs(args: argparse.Namespace) -> int:
    with closing(_connect(args)) as client:
        answer = client.get("jobs", wire.JobList, params={"limit": args.limit})
    if args.json:
        _print_json(answer)
    elif answer.jobs:
        _print_jobs(answer.jobs)
    else:
        print("No jobs.  `gpushare submit -- COMMAND` queues one.")
    return EXIT_OK


def _submit(args: argparse.Namespace) -> int:
    if not args.command or not args.command[0]:
        args.parser.error("what is to run?  Put it behind --, like: gpushare submit -- python train.py")
    request = wire.JobRequest(
        command=args.command,
        gpus=args.gpus if args.gpus is not None else "1",
        memory=args.memory,
        profile=args.profile,
        project=args.project,
        name=args.name,
        checkpoint=args.checkpoint,
        borrow=args.borrow,
        notify=args.notify,
        cwd=_working_directory(args),
        env=dict(args.env),
        priority=args.priority,
        retries=args.retries,
        grace_s=args.grace,
    )
    with closing(_connect(args)) as client:
        # The key makes a repeated request the same job.
        job = client.post("jobs", request, wire.Job, key=uuid.uuid4().hex)
        if args.wait:
            _note(_line(job))
            job = _wait(client, job)
    _print_job(args, job)
    return EXIT_REFUSED if args.wait and job.state != "succeeded" else EXIT_OK


def _working_directory(args: argparse.Namespace) -> str:
    """Return the absolute directory; inside a server of the Hub it must exist (usage error)."""
    try:
        path = Path.cwd() / Path(args.cwd or ".").expanduser()
    except (OSError, RuntimeError) as error:
        args.parser.error(f"the directory to run in cannot be told ({error}); give --cwd with a whole path")
    # From elsewhere it is a directory of another machine, which the runner checks.
    here = args.cwd is None or "JUPYTERHUB_USER" in os.environ or not Path(args.cwd).is_absolute()
    if here and not path.is_dir():
        args.parser.error(f"there is no directory {str(path)!r} to run in")
    return os.path.normpath(path)


def _wait(client: SyncBrokerClient, job: wire.Job) -> wire.Job:
    """Return the job once it has ended; says on standard error what happens to it."""
    try:
        while job.state not in ENDED:
            time.sleep(POLL_S)
            before, job = job, _patiently(client, job.id)
            if (job.state, job.reason) != (before.state, before.reason):
                _note(_line(job))
    except KeyboardInterrupt:
        _note(f"The job goes on; `gpushare cancel {job.id}` stops it.")
        raise
    return job


def _patiently(client: SyncBrokerClient, job_id: str) -> wire.Job:
    """Return the job as it is now, waiting for a broker that is away for `PATIENCE_S` at most."""
    until = time.monotonic() + PATIENCE_S
    told = False
    while True:
        try:
            return client.get(f"jobs/{job_id}", wire.Job)
        except BrokerUnavailable as error:
            if time.monotonic() >= until:
                raise
            if not told:
                _note(f"{error}; the job goes on, asking again")
                told = True
        time.sleep(POLL_S)


def _logs(args: argparse.Namespace) -> int:
    from jupyter_gpushare import joblog

    job_id = _job_id(args)
    with closing(_connect(args)) as client:
        try:
            job = client.get(f"jobs/{job_id}", wire.Job)
        except BrokerUnavailable as error:
            if not joblog.directory(job_id).is_dir():
                raise
            _note(f"{error}; showing what is there")
            job = None
        hub_url = _hub_url(client.url)
        source = joblog.source(job_id, job, hub_url=hub_url, token=_token(args), only=args.attempt)
        printer = joblog.Printer(args.json)
        while True:
            # The state is older than what is read: what an ended job printed is all there.
            follows = args.follow and source.job is not None and source.job.state not in ENDED
            if not printer.print(source.read_on()):
                if not follows:
                    break
                time.sleep(POLL_S)
            if follows:
                source.job = _patiently(client, job_id)
    printer.finish()
    if source.job is not None and (args.follow or not printer.attempts):
        _note(_line(source.job))
    return EXIT_OK


def _hub_url(api_url: str) -> str:
    """Return the address of the Hub's proxy, if the broker is reached through it; else ""."""
    return api_url.removesuffix(API_PATH) if api_url.endswith(API_PATH) else ""


def _cancel(args: argparse.Namespace) -> int:
    job_id = _job_id(args)
    with closing(_connect(args)) as client:
        job = client.delete(f"jobs/{job_id}", wire.Job, repeatable=True)
    _print_job(args, job)
    return EXIT_OK


def _job_id(args: argparse.Namespace) -> str:
    """Return the id, which becomes part of an address and of a path."""
    given = str(args.id)
    if not (given.isascii() and given.isalnum() and len(given) <= 40):
        args.parser.error(f"{given[:60]!r} is not the id of a job; `gpushare jobs` lists them")
    return given


def _doctor(args: argparse.Namespace) -> int:
    from jupyter_gpushare import doctor

    url = args.url or os.environ.get("GPUSHARE_API_URL", "")
    checks = doctor.examine(broker_url(url) if url else "", _token(args), os.environ)
    if args.json:
        _print_json({"ok": not any(c.result is doctor.Result.FAIL for c in checks), "checks": checks})
    else:
        width = max(len(c.name) for c in checks)
        for check in checks:
            print(_clean(f"{check.result:<4}  {check.name:<{width}}  {check.message}"))
            if check.advice:
                print(_clean(f"      {'':<{width}}  -> {check.advice}"))
    if any(c.name == "broker" and c.result is doctor.Result.FAIL and url for c in checks):
        return EXIT_UNREACHABLE
    return EXIT_REFUSED if any(c.result is doctor.Result.FAIL for c in checks) else EXIT_OK


# ---- what people see ---------------------------------------------------------


def _print_json(answer: object) -> None:
    import msgspec

    print(msgspec.json.format(wire.encode(answer), indent=2).decode())


def _line(job: wire.Job) -> str:
    return _clean(f"{job.id}  {job.state}  {job.reason}".rstrip())


def _print_job(args: argparse.Namespace, job: wire.Job) -> None:
    if args.json:
        _print_json(job)
    else:
        print(_line(job))


def _print_jobs(jobs: Sequence[wire.Job]) -> None:
    _print_table(
        ["ID", "NAME", "STATE", "SIZE", "PROJECT", "WAITED", "RAN", ""],
        [
            [j.id, j.name, j.state, j.size, j.project, duration(j.waited_s), duration(j.ran_s), j.reason]
            for j in jobs
        ],
    )


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    table = [head, *([_clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _clean(text: str) -> str:
    """Return text that moves no cursor: names come from other people."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _gpus(milli: int) -> str:
    return f"{milli / 1000:g}"


def _note(text: str) -> None:
    print(_clean(text.rstrip()), file=sys.stderr, flush=True)


def _complain(args: argparse.Namespace, status: int, reason: str, message: str) -> None:
    if getattr(args, "json", False):
        answer = wire.ErrorAnswer(status=status, reason=reason, message=message)
        print(wire.encode(answer).decode(), file=sys.stderr)
    else:
        _note(f"gpushare: {message}")


if __name__ == "__main__":
    sys.exit(main())
