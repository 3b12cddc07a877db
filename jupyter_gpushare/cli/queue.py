"""Verbs of the command line that change jobs in the queue: ``edit``, ``move``, ``cancel``."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from jupyter_gpushare.cli.output import complain, note, print_job, print_json
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, connect, shown_by
from jupyter_gpushare.errors import RequestError
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

# As many as the broker lists at once.
_ALL = 10_000


@shown_by(print_job)
def edit(client: BlockingClient, args: argparse.Namespace) -> wire.Job:
    """Change what a job in the queue asks for.

    gpushare edit k3v9m2x7qa --gpus 2
    gpushare edit k3v9m2x7qa --project nlp --priority -5
    gpushare edit k3v9m2x7qa --max-run 4h      none: no maximum
    """
    change = wire.JobChange(
        gpus=args.gpus,
        memory=args.memory,
        profile=args.profile,
        project=args.project,
        priority=args.priority,
        max_run_s=args.max_run,
    )
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
    """Return the place ``to`` which a job goes; None: it is there.  ``queue``: the next to start first."""
    ids = [
        other.id
        for other in queue
        if (other.state, other.project, other.priority, other.user)
        == ("queued", job.project, job.priority, job.user)
        and not other.ran_s
    ]
    if job.id not in ids:
        # The broker says why not.
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
