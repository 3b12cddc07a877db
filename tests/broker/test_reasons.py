"""Reasons of the device helper, the Hub and the runner reach the page by key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jupyter_gpushare
from jupyter_gpushare.errors import fill
from jupyter_gpushare.gpu.checks.health import RECOVERY_WORDS, XID_WORDS
from jupyter_gpushare.gpu.leases.files import TAINT_WORDS, Taint, words_of
from jupyter_gpushare.messages import TEMPLATES, english, reason_text
from jupyter_gpushare.messages.texts import FAMILIES
from jupyter_gpushare.protocol.jobfiles import SILENT

PACKAGE = Path(jupyter_gpushare.__file__).parent
# The argument that is a reason, of calls in these folders.
REASON_OF = {
    "MoveRefused": 1,
    "_refused": 1,
    "_Failed": 0,
    "DeviceError": 2,
    "HubError": 0,
    "drain": 1,
    "block": 1,
    "start_failed": 1,
}
# Modules in which functions return reasons.
RETURNED = {"blockers.py", "checkpoint.py", "devices.py", "host.py", "reservations.py", "runner.py"}
# Other modules in which `reason` is only logged.
LOGGED = {"requests.py", "suspend.py", "unattended.py", "wake.py"}
DRIVER = "cuCheckpointProcessLock failed with code 999 (CUDA_ERROR_UNKNOWN)"


def said(node: ast.expr | None) -> list[str]:
    """The text of a literal, with 7 for what is filled in; of both ways of a condition; else nothing."""
    match node:
        case ast.Constant(value=str(text)) if text:
            return [text]
        case ast.JoinedStr(values=parts):
            plain = [part.value if isinstance(part, ast.Constant) else "7" for part in parts]
            return ["".join(map(str, plain))] if re.search("[a-z] [a-z]", "".join(map(str, plain))) else []
        case ast.IfExp(body=body, orelse=orelse):
            return said(body) + said(orelse)
        case _:
            return []


def reasons_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
                place = REASON_OF.get(name, len(args))
                yield from said(args[place]) if place < len(args) else ()
                for keyword in keywords:
                    if keyword.arg == "reason" and name in ("Verdict", "MoveResult", "Stopping"):
                        yield from said(keyword.value)
            case ast.Assign(targets=[ast.Name(id="reason")], value=value) if path.name not in LOGGED:
                yield from said(value)
            case ast.Return(value=value) if path.name in RETURNED:
                yield from said(value)
            case ast.Assign(
                targets=[
                    ast.Name(id="NO_PIDS" | "NO_OTHER" | "NO_MEMORY_ON_OTHER" | "BLIND" | "LOST" | "LEFT_OUT")
                ],
                value=value,
            ):
                yield from said(value)


SOURCES = [*(PACKAGE / "gpu").rglob("*.py"), PACKAGE / "backends/hub.py", PACKAGE / "job/runner.py"]
SOURCES += [PACKAGE / "broker/control" / name for name in ("effects.py", "loop.py", "sessions.py")]
FOUND = sorted({reason for path in SOURCES for reason in reasons_in(path)})


@pytest.mark.parametrize(
    "reason",
    [
        *FOUND,
        *(f"it uses {word}" for word in TAINT_WORDS.values()),
        f"it uses {words_of([Taint.MANAGED, Taint.IPC, Taint.PEER])}",
        *XID_WORDS.values(),
        *RECOVERY_WORDS.values(),
        "the device is out of service: the driver lost it",
        "the device is out of service: a process in it does not load the library that limits memory",
        "3 processes ended while the driver suspended or resumed them on this device; "
        "stop and start the device helper to try again",
        DRIVER,
        f"{DRIVER}: the helper needs root or CAP_SYS_PTRACE",
        f"{DRIVER}: persistence mode is off on GPU-1, GPU-2",
        f"self-test failed: {DRIVER}: this GPU or driver may not support it",
        f"self-test of a move failed: {DRIVER}",
        "cuInit failed with code 3",
        "the Hub did not start j1-1: status 503",
        "its device has no library that could hold calls",
        "a process of it runs without the library that holds calls",
        "its driver cannot tell when a process has nothing left to run (before CUDA 12.5)",
        "Ended by SIGKILL. It last printed:\nstep 7",
        "It ran to its end. 1,234 bytes of its log were not written: Read-only file system.",
        "Stopped before it was started.",
        f"Stopped before it was started: {SILENT}.",
    ],
)
def test_a_known_reason_has_a_key_and_its_own_english(reason):
    found = reason_text(reason)
    assert found.key != "verbatim"
    assert english(found) == reason


@pytest.mark.parametrize("key", sorted({k for k in TEMPLATES if k.startswith(FAMILIES)} - {"reason.driver"}))
def test_a_reason_is_read_by_its_own_template_whatever_is_in_it(key):
    assert reason_text(fill(TEMPLATES[key], [DRIVER] * 9)).key == key


def test_what_the_driver_said_is_translated_inside_a_reason():
    found = reason_text(f"the device is out of service: self-test failed: {DRIVER}")
    assert found.key == "reason.out_of_service"
    (test,) = found.args
    assert test.key == "reason.test_failed"
    assert test.args[0].key == "reason.driver_named"
    assert test.args[0].args == ["cuCheckpointProcessLock", "999", "CUDA_ERROR_UNKNOWN"]
    hub = reason_text("the Hub did not start j1-1: status 503")
    assert hub.args[0] == "j1-1"
    assert hub.args[1].args == ["503"]


@pytest.mark.parametrize(
    "reason", ["", "cuCheckpoint: error 999", "it uses a thing that nobody knew", "a, b: %1"]
)
def test_any_other_reason_stays_as_it_is(reason):
    assert english(reason_text(reason)) == reason


def test_the_reasons_are_found():
    assert len(FOUND) > 50


def test_what_a_program_printed_is_never_read_as_a_reason():
    told = reason_text("Ended with exit code 1. It last printed:\nnot measured")
    assert told.key == "reason.last_printed"
    assert told.args[1] == "not measured"
