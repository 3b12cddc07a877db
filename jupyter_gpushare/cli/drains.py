"""`gpushare admin drain` and `undrain`: a GPU, or the machine, takes nothing new."""

from __future__ import annotations

import argparse
import re
from contextlib import closing
from datetime import datetime, timedelta
from urllib.parse import quote

from jupyter_gpushare.cli.output import day_and_time, note, print_json, say
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, connect
from jupyter_gpushare.protocol import wire

MACHINE = "machine"
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")


def time_of_day(text: str) -> str:
    """Return a time of the clock of this computer, like ``18:00``, or a day and time, as ISO 8601.

    A time of the clock that is over today is that of tomorrow.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    now = datetime.now().astimezone()
    if clock := _CLOCK.fullmatch(text.strip()):
        at = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        return (at if at > now else at + timedelta(days=1)).isoformat()
    try:
        return datetime.fromisoformat(text.strip()).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 18:00 or 2026-11-22T18:00") from None


def drain(args: argparse.Namespace) -> int:
    """Let a GPU or the machine take nothing new, or print what does; return the exit code."""
    if args.by is not None and args.device is None:
        args.parser.error("name the GPU, or `machine`")
    with closing(connect(args)) as client:
        answer = client.get("devices", wire.Devices)
        if args.device is not None:
            if (name := _found(answer, args.device)) is None:
                return EXIT_REFUSED
            request = wire.DrainRequest(until=args.by)
            answer = client.put(_path(name), request, wire.Devices, repeatable=True)
    _print(args, answer)
    return EXIT_OK


def undrain(args: argparse.Namespace) -> int:
    """Let a GPU or the machine take work again; return the exit code."""
    with closing(connect(args)) as client:
        if (name := _found(client.get("devices", wire.Devices), args.device)) is None:
            return EXIT_REFUSED
        answer = client.delete(_path(name), wire.Devices, repeatable=True)
    _print(args, answer)
    return EXIT_OK


def _path(name: str) -> str:
    return f"devices/{quote(name, safe='')}/drain"


def _found(known: wire.Devices, asked: str) -> str | None:
    """Return the UUID that begins with ``asked``; None, and say so: there is none, or several."""
    if asked == MACHINE:
        return MACHINE
    uuids = [device.uuid for device in known.devices]
    found = [asked] if asked in uuids else [uuid for uuid in uuids if uuid.startswith(asked)]
    if len(found) == 1:
        return found[0]
    what = "several GPUs begin" if found else "no GPU begins"
    note(f"{what} with {asked!r}; there are: {', '.join(uuids) or 'none'}. All together: {MACHINE}")
    return None


def _print(args: argparse.Namespace, answer: wire.Devices) -> None:
    if args.json:
        print_json(answer)
        return
    for device in answer.devices:
        say(f"{device.uuid} ({device.name}): {_sentence(device.drain)}")
    if not answer.devices:
        say("No GPU is known.")


def _sentence(drain: wire.Drain | None) -> str:
    if drain is None:
        return "takes work."
    there = f"{_count(drain.sessions, 'session')} and {_count(drain.jobs, 'job')} are still there"
    asked = f", asked to finish by {day_and_time(drain.until)}" if drain.until and drain.sessions else ""
    return f"takes nothing new, set by {drain.by} at {day_and_time(drain.at)}; {there}{asked}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
