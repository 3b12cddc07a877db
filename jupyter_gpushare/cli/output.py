"""What people see of the command line: tables and lines, or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jupyter_gpushare import wire
from jupyter_gpushare.words import duration


def print_json(answer: object) -> None:
    """Print an answer of the broker as JSON."""
    import msgspec

    print(msgspec.json.format(wire.encode(answer), indent=2).decode())


def line(job: wire.Job) -> str:
    """Return a job in one line."""
    return clean(f"{job.id}  {job.state}  {job.reason}".rstrip())


def print_job(args: argparse.Namespace, job: wire.Job) -> None:
    """Print one job, as JSON if that was asked for."""
    if args.json:
        print_json(job)
    else:
        print(line(job))


def print_jobs(jobs: Sequence[wire.Job]) -> None:
    """Print jobs as a table."""
    print_table(
        ["ID", "NAME", "STATE", "SIZE", "PROJECT", "WAITED", "RAN", ""],
        [
            [j.id, j.name, j.state, j.size, j.project, duration(j.waited_s), duration(j.ran_s), j.reason]
            for j in jobs
        ],
    )


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print rows below a head, in columns as wide as they need."""
    table = [head, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def clean(text: str) -> str:
    """Return text that moves no cursor: names come from other people."""
    return "".join(c if c.isprintable() else "?" for c in text)


def gpus(milli: int) -> str:
    """Return a number of GPUs from thousandths."""
    return f"{milli / 1000:g}"


def note(text: str) -> None:
    """Say something beside what was asked for, on standard error."""
    print(clean(text.rstrip()), file=sys.stderr, flush=True)


def complain(args: argparse.Namespace, status: int, reason: str, message: str) -> None:
    """Say what went wrong, as JSON if that was asked for."""
    if getattr(args, "json", False):
        answer = wire.ErrorAnswer(status=status, reason=reason, message=message)
        print(wire.encode(answer).decode(), file=sys.stderr)
    else:
        note(f"gpushare: {message}")
