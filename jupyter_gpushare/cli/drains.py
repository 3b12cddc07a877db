"""`gpushare admin drain` and `undrain`: a GPU, or the machine, takes nothing new."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote

from jupyter_gpushare.cli.output import day_and_time, say
from jupyter_gpushare.cli.verbs import shown_by
from jupyter_gpushare.errors import NotFound
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

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


def _print(answer: wire.Devices) -> None:
    for device in answer.devices:
        say(f"{device.uuid} ({device.name}): {_sentence(device.drain)}")
    if not answer.devices:
        say("No GPU is known.")


@shown_by(_print)
def drain(client: BlockingClient, args: argparse.Namespace) -> wire.Devices:
    """Let a GPU or the machine take nothing new, and ask owners there to finish.

    gpushare admin drain                        which take nothing new, and what is still there
    gpushare admin drain GPU-5f2 --by 18:00     its UUID, or how that begins
    gpushare admin drain machine
    """
    if args.by is not None and args.device is None:
        args.parser.error("name the GPU, or `machine`")
    known = client.get("devices", wire.Devices)
    if args.device is None:
        return known
    request = wire.DrainRequest(until=args.by)
    return client.put(_path(known, args.device), request, wire.Devices, repeatable=True)


@shown_by(_print)
def undrain(client: BlockingClient, args: argparse.Namespace) -> wire.Devices:
    """Let a GPU or the machine take work again.

    gpushare admin undrain machine
    """
    path = _path(client.get("devices", wire.Devices), args.device)
    return client.delete(path, wire.Devices, repeatable=True)


def _path(known: wire.Devices, asked: str) -> str:
    """Return the path of the machine, or of the GPU whose UUID begins with ``asked``.

    Raises:
        NotFound: there is none, or several.
    """
    uuids = [device.uuid for device in known.devices]
    names = [MACHINE, *uuids]
    found = [asked] if asked in names else [uuid for uuid in uuids if uuid.startswith(asked)]
    if len(found) != 1:
        what = "several GPUs begin" if found else "no GPU begins"
        there = ", ".join(uuids) or "none"
        raise NotFound(f"{what} with {asked!r}; there are: {there}. All together: {MACHINE}")
    return f"devices/{quote(found[0], safe='')}/drain"


def _sentence(drain: wire.Drain | None) -> str:
    if drain is None:
        return "takes work."
    there = f"{_count(drain.sessions, 'session')} and {_count(drain.jobs, 'job')} are still there"
    asked = f", asked to finish by {day_and_time(drain.until)}" if drain.until and drain.sessions else ""
    return f"takes nothing new, set by {drain.by} at {day_and_time(drain.at)}; {there}{asked}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
