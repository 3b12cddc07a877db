"""The verbs that talk to the broker; each returns an exit code."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from jupyter_gpushare.cli.job_logs import ENDED
from jupyter_gpushare.cli.output import (
    complain,
    day_and_time,
    gpus,
    lines,
    note,
    print_job,
    print_jobs,
    print_json,
    print_table,
    say,
)
from jupyter_gpushare.core.model import CheckpointMode
from jupyter_gpushare.errors import BrokerUnavailable, NotFound, RequestError
from jupyter_gpushare.messages import duration, gibibytes, local, one_line, printable
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.channel import Address
    from jupyter_gpushare.client import BlockingClient

T = TypeVar("T")
Request: TypeAlias = "Callable[[BlockingClient, argparse.Namespace], T]"
Verb = Callable[[argparse.Namespace], int]

EXIT_OK, EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3

# A restart of the broker takes seconds, an upgrade takes minutes.
PATIENCE_S = 300.0
# Each request is repeated for this time, so that users do not notice a restart.
RETRY_S = 30.0
# After this time `logs` shows the existing files without the broker.
_LOGS_RETRY_S = 5.0
POLL_S = 1.0


def _token(args: argparse.Namespace) -> str:
    return args.token or os.environ.get("GPUSHARE_API_TOKEN") or os.environ.get("JUPYTERHUB_API_TOKEN", "")


def connect(args: argparse.Namespace, retry_s: float | None = None) -> BlockingClient:
    """Return a client of the broker in the options; exit with a usage error without address or token."""
    from jupyter_gpushare import channel
    from jupyter_gpushare.client import BlockingClient

    url = args.url or os.environ.get("GPUSHARE_API_URL", "")
    if urlsplit(url).scheme not in ("http", "https", channel.UNIX_SCHEME):
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
    pinned = "" if args.url else os.environ.get(channel.CERTIFICATE_VARIABLE, "")
    return BlockingClient(
        channel.api_url(url),
        token,
        certificate=pinned,
        retry_s=RETRY_S if retry_s is None else retry_s,
        waiting=note,
    )


def shown_by(show: Callable[[T], None]) -> Callable[[Request[T]], Verb]:
    """Turn a request to the broker into a verb; ``show`` prints the answer, unless ``--json`` is given."""

    def decorate(request: Request[T]) -> Verb:
        @functools.wraps(request)
        def run(args: argparse.Namespace) -> int:
            with closing(connect(args)) as client:
                answer = request(client, args)
            if args.json:
                print_json(answer)
            else:
                show(answer)
            return EXIT_OK

        return run

    return decorate


def confirm(args: argparse.Namespace, question: str) -> None:
    """Return if the user confirms or gave ``--yes``, else exit; without a terminal that is a usage error."""
    if args.yes:
        return
    if not sys.stdin.isatty():
        args.parser.error("without a terminal say --yes")
    print(printable(f"{question} [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        sys.exit(EXIT_REFUSED)


def fields_of(record: type[wire.Answer | wire.Message], args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are fields of a record."""
    return {name: value for name, value in vars(args).items() if name in record.__struct_fields__}


def _print_status(status: wire.Status) -> None:
    if not status.leases:
        print("No GPU is held.")
    for lease in status.leases:
        where = "" if lease.server == "" else f" ({lease.server})"
        used = f"{gibibytes(lease.memory_used_bytes)} of {gibibytes(lease.memory_limit_bytes)}"
        print(
            printable(
                f"{lease.size}{where}  {used}  {lease.badge}  project {lease.project}, held by {lease.level}"
            )
        )
        say(local(lease.sentence, lease.sentence_texts), indent="  ")
        if lease.share:
            say(local(lease.share, lease.share_texts), indent="  ")
    if not status.devices_known:
        print("The device helper does not answer: memory figures may be old.")
    if status.projects:
        print()
        print_table(
            ["PROJECT", "GUARANTEED", "IN USE", "BORROWED", "LENT", "IN RAM", "WAITING"],
            [
                [
                    p.name,
                    *map(gpus, (p.quota_milli, p.in_use_milli, p.borrowed_milli, p.lent_milli)),
                    gibibytes(p.saved_bytes) if p.saved_bytes else "-",
                    str(p.waiting),
                ]
                for p in status.projects
            ],
        )
    unfinished = [job for job in status.jobs if job.state not in ENDED]
    if unfinished:
        print()
        print_jobs(unfinished)


@shown_by(_print_status)
def status(client: BlockingClient, args: argparse.Namespace) -> wire.Status:
    """My GPUs, my projects, my jobs."""
    return client.get("status", wire.Status)


def _print_list(answer: wire.JobList) -> None:
    if answer.jobs:
        print_jobs(answer.jobs)
    else:
        print("No jobs.  `gpushare submit -- COMMAND` queues one.")


@shown_by(_print_list)
def jobs(client: BlockingClient, args: argparse.Namespace) -> wire.JobList:
    """My training jobs, the next first.

    gpushare jobs --limit 50
    """
    return client.get("jobs", wire.JobList, params={"limit": args.limit})


def submit(args: argparse.Namespace) -> int:
    """Queue a command or a notebook as a training job.

    gpushare submit -- python train.py --epochs 10
    gpushare submit notebook.ipynb -p steps=5
    gpushare submit --gpus 0.5 --name night --wait -- python train.py
    gpushare submit --share yes -- python train.py
    gpushare submit --gpus 2 --project nlp --checkpoint sigterm --retries 3 -- ./train.sh
    """
    if not args.command or not args.command[0]:
        args.parser.error("what is to run?  Put it behind --, like: gpushare submit -- python train.py")
    is_notebook = args.command[0].endswith(".ipynb") and len(args.command) == 1
    if args.parameters and not is_notebook:
        args.parser.error("-p is for notebooks, like: gpushare submit notebook.ipynb -p steps=5")
    request = wire.JobRequest(
        **fields_of(wire.JobRequest, args)
        | {
            "gpus": "1" if args.gpus is None else args.gpus,
            "checkpoint": CheckpointMode(args.checkpoint),
            "cwd": _working_directory(args),
            "env": dict(args.env),
        }
    )
    if is_notebook:
        request = _of_notebook(args, request)
    with closing(connect(args)) as client:
        # With the key a repeated request is the same job.
        job = client.post("jobs", request, wire.Job, key=uuid.uuid4().hex)
        if args.wait:
            note(*lines(job))
            job = _wait(client, job)
    # The only line on standard output.
    print_json(job) if args.json else print_job(job)
    return EXIT_REFUSED if args.wait and job.state != "succeeded" else EXIT_OK


def _of_notebook(args: argparse.Namespace, request: wire.JobRequest) -> wire.JobRequest:
    """Return the request with the command for the notebook, which JupyterLab's dialog uses too.

    Exit with a usage error outside a server of the Hub, or if the notebook does not exist.

    Raises:
        InvalidRequest: the request has parameters, and the notebook is not in Python.
    """
    from datetime import datetime

    from jupyter_gpushare.server import launch

    if "JUPYTERHUB_USER" not in os.environ:
        args.parser.error("a notebook can be submitted from a terminal or notebook of the Hub's servers only")
    file = Path(args.command[0]).expanduser().absolute()
    if not file.is_file():
        args.parser.error(f"there is no notebook {str(file)!r}")
    # The root of the user's files in JupyterLab, which opens the job's output from there.
    top = Path(os.environ.get("JUPYTERHUB_ROOT_DIR") or Path.home())
    root = top if file.is_relative_to(top) else Path(file.anchor)
    launched = wire.LaunchRequest(path=str(file.relative_to(root)), parameters=dict(args.parameters))
    job = launch.job_of(launched, root, (), os.environ, datetime.now())
    return wire.replace(
        request,
        command=job.command,
        name=request.name or job.name,
        cwd=request.cwd if args.cwd else job.cwd,
        env={**job.env, **request.env},
        source=job.source if root == top else None,
    )


def _working_directory(args: argparse.Namespace) -> str:
    """Return the absolute directory; exit with a usage error if it must be on this machine and is not."""
    try:
        path = Path.cwd() / Path(args.cwd or ".").expanduser()
    except (OSError, RuntimeError) as error:
        args.parser.error(f"the directory to run in is not known ({error}); give --cwd with a whole path")
    # Otherwise the directory may be on another machine, where the runner checks it.
    is_local = args.cwd is None or "JUPYTERHUB_USER" in os.environ or not Path(args.cwd).is_absolute()
    if is_local and not path.is_dir():
        args.parser.error(f"there is no directory {str(path)!r} to run in")
    return os.path.normpath(path)


def _wait(client: BlockingClient, job: wire.Job) -> wire.Job:
    """Wait for the end of a job and return it; report its changes on standard error."""
    try:
        while job.state not in ENDED:
            time.sleep(POLL_S)
            before, job = job, _patiently(client, job.id)
            if job.state not in ENDED and (job.state, job.reason) != (before.state, before.reason):
                note(*lines(job))
    except KeyboardInterrupt:
        note(f"The job goes on; `gpushare cancel {job.id}` stops it.")
        raise
    return job


def _patiently(client: BlockingClient, job_id: str) -> wire.Job:
    """Return the current job; wait up to `PATIENCE_S` for a broker that does not answer."""
    until = time.monotonic() + PATIENCE_S
    warned = False
    while True:
        try:
            return client.get(f"jobs/{job_id}", wire.Job)
        except BrokerUnavailable as error:
            if time.monotonic() >= until:
                raise
            if not warned:
                note(f"{error}; the job goes on, asking again")
                warned = True
        time.sleep(POLL_S)


def logs(args: argparse.Namespace) -> int:
    """What a job printed.

    gpushare logs k3v9m2x7qa
    gpushare logs -f k3v9m2x7qa        until the job ends
    gpushare logs --attempt 1 k3v9m2x7qa
    gpushare logs --json k3v9m2x7qa    one JSON object per line
    """
    from jupyter_gpushare.cli import job_logs

    job_id = args.id
    with closing(connect(args, min(RETRY_S, _LOGS_RETRY_S))) as client:
        try:
            job = client.get(f"jobs/{job_id}", wire.Job)
        except BrokerUnavailable as error:
            if not job_logs.directory(job_id).is_dir():
                raise
            note(f"{error}; showing what is there")
            job = None
        hub_url = _hub_url(client.address)
        source = job_logs.source(job_id, job, hub_url=hub_url, token=_token(args), only=args.attempt)
        printer = job_logs.Printer(args.json)
        while True:
            # The state is older than the log that is read next, so the log of an ended job is complete.
            follows = args.follow and source.job is not None and source.job.state not in ENDED
            if not printer.print(source.read_on()):
                if not follows:
                    break
                time.sleep(POLL_S)
            if follows:
                source.job = _patiently(client, job_id)
    printer.finish()
    job = source.job
    if job is not None and (args.follow or not printer.attempts or lacks_log(job.reason_texts)):
        note(*lines(job))
    return EXIT_OK


def lacks_log(texts: Iterable[str | wire.Text]) -> bool:
    """Return whether a reason says that the log is incomplete; then it also has the last printed lines."""
    return any(
        isinstance(each, wire.Text) and (each.key == "reason.log_lacks" or lacks_log(each.args))
        for each in texts
    )


def _hub_url(address: Address) -> str:
    """Return the address of the Hub's proxy if the broker is reached through it, else ""."""
    from jupyter_gpushare.channel import API_PATH

    is_proxy = address.socket is None and address.url.endswith(API_PATH)
    return address.url.removesuffix(API_PATH) if is_proxy else ""


@shown_by(print_job)
def retry(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Submit a job again that has ended.

    gpushare retry k3v9m2x7qa
    """
    return client.post(f"jobs/{args.id}/retry", None, wire.Job)


def show(args: argparse.Namespace) -> int:
    """One job, with every pause and its reason.

    gpushare show k3v9m2x7qa
    """
    with closing(connect(args)) as client:
        job = client.get(f"jobs/{args.id}", wire.Job)
        moments = client.get(f"jobs/{args.id}/timeline", wire.JobTimeline).moments
    if args.json:
        print_json({"job": job, "timeline": moments})
        return EXIT_OK
    say(f"{job.name} ({job.id}): {job.state}")
    for line in (
        *local(job.reason, job.reason_texts).splitlines(),
        f"{job.size}, project {job.project}, attempt {job.attempt}",
        f"waited {duration(job.waited_s)}, ran {duration(job.ran_s)}",
        shlex.join(job.command),
        *([f"shares its GPU with job {job.shared_with}"] if job.shared_with else []),
        *([f"log: {job.log}"] if job.log else []),
    ):
        say(line, indent="  ")
    if moments:
        print()
        print_table(["AT", ""], [[day_and_time(m.at), one_line(m.sentence)] for m in moments])
    return EXIT_OK


def doctor(args: argparse.Namespace) -> int:
    """Check that GPUs, limits and the broker work here.

    gpushare doctor
    gpushare doctor --json
    gpushare doctor --site             before users come, as root
    """
    from jupyter_gpushare.cli import doctor
    from jupyter_gpushare.cli.checks import Result, report

    if args.site:
        from jupyter_gpushare.cli import site

        checks = site.examine(args.hub_config, args.broker_config, site.this_machine())
        return report(checks, as_json=args.json)
    url = args.url or os.environ.get("GPUSHARE_API_URL", "")
    checks = doctor.examine(url, _token(args), os.environ)
    code = report(checks, as_json=args.json)
    return EXIT_UNREACHABLE if url and checks[0].result is Result.FAIL else code


# ---- verbs for the user's own sessions: wake, keep, lend, resize, sleep, usage

_HOUR_S = 3600.0


def _print_lease(lease: wire.LeaseStatus) -> None:
    say(f"{lease.badge}: {local(lease.sentence, lease.sentence_texts)}")


def _print_keep(lease: wire.LeaseStatus) -> None:
    _print_lease(lease)
    if lease.keep_left_minutes is not None:
        minutes = floor(lease.keep_left_minutes)
        say(f"{minutes} min of that are left today; `gpushare keep --minutes 0` undoes it.")


def _print_size(lease: wire.LeaseStatus) -> None:
    size, limit = local(lease.size, lease.size_texts), gibibytes(lease.memory_limit_bytes)
    say(
        f"This session has {size} now ({limit}). PyTorch and CuPy see it at once; "
        "JAX and TensorFlow after a restart of their kernel."
    )


@shown_by(_print_lease)
def wake(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Get the GPU of my sleeping session back."""
    return act(client, session_of(client, args.server), "resume")


@shown_by(_print_keep)
def keep(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Keep the GPU of my idle session for a while, out of today's budget.

    gpushare keep
    gpushare keep --minutes 60
    gpushare keep --minutes 0         undo it
    """
    return act(client, session_of(client, args.server), "keep", wire.KeepRequest(minutes=args.minutes))


@shown_by(_print_lease)
def lend(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Lend the GPU of my session now."""
    return act(client, session_of(client, args.server), "lend")


@shown_by(_print_lease)
def sleep(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Whether my sessions may be put to sleep.

    gpushare sleep never            this server keeps its GPU, if its project has that right
    gpushare sleep allow
    """
    return act(client, session_of(client, args.server), "never-sleep" if args.may == "never" else "may-sleep")


@shown_by(_print_size)
def resize(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Make the part of a GPU of my running session larger or smaller.

    gpushare resize --gpus 1/2
    gpushare resize --memory 20GiB
    gpushare resize --gpus 1 --borrow     also beyond what my project is guaranteed
    """
    request = wire.SizeRequest(gpus=args.gpus, memory=args.memory, borrow=args.borrow)
    return client.put(f"leases/{session_of(client, args.server).id}/size", request, wire.LeaseStatus)


def act(
    client: BlockingClient, lease: wire.LeaseStatus, action: str, body: wire.KeepRequest | None = None
) -> wire.LeaseStatus:
    """Perform an action on a lease; return the lease after it."""
    return client.post(f"leases/{lease.id}/{action}", body, wire.LeaseStatus, repeatable=True)


def session_of(client: BlockingClient, server: str | None) -> wire.LeaseStatus:
    """Return the lease of a server of the user.

    If ``server`` is None, it is the server of this process, or the only one with a GPU.

    Raises:
        NotFound: the server holds no GPU, or several do.
        RequestError: the broker refuses the request.
        BrokerUnavailable: the broker does not answer.
    """
    sessions = [lease for lease in client.get("leases", wire.Leases).leases if lease.job is None]
    named = os.environ.get("JUPYTERHUB_SERVER_NAME") if server is None else server
    found = [lease for lease in sessions if lease.server == named]
    if not found and server is None and len(sessions) == 1:
        found = sessions
    if not found:
        which = "This server" if named is None else f"The server {named!r}"
        names = ", ".join(repr(lease.server) for lease in sessions)
        advice = (
            f"Name one that does with --server NAME: {names}"
            if names
            else "Choose Get a GPU in JupyterLab's sidebar, or start a server with a GPU"
        )
        raise NotFound(f"{which} holds no GPU. {advice}")
    return found[0]


def _print_usage(week: wire.History) -> None:
    if week.days:
        rows = [[d.day, d.project, _hours(d.used_gpu_s), _hours(d.lent_gpu_s)] for d in week.days]
        total = ["total", "", _hours(week.used_gpu_s), _hours(week.lent_gpu_s)]
        print_table(["DAY", "PROJECT", "USED", "LENT"], [*rows, total])
        print("GPU-hours; days in UTC.")
    else:
        print("No GPU was used in the last seven days.")
    if week.helped_jobs:
        jobs = "1 job" if week.helped_jobs == 1 else f"{week.helped_jobs} jobs"
        say(f"Your idle sessions lent their GPUs to {jobs}.")


@shown_by(_print_usage)
def usage(client: BlockingClient, args: argparse.Namespace) -> wire.History:
    """My GPU-hours of the last seven days."""
    return client.get("history", wire.History)


def _hours(gpu_s: float) -> str:
    """Return hours, with enough digits that a small number is not printed as 0."""
    hours = gpu_s / _HOUR_S
    return f"{hours:.1f}" if hours >= 0.05 or not gpu_s else f"{hours:.3f}"


# ---- verbs that change jobs in the queue: ``edit``, ``move``, ``cancel`` ------

# The maximum number of jobs that the broker lists.
_ALL = 10_000


@shown_by(print_job)
def edit(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Change what a job in the queue asks for.

    gpushare edit k3v9m2x7qa --gpus 2
    gpushare edit k3v9m2x7qa --project nlp --priority -5
    gpushare edit k3v9m2x7qa --max-run 4h      none: no maximum
    """
    change = wire.JobChange(**fields_of(wire.JobChange, args))
    if change == wire.JobChange():
        args.parser.error("say what to change, like: gpushare edit k3v9m2x7qa --gpus 2")
    return client.put(f"jobs/{args.id}", change, wire.Job, repeatable=True)


@shown_by(print_job)
def move(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Move a job in the queue among my own of its project and priority.

    gpushare move k3v9m2x7qa --before p4w8n1y6rb
    gpushare move k3v9m2x7qa --up
    """
    place: wire.JobPlace | None = wire.JobPlace(before=args.before, behind=args.behind)
    if args.to is not None:
        job = client.get(f"jobs/{args.id}", wire.Job)
        place = _place(job, client.get("jobs", wire.JobList, params={"limit": _ALL}).jobs, args.to)
        if place is None:
            note(f"It is the {'first' if args.to in ('up', 'first') else 'last'} of yours already.")
            return job
    return client.put(f"jobs/{args.id}/place", place, wire.Job, repeatable=True)


def _place(job: wire.Job, queue: list[wire.Job], to: str) -> wire.JobPlace | None:
    """Return the place ``to`` which a job moves; None if it is there.  ``queue`` starts with the next job."""
    ids = [
        other.id
        for other in queue
        if (other.state, other.project, other.priority, other.user)
        == ("queued", job.project, job.priority, job.user)
        and not other.ran_s
    ]
    if job.id not in ids:
        # The broker refuses this with a reason.
        return wire.JobPlace(before=job.id)
    at, last = ids.index(job.id), len(ids) - 1
    target = {"up": max(0, at - 1), "down": min(last, at + 1), "first": 0, "last": last}[to]
    if target == at:
        return None
    return wire.JobPlace(behind=ids[target]) if target > at else wire.JobPlace(before=ids[target])


def cancel(args: argparse.Namespace) -> int:
    """Take jobs out of the queue, or stop them.

    gpushare cancel k3v9m2x7qa
    gpushare cancel k3v9m2x7qa p4w8n1y6rb
    """
    ids, jobs, code = list(dict.fromkeys(args.ids)), [], EXIT_OK
    with closing(connect(args)) as client:
        for id in ids:
            try:
                jobs.append(client.delete(f"jobs/{id}", wire.Job, repeatable=True))
            except RequestError as error:
                complain(args, error)
                code = EXIT_REFUSED
    if args.json and len(ids) > 1:
        print_json(wire.JobList(jobs=jobs))
    else:
        for job in jobs:
            print_json(job) if args.json else print_job(job)
    return code
