"""The result of one check of ``gpushare doctor`` or ``gpushare kube check``."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jupyter_gpushare.cli.output import print_json
from jupyter_gpushare.messages import printable
from jupyter_gpushare.protocol import wire


class Result(enum.StrEnum):
    """Outcome of a `Check`."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(wire.Answer, frozen=True):
    """One thing examined; ``advice`` says what to do and is empty for `Result.OK`."""

    name: str
    result: Result
    message: str
    advice: str = ""


def ok(name: str, message: str) -> Check:
    """Return a check that found everything in order."""
    return Check(name=name, result=Result.OK, message=message)


def warn(name: str, message: str, advice: str) -> Check:
    """Return a check that found something with weaker guarantees."""
    return Check(name=name, result=Result.WARN, message=message, advice=advice)


def fail(name: str, message: str, advice: str) -> Check:
    """Return a check that found a fault."""
    return Check(name=name, result=Result.FAIL, message=message, advice=advice)


def print_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print checks, one or two lines each, or as one JSON object."""
    if as_json:
        print_json({"ok": not any(c.result is Result.FAIL for c in checks), "checks": checks})
        return
    width = max(len(c.name) for c in checks)
    for check in checks:
        print(printable(f"{check.result:<4}  {check.name:<{width}}  {check.message}"))
        if check.advice:
            print(printable(f"      {'':<{width}}  -> {check.advice}"))
