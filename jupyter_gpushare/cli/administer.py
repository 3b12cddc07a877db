"""The verbs for administrators: settings of a running broker, and use of the GPUs."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from contextlib import closing
from datetime import datetime, timedelta
from typing import IO, TYPE_CHECKING, Literal
from urllib.parse import quote

from jupyter_gpushare.cli.output import (
    complain,
    day_and_time,
    for_spreadsheets,
    lending_text,
    note,
    print_job,
    print_json,
    print_table,
    project_text,
    say,
)
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, act, confirm, connect, fields_of, shown_by
from jupyter_gpushare.errors import Conflict, GpuShareError, NotFound, RequestError
from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.messages import about, local, printable
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

Mode = Literal["on", "watch", "off"]
MODES: tuple[Mode, ...] = ("on", "watch", "off")


def _print_lending(answer: wire.Lending) -> None:
    print(printable(f"{answer.mode}: {lending_text(answer)}"))


@shown_by(_print_lending)
def lending(client: BlockingClient, args: argparse.Namespace) -> wire.Lending:
    """Whether GPUs of idle sessions are lent.

    gpushare admin lending          the mode in force, and how suspensions went
    gpushare admin lending watch    log what would be lent, touch no process
    gpushare admin lending off      wake all sessions, lend nothing
    gpushare admin lending default  as configured
    """
    if args.mode is None:
        return client.get("lending", wire.Lending)
    change = wire.LendingChange(mode=next((m for m in MODES if m == args.mode), None))
    return client.put("lending", change, wire.Lending, repeatable=True)


def _print_projects(answer: wire.Projects) -> None:
    for project in answer.projects:
        print(printable(project_text(project)))


@shown_by(_print_projects)
def quota(client: BlockingClient, args: argparse.Namespace) -> wire.Projects:
    """The quota, weight and limits of projects.

    gpushare admin quota                       all projects
    gpushare admin quota nlp --quota 1.5       guaranteed GPUs; --weight and --limit likewise
    gpushare admin quota nlp --reset           as configured

    Raises:
        NotFound: the project does not exist.
    """
    change = wire.ProjectChange(**fields_of(wire.ProjectChange, args))
    is_changed = change != wire.ProjectChange(force=args.force)
    if (is_changed or args.reset) and args.project is None:
        args.parser.error("name the project")
    if is_changed and args.reset:
        args.parser.error("--reset takes all numbers back: give it alone")
    path = "projects" if args.project is None else f"projects/{quote(args.project, safe='')}"
    if args.reset:
        answer = client.delete(path, wire.Projects, repeatable=True)
    elif is_changed:
        answer = client.put(path, change, wire.Projects, repeatable=True)
    else:
        answer = client.get("projects", wire.Projects)
    if args.project is None:
        return answer
    found = [project for project in answer.projects if project.name == args.project]
    if not found:
        raise NotFound(f"There is no project {args.project!r} for you.")
    return wire.Projects(projects=found)


_AMOUNTS = ("held_gpu_h", "computing_gpu_h", "borrowed_gpu_h", "lent_gpu_h")


def usage(args: argparse.Namespace) -> int:
    """GPU-hours of all users, for chargeback.

    gpushare admin usage                                this month, by user, project and GPU model
    gpushare admin usage --by project,month --since 2026-01-01
    gpushare admin usage --by user,day --user ada --csv
    """
    options = {name: getattr(args, name) for name in ("by", "since", "until", "user", "project")}
    params = {name: value for name, value in options.items() if value is not None}
    with closing(connect(args)) as client:
        answer = client.get("usage", wire.Usage, params=params)
    if args.json:
        print_json(answer)
        return EXIT_OK
    rows = [[getattr(row, name) for name in (*answer.by, *_AMOUNTS)] for row in answer.rows]
    if args.csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerows([[*answer.by, *_AMOUNTS], *([for_spreadsheets(x) for x in row] for row in rows)])
        return EXIT_OK
    days = f"from {answer.since} to {answer.until} (UTC)"
    if not rows:
        print(f"No GPU was used {days}.")
        return EXIT_OK
    rows = [[x if x != "" else "unknown" for x in row] for row in rows]
    total = ["total", *([""] * len(answer.by))][: len(answer.by)]
    rows.append([*total, *(getattr(answer.total, name) for name in _AMOUNTS)])
    head = [*(name.upper() for name in answer.by), "HELD", "COMPUTING", "BORROWED", "LENT"]
    print_table(head, [[f"{x:.2f}" if isinstance(x, float) else x for x in row] for row in rows])
    print(f"GPU-hours {days}; kept for {answer.kept_days} days.")
    return EXIT_OK


def _print_leases(answer: wire.Leases) -> None:
    rows = [[x.job or x.id, x.user, x.project, x.size, x.badge, _sentence(x)] for x in answer.leases]
    if rows:
        print_table(["ID", "USER", "PROJECT", "SIZE", "STATE", ""], rows)
    else:
        print("No GPU is held, and no job waits.")


@shown_by(_print_leases)
def leases(client: BlockingClient, args: argparse.Namespace) -> wire.Leases:
    """Sessions and jobs of all users, with their ids."""
    return client.get("leases", wire.Leases, params={"all": 1})


def _print_act(answer: wire.LeaseStatus | wire.Job | None) -> None:
    say(f"{answer.badge}: {_sentence(answer)}" if isinstance(answer, wire.LeaseStatus) else "Stopped.")


@shown_by(_print_act)
def wake(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Get the GPU of a sleeping session back.

    gpushare admin wake k3v9m2x7qa
    """
    return act(client, _lease_of(client, args.id), "resume")


@shown_by(_print_act)
def lend(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Lend the GPU of a session now.

    gpushare admin lend k3v9m2x7qa
    """
    return act(client, _lease_of(client, args.id), "lend")


@shown_by(_print_act)
def stop(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus | wire.Job:
    """Stop a session with its kernels, or a job.

    gpushare admin stop k3v9m2x7qa
    """
    lease = _lease_of(client, args.id)
    noun = "job" if lease.job else "session, with all its kernels and their variables,"
    confirm(args, f"Stop {lease.user}'s {noun} of {lease.size}?")
    # The broker returns no lease if the job had not begun.
    return act(client, lease, "stop") or client.get(f"jobs/{lease.job}", wire.Job)


@shown_by(print_job)
def priority(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Raise or lower the priority of a job, also beyond its project's maximum.

    gpushare admin priority k3v9m2x7qa 20
    """
    change = wire.JobChange(priority=args.priority)
    return client.put(f"jobs/{args.id}", change, wire.Job, repeatable=True)


def _lease_of(client: BlockingClient, id: str) -> wire.LeaseStatus:
    """Return the lease with this id, or of the job with this id.

    Raises:
        NotFound: no session or job has this id.
    """
    for lease in client.get("leases", wire.Leases, params={"all": 1}).leases:
        if id in (lease.id, lease.job):
            return lease
    raise NotFound(f"There is no session or job {id!r}; `gpushare admin leases` lists them.")


def _sentence(lease: wire.LeaseStatus) -> str:
    return about(local(lease.sentence, lease.sentence_texts), lease.user)


# ---- `gpushare admin drain` and `undrain`: a GPU, or the machine, takes nothing new

MACHINE = "machine"
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")


def time_of_day(text: str) -> str:
    """Return a local time like ``18:00``, or a date and time, as ISO 8601.

    A time without a date that has passed today is tomorrow's.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    now = datetime.now().astimezone()
    if clock := _CLOCK.fullmatch(text.strip()):
        at = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        return (at if at > now else at + timedelta(days=1)).isoformat()
    try:
        return datetime.fromisoformat(text.strip()).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 18:00 or 2026-11-22T18:00") from None


def _print_drains(answer: wire.Devices) -> None:
    for device in answer.devices:
        say(f"{device.uuid} ({device.name}): {_drain_sentence(device.drain)}")
    if not answer.devices:
        say("No GPU is known.")


@shown_by(_print_drains)
def drain(client: BlockingClient, args: argparse.Namespace) -> wire.Devices:
    """Let a GPU or the machine take nothing new, and ask owners there to finish.

    gpushare admin drain                        the GPUs that take nothing new, and their remaining work
    gpushare admin drain GPU-5f2 --by 18:00     its UUID, or the beginning of it
    gpushare admin drain machine
    """
    if args.by is not None and args.device is None:
        args.parser.error("name the GPU, or `machine`")
    known = client.get("devices", wire.Devices)
    if args.device is None:
        return known
    request = wire.DrainRequest(until=args.by)
    return client.put(_path(known, args.device), request, wire.Devices, repeatable=True)


@shown_by(_print_drains)
def undrain(client: BlockingClient, args: argparse.Namespace) -> wire.Devices:
    """Let a GPU or the machine take work again.

    gpushare admin undrain machine
    """
    path = _path(client.get("devices", wire.Devices), args.device)
    return client.delete(path, wire.Devices, repeatable=True)


def _path(known: wire.Devices, name: str) -> str:
    """Return the path of the machine, or of the GPU whose UUID begins with ``name``.

    Raises:
        NotFound: no UUID begins with it, or several do.
    """
    uuids = [device.uuid for device in known.devices]
    names = [MACHINE, *uuids]
    found = [name] if name in names else [uuid for uuid in uuids if uuid.startswith(name)]
    if len(found) != 1:
        subject = "several GPUs begin" if found else "no GPU begins"
        listed = ", ".join(uuids) or "none"
        raise NotFound(f"{subject} with {name!r}; there are: {listed}. All together: {MACHINE}")
    return f"devices/{quote(found[0], safe='')}/drain"


def _drain_sentence(drain: wire.Drain | None) -> str:
    if drain is None:
        return "takes work."
    work = f"{_count(drain.sessions, 'session')} and {_count(drain.jobs, 'job')} are still there"
    deadline = f", asked to finish by {day_and_time(drain.until)}" if drain.until and drain.sessions else ""
    return f"takes nothing new, set by {drain.by} at {day_and_time(drain.at)}; {work}{deadline}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---- `gpushare admin owners`, `adopt` and `end`: jobs of users that are absent from the Hub


def _print_owners(answer: wire.Owners) -> None:
    if not answer.owners:
        say("The Hub has the owners of all sessions and jobs.")
        return
    rows = [
        [x.name, x.created or "unknown", str(x.jobs), str(x.others), "held" if x.held else "absent"]
        for x in answer.owners
    ]
    print_table(["OWNER", "MADE AT", "WAITING JOBS", "OTHERS", ""], rows)


@shown_by(_print_owners)
def owners(client: BlockingClient, args: argparse.Namespace) -> wire.Owners:
    """Owners of sessions and jobs that are absent from the Hub, or were created again."""
    return client.get("owners", wire.Owners)


def adopt(args: argparse.Namespace) -> int:
    """Give the sessions and jobs of an absent owner to a user of the Hub.

    gpushare admin adopt ada              to the Hub's current user ada
    gpushare admin adopt ada --to lovelace
    gpushare admin adopt --all            each to the current user of that name
    """
    if args.name is None and args.to is not None:
        args.parser.error("--to goes with the name of one owner")
    code = EXIT_OK
    with closing(connect(args)) as client:
        answer = client.get("owners", wire.Owners)
        for name in _names(args, answer):
            try:
                answer = client.put(_owner_path(name), wire.Adoption(to=args.to), wire.Owners)
            except RequestError as error:
                if not args.all:
                    raise
                complain(args, error)
                code = EXIT_REFUSED
    print_json(answer) if args.json else _print_owners(answer)
    return code


@shown_by(_print_owners)
def end(client: BlockingClient, args: argparse.Namespace) -> wire.Owners:
    """Fail the waiting jobs of an absent owner.

    gpushare admin end ada
    """
    answer = client.get("owners", wire.Owners)
    if names := _names(args, answer):
        confirm(args, f"Fail the waiting jobs of {', '.join(names)}?")
    for name in names:
        answer = client.delete(_owner_path(name), wire.Owners)
    return answer


def _names(args: argparse.Namespace, answer: wire.Owners) -> list[str]:
    if args.all == (args.name is not None):
        args.parser.error("name the owner, or give --all")
    return sorted({owner.name for owner in answer.owners}) if args.all else [args.name]


def _owner_path(name: str) -> str:
    return f"owners/{quote(name, safe='')}"


# ---- `gpushare admin release`: processes that use a GPU without a lease ------


def _print_processes(answer: wire.Devices | None) -> None:
    if answer is None:
        say("It was told to end.")
        return
    rows = [
        [str(p.pid), str(p.uid), p.name, d.uuid, gibibytes(p.used_bytes) if p.used_bytes else "-", _remark(p)]
        for d in answer.devices
        for p in d.unleased
    ]
    if rows:
        print_table(["PID", "UID", "NAME", "GPU", "MEMORY", ""], rows)
    else:
        say("No process is known to use a GPU without a lease.")


@shown_by(_print_processes)
def release(client: BlockingClient, args: argparse.Namespace) -> wire.Devices | None:
    """End a process that uses a GPU without a lease.

    gpushare admin release           lists them, and says which are left alone
    gpushare admin release 4711      SIGTERM, and SIGKILL 5 s later; asks first

    Raises:
        NotFound: no such process exists.
        Conflict: several machines have such a process.
    """
    answer = client.get("devices", wire.Devices)
    if args.pid is None:
        return answer
    found = [(d, p) for d in answer.devices for p in d.unleased if p.pid == args.pid]
    if not found:
        raise NotFound(
            f"No process {args.pid} uses a GPU without a lease; `gpushare admin release` lists them."
        )
    if len({process.process for _, process in found}) > 1:
        gpus = ", ".join(device.uuid for device, _ in found)
        raise Conflict(f"Processes {args.pid} of several machines use GPUs ({gpus}): use the service's page.")
    device, process = found[0]
    name = f"process {process.pid} ({process.name}) of uid {process.uid} on GPU {device.uuid}"
    confirm(args, f"End {name}? What it has not saved is lost.")
    path = f"devices/{quote(device.uuid, safe='')}/processes/{process.process}"
    answer = client.delete(path, wire.Devices, repeatable=True)
    return answer if args.json else None


def _remark(process: wire.UnleasedProcess) -> str:
    if process.kept:
        return f"left alone: {process.kept}"
    return "told to end" if process.ending else ""


# ---- `gpushare admin export`: what ran on this site, as a trace for `gpushare simulate`

_MINUTE_S = 60.0
_COLUMNS = ("num_gpu", "submit_time", "duration", "session", "user", "project", "gpus")


def export(args: argparse.Namespace) -> int:
    """What ran on this site, as a trace for `gpushare simulate`.

    gpushare admin export jobs jobs.csv
    gpushare simulate jobs jobs.csv --gpus 8
    gpushare admin export cells cells.csv
    gpushare simulate notebooks cells.csv --gpus 8 --jobs jobs.csv --idle-timeout 900

    Raises:
        GpuShareError: the file exists already, or cannot be written.
    """
    params = {"names": 1} if args.names else {}
    with closing(connect(args)) as client:
        answer = client.get(f"trace/{args.kind}", wire.Trace, params=params)
    if args.json:
        print_json(answer)
        return EXIT_OK
    if args.file == "-":
        _write(sys.stdout, args.kind, answer)
    else:
        try:
            with open(args.file, "x", encoding="utf-8", newline="") as file:
                _write(file, args.kind, answer)
        except OSError as error:
            raise GpuShareError(f"{args.file}: {error.strerror}") from None
    omitted = f"; {answer.left_out} never ran and are left out" if answer.left_out else ""
    note(f"{len(answer.rows)} rows, the first at {answer.since or 'no time'}{omitted}.")
    return EXIT_OK


def _write(file: IO[str], kind: str, answer: wire.Trace) -> None:
    # The simulator reads the times of jobs in seconds, and those of cells in minutes.
    unit_s = 1.0 if kind == "jobs" else _MINUTE_S
    table = csv.writer(file, lineterminator="\n")
    table.writerow(_COLUMNS)
    for row in answer.rows:
        times = (f"{seconds / unit_s:.6f}" for seconds in (row.submit_s, row.duration_s))
        names = (for_spreadsheets(text) for text in (row.session, row.user, row.project))
        table.writerow([row.num_gpu, *times, *names, f"{row.gpus:g}"])
