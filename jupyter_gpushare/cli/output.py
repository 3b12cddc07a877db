"""Output of the command line: tables and lines, or JSON."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

from jupyter_gpushare.command_line import columns, wrapped
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError
from jupyter_gpushare.messages import duration, local, one_line, printable
from jupyter_gpushare.protocol import wire

Cell = TypeVar("Cell", str, str | float)


def print_json(answer: object) -> None:
    """Print an answer of the broker as JSON."""
    print(wire.indented(answer))


def lines(job: wire.Job) -> list[str]:
    """Return a job in one line, followed by its last printed lines if it failed."""
    reason, *printed = local(job.reason, job.reason_texts).splitlines() or [""]
    first = f"{job.id}  {job.state}  {reason}".rstrip()
    return [printable(first), *(f"    {printable(line)}" for line in printed)]


def print_job(job: wire.Job) -> None:
    """Print one job."""
    print("\n".join(lines(job)))


def print_jobs(jobs: Sequence[wire.Job]) -> None:
    """Print jobs as a table."""
    print_table(
        ["ID", "NAME", "STATE", "SIZE", "PROJECT", "WAITED", "RAN", ""],
        [
            [
                *(j.id, j.name, j.state, j.size, j.project),
                *(duration(j.waited_s), duration(j.ran_s), one_line(local(j.reason, j.reason_texts))),
            ]
            for j in jobs
        ],
    )


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print rows below a header in aligned columns; in a terminal the last column wraps."""
    table = [head, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    last_width = columns(taken=before) if sys.stdout.isatty() else sys.maxsize
    for row in table:
        first, *more = textwrap.wrap(row[-1], last_width, break_long_words=False) or [""]
        cells = zip([*row[:-1], first], widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip())
        for rest in more:
            print(f"{'':<{before}}{rest}")


def say(text: str, indent: str = "") -> None:
    """Print a sentence; in a terminal it wraps at words."""
    print(wrapped(printable(text.rstrip()), sys.stdout, indent))


def for_spreadsheets(cell: Cell) -> Cell | str:
    """Return a cell for a CSV file, escaped so that a spreadsheet does not take it for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@")) else cell


def day_and_time(at: str) -> str:
    """Return a time (ISO 8601) in the time zone of this process: ``2026-11-22 14:20:05``."""
    return f"{datetime.fromisoformat(at).astimezone():%Y-%m-%d %H:%M:%S}"


def gpus(milli: int) -> str:
    """Return thousandths of a GPU as a number of GPUs: ``1.25``."""
    return f"{milli / 1000:g}"


def note(*lines: str) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(wrapped(printable(line.rstrip()), sys.stderr), file=sys.stderr, flush=True)


def complain(args: argparse.Namespace, error: GpuShareError) -> None:
    """Print an error to standard error; as JSON with ``--json``."""
    if args.json:
        otherwise = "unreachable" if isinstance(error, BrokerUnavailable) else "failed"
        status, reason = getattr(error, "status", 500), getattr(error, "reason", otherwise)
        answer = wire.ErrorAnswer(status=status, reason=reason, message=str(error))
        print(wire.encode(answer).decode(), file=sys.stderr)
    else:
        note(f"gpushare: {error}")


def project_text(project: wire.ProjectUse) -> str:
    """Return the quota, weight and limits of a project in one line."""
    limit = "" if project.limit_milli is None else f", limit {project.limit_milli / 1000:g}"
    if project.priority_max:
        limit += f", priority at most {project.priority_max}"
    changed = " (changed; --reset takes it back)" if project.overridden else ""
    return f"{project.name}: quota {project.quota_milli / 1000:g}, weight {project.weight}{limit}{changed}"


_LENDING = {
    "on": "GPUs of idle sessions are lent while others wait.",
    "watch": "Nothing is lent; the log of decisions says what would have been.",
    "off": "Nothing is lent.",
}


def lending_text(lending: wire.Lending) -> str:
    """Return the lending mode and the outcome of suspensions as sentences."""
    parts = [_LENDING[lending.mode]]
    if lending.set_by:
        parts.append(
            f"Set by {lending.set_by} at {day_and_time(lending.set_at)}; configured: {lending.configured}."
        )
    parts.append(
        f"Put to sleep on this machine: {lending.tried} tried, {lending.failed} failed, "
        f"{lending.lost} could not be woken."
    )
    if lending.last_reason:
        parts.append(f"Last at {day_and_time(lending.last_at)}: {lending.last_reason.rstrip('.')}.")
    return " ".join(parts)
