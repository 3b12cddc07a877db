"""Checks of ``gpushare doctor``, ``doctor --site`` and ``kube check``: tables of probes, and one runner.

A probe gets the facts that its table is about and returns its result: `ok`, `warn` or `fail`; a list of
them, which may be empty; or an iterator of faults, of which the first counts.  Its name is that of its row.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from jupyter_gpushare.cli.output import print_json
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.messages import printable
from jupyter_gpushare.protocol import wire


class Result(enum.StrEnum):
    """Outcome of a `Check`."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(wire.Answer, frozen=True, kw_only=True):
    """One thing examined; ``advice`` says what to do and is empty for `Result.OK`."""

    name: str = ""
    result: Result
    message: str
    advice: str = ""


Facts = TypeVar("Facts")
Found: TypeAlias = Check | Sequence[Check]
Probe: TypeAlias = Callable[[Facts], Found | Iterator[Check] | Awaitable[Found]]


def ok(message: str) -> Check:
    """Return that everything was found in order."""
    return Check(result=Result.OK, message=message)


def warn(message: str, advice: str) -> Check:
    """Return that something has weaker guarantees."""
    return Check(result=Result.WARN, message=message, advice=advice)


def fail(message: str, advice: str) -> Check:
    """Return a fault."""
    return Check(result=Result.FAIL, message=message, advice=advice)


def named(found: Mapping[str, Found]) -> list[Check]:
    """Return all results, each with the name of its row."""
    rows = [(name, [each] if isinstance(each, Check) else each) for name, each in found.items()]
    return [wire.replace(check, name=name) for name, results in rows for check in results]


async def examine(
    probes: Mapping[str, Probe[Facts]], facts: Facts, *, unreadable: str, gate: str = ""
) -> list[Check]:
    """Return what the probes find, in the order of the table.

    ``unreadable`` is the remedy for what a probe may not examine.  Unless the check ``gate`` is in order,
    those behind it are left out.
    """
    found: dict[str, Found] = {}
    for name, probe in probes.items():
        try:
            # In a thread: a probe may run an event loop of its own.
            answer = await asyncio.to_thread(_run, probe, facts)
            found[name] = await answer if isinstance(answer, Awaitable) else answer
        except OSError as error:
            what = f"{error.filename or 'A file'} cannot be examined: {error.strerror}."
            found[name] = warn(what, unreadable)
        except GpuShareError as error:
            found[name] = warn(f"This cannot be examined: {error}.", unreadable)
        if name == gate and any(check.advice for check in named(found)):
            break
    return named(found)


def _run(probe: Probe[Facts], facts: Facts) -> Found | Awaitable[Found]:
    found = probe(facts)
    return next(found, ok("In order.")) if isinstance(found, Iterator) else found


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print checks, one or two lines each, or as one JSON object; return 1 if one failed, else 0."""
    has_failed = any(check.result is Result.FAIL for check in checks)
    if as_json:
        print_json({"ok": not has_failed, "checks": checks})
        return int(has_failed)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(printable(f"{check.result:<4}  {check.name:<{width}}  {check.message}"))
        if check.advice:
            print(printable(f"      {'':<{width}}  -> {check.advice}"))
    return int(has_failed)
