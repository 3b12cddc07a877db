"""The result of one check of ``gpushare doctor``."""

from __future__ import annotations

import enum

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
