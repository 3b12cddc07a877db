"""Verbs of the command line for administrators: settings of a running broker, and use of the GPUs."""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from jupyter_gpushare.cli.output import (
    for_spreadsheets,
    lending_text,
    print_job,
    print_json,
    print_table,
    project_text,
    say,
)
from jupyter_gpushare.cli.verbs import EXIT_OK, confirm, connect, shown_by
from jupyter_gpushare.errors import NotFound
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
    """The numbers of projects.

    gpushare admin quota                       all projects
    gpushare admin quota nlp --quota 1.5       guaranteed GPUs; --weight and --limit likewise
    gpushare admin quota nlp --reset           as configured

    Raises:
        NotFound: there is no such project.
    """
    names = ("quota", "weight", "limit", "priority_max")
    change = wire.ProjectChange(force=args.force, **{name: getattr(args, name) for name in names})
    is_changed = any(getattr(args, name) is not None for name in names)
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
    asked = {name: getattr(args, name) for name in ("by", "since", "until", "user", "project")}
    params = {name: value for name, value in asked.items() if value is not None}
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
    return _act(client, _found(client, args.id), "resume")


@shown_by(_print_act)
def lend(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Lend the GPU of a session now.

    gpushare admin lend k3v9m2x7qa
    """
    return _act(client, _found(client, args.id), "lend")


@shown_by(_print_act)
def stop(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus | wire.Job:
    """Stop a session with its kernels, or a job.

    gpushare admin stop k3v9m2x7qa
    """
    lease = _found(client, args.id)
    what = "job" if lease.job else "session, with all its kernels and their variables,"
    confirm(args, f"Stop {lease.user}'s {what} of {lease.size}?")
    # The broker has no lease to show of a job that had not begun.
    return _act(client, lease, "stop") or client.get(f"jobs/{lease.job}", wire.Job)


def _act(client: BlockingClient, lease: wire.LeaseStatus, action: str) -> wire.LeaseStatus:
    return client.post(f"leases/{lease.id}/{action}", None, wire.LeaseStatus, repeatable=True)


@shown_by(print_job)
def priority(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Raise or lower the priority of a job, beyond its project's right too.

    gpushare admin priority k3v9m2x7qa 20
    """
    change = wire.JobChange(priority=args.priority)
    return client.put(f"jobs/{args.id}", change, wire.Job, repeatable=True)


def _found(client: BlockingClient, id: str) -> wire.LeaseStatus:
    """Return the session or job with this id, of the lease or of the job.

    Raises:
        NotFound: there is none.
    """
    for lease in client.get("leases", wire.Leases, params={"all": 1}).leases:
        if id in (lease.id, lease.job):
            return lease
    raise NotFound(f"There is no session or job {id!r}; `gpushare admin leases` lists them.")


def _sentence(lease: wire.LeaseStatus) -> str:
    return about(local(lease.sentence, lease.sentence_texts), lease.user)
