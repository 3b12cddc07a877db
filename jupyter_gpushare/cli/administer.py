"""Verbs of the command line for administrators: settings of a running broker, and use of the GPUs."""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from jupyter_gpushare.cli.output import (
    confirmed,
    lending_text,
    note,
    print_job,
    print_json,
    print_table,
    project_text,
    say,
)
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, checked_id, connect
from jupyter_gpushare.messages import about, local, printable
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

Mode = Literal["on", "watch", "off"]
MODES: tuple[Mode, ...] = ("on", "watch", "off")


def lending(args: argparse.Namespace) -> int:
    """Print the lending mode, after setting it if one is given; return the exit code."""
    with closing(connect(args)) as client:
        if args.mode is None:
            answer = client.get("lending", wire.Lending)
        else:
            change = wire.LendingChange(mode=next((m for m in MODES if m == args.mode), None))
            answer = client.put("lending", change, wire.Lending, repeatable=True)
    if args.json:
        print_json(answer)
        return EXIT_OK
    print(printable(f"{answer.mode}: {lending_text(answer)}"))
    return EXIT_OK


def quota(args: argparse.Namespace) -> int:
    """Print quotas, limits and weights of projects, after changing one project's if values are given."""
    change = wire.ProjectChange(
        quota=args.quota,
        weight=args.weight,
        limit=args.limit,
        priority_max=args.priority_max,
        force=args.force,
    )
    is_changed = any(x is not None for x in (args.quota, args.weight, args.limit, args.priority_max))
    if (is_changed or args.reset) and args.project is None:
        args.parser.error("name the project")
    if is_changed and args.reset:
        args.parser.error("--reset takes all numbers back: give it alone")
    with closing(connect(args)) as client:
        path = "projects" if args.project is None else f"projects/{quote(args.project, safe='')}"
        if args.reset:
            answer = client.delete(path, wire.Projects, repeatable=True)
        elif is_changed:
            answer = client.put(path, change, wire.Projects, repeatable=True)
        else:
            answer = client.get("projects", wire.Projects)
    if args.project is not None:
        answer = wire.Projects(projects=[p for p in answer.projects if p.name == args.project])
    if args.json:
        print_json(answer)
        return EXIT_OK
    for project in answer.projects:
        print(printable(project_text(project)))
    if args.project is not None and not answer.projects:
        print(printable(f"There is no project {args.project!r} for you."))
        return EXIT_REFUSED
    return EXIT_OK


_AMOUNTS = ("held_gpu_h", "computing_gpu_h", "borrowed_gpu_h", "lent_gpu_h")


def usage(args: argparse.Namespace) -> int:
    """Print GPU-hours for chargeback as a table, CSV or JSON; return the exit code."""
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
        table.writerows([[*answer.by, *_AMOUNTS], *map(_for_spreadsheets, rows)])
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


def _for_spreadsheets(row: list[str | float]) -> list[str | float]:
    """Return a row of which no text starts a formula."""
    return [f"'{x}" if isinstance(x, str) and x.startswith(("=", "+", "-", "@")) else x for x in row]


def leases(args: argparse.Namespace) -> int:
    """Print all sessions and jobs that hold or wait for GPUs, with their ids."""
    with closing(connect(args)) as client:
        answer = client.get("leases", wire.Leases, params={"all": 1})
    if args.json:
        print_json(answer)
        return EXIT_OK
    rows = [[x.job or x.id, x.user, x.project, x.size, x.badge, _sentence(x)] for x in answer.leases]
    if rows:
        print_table(["ID", "USER", "PROJECT", "SIZE", "STATE", ""], rows)
    else:
        print("No GPU is held, and no job waits.")
    return EXIT_OK


def act(args: argparse.Namespace) -> int:
    """Wake, lend or stop a session or job of any user; stopping asks first."""
    id = checked_id(args, args.id)
    with closing(connect(args)) as client:
        lease = _found(client, id)
        if lease is None:
            return EXIT_REFUSED
        if args.action == "stop":
            what = "job" if lease.job else "session, with all its kernels and their variables,"
            if not args.yes and not confirmed(args, f"Stop {lease.user}'s {what} of {lease.size}?"):
                return EXIT_REFUSED
        answer = client.post(f"leases/{lease.id}/{args.action}", None, wire.LeaseStatus, repeatable=True)
        if answer is None and args.json:  # a job that had not begun
            print_json(client.get(f"jobs/{lease.job}", wire.Job))
            return EXIT_OK
    if answer is None:
        say("Stopped.")
    elif args.json:
        print_json(answer)
    else:
        say(f"{answer.badge}: {_sentence(answer)}")
    return EXIT_OK


def priority(args: argparse.Namespace) -> int:
    """Raise or lower the priority of a job of any user."""
    id = checked_id(args, args.id)
    with closing(connect(args)) as client:
        change = wire.JobChange(priority=args.priority)
        print_job(args, client.put(f"jobs/{id}", change, wire.Job, repeatable=True))
    return EXIT_OK


def _found(client: BlockingClient, id: str) -> wire.LeaseStatus | None:
    """Return the session or job with this id, of the lease or of the job; None, and say so: there is none."""
    leases = client.get("leases", wire.Leases, params={"all": 1}).leases
    found = next((x for x in leases if id in (x.id, x.job)), None)
    if found is None:
        note(f"There is no session or job {id!r}; `gpushare admin leases` lists them.")
    return found


def _sentence(lease: wire.LeaseStatus) -> str:
    return about(local(lease.sentence, lease.sentence_texts), lease.user)
