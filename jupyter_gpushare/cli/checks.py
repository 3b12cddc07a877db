"""The runner for the checks of ``gpushare doctor``, ``doctor --site`` and ``kube check``.

Each command has a table of named probes.  A probe gets the facts of its table.  It returns one result
(`ok`, `warn` or `fail`), a list of results, which may be empty, or an iterator of faults, of which the
first counts.
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
    """The outcome of a `Check`."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(wire.Answer, frozen=True, kw_only=True):
    """The result of one check; ``advice`` is the remedy, and empty for `Result.OK`."""

    name: str = ""
    result: Result
    message: str
    advice: str = ""


Facts = TypeVar("Facts")
Found: TypeAlias = Check | Sequence[Check]
Probe: TypeAlias = Callable[[Facts], Found | Iterator[Check] | Awaitable[Found]]


def ok(message: str) -> Check:
    """Return the result of a check without a fault."""
    return Check(result=Result.OK, message=message)


def warn(message: str, advice: str) -> Check:
    """Return the result of a check that found weaker guarantees."""
    return Check(result=Result.WARN, message=message, advice=advice)


def fail(message: str, advice: str) -> Check:
    """Return the result of a check that found a fault."""
    return Check(result=Result.FAIL, message=message, advice=advice)


def named(found: Mapping[str, Found]) -> list[Check]:
    """Return all results, each with the name of its probe."""
    rows = [(name, [each] if isinstance(each, Check) else each) for name, each in found.items()]
    return [wire.replace(check, name=name) for name, results in rows for check in results]


async def examine(
    probes: Mapping[str, Probe[Facts]], facts: Facts, *, unreadable: str, gate: str = ""
) -> list[Check]:
    """Return the results of the probes, in the order of the table.

    ``unreadable`` is the remedy when a probe may not read something.  If the probe named ``gate`` finds a
    fault, the probes after it do not run.
    """
    found: dict[str, Found] = {}
    for name, probe in probes.items():
        try:
            # A probe may run its own event loop, so it needs its own thread.
            answer = await asyncio.to_thread(_run, probe, facts)
            found[name] = await answer if isinstance(answer, Awaitable) else answer
        except OSError as error:
            message = f"{error.filename or 'A file'} cannot be examined: {error.strerror}."
            found[name] = warn(message, unreadable)
        except GpuShareError as error:
            found[name] = warn(f"This cannot be examined: {error}.", unreadable)
        if name == gate and any(check.advice for check in named(found)):
            break
    return named(found)


def _run(probe: Probe[Facts], facts: Facts) -> Found | Awaitable[Found]:
    found = probe(facts)
    return next(found, ok("In order.")) if isinstance(found, Iterator) else found


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the checks as lines, or as one JSON object; return the exit code: 1 if a check failed, else 0."""
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
