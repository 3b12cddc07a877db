"""`gpushare admin release`: processes that use a GPU without a lease."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from urllib.parse import quote

from jupyter_gpushare.cli.output import print_table, say
from jupyter_gpushare.cli.verbs import confirm, shown_by
from jupyter_gpushare.errors import Conflict, NotFound
from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient


def _print(answer: wire.Devices | None) -> None:
    if answer is None:
        say("It was told to end.")
        return
    rows = [
        [str(p.pid), str(p.uid), p.name, d.uuid, gibibytes(p.used_bytes) if p.used_bytes else "-", _what(p)]
        for d in answer.devices
        for p in d.unleased
    ]
    if rows:
        print_table(["PID", "UID", "NAME", "GPU", "MEMORY", ""], rows)
    else:
        say("No process is known to use a GPU without a lease.")


@shown_by(_print)
def release(client: BlockingClient, args: argparse.Namespace) -> wire.Devices | None:
    """End a process that uses a GPU without a lease.

    gpushare admin release           those that there are, and which are left alone
    gpushare admin release 4711      SIGTERM, and SIGKILL 5 s later; asks first

    Raises:
        NotFound: there is no such process.
        Conflict: there are several, on different machines.
    """
    answer = client.get("devices", wire.Devices)
    if args.pid is None:
        return answer
    found = [(d, p) for d in answer.devices for p in d.unleased if p.pid == args.pid]
    if not found:
        raise NotFound(
            f"No process {args.pid} uses a GPU without a lease; `gpushare admin release` lists them."
        )
    if len({process.process for _, process in found}) > 1:
        gpus = ", ".join(device.uuid for device, _ in found)
        raise Conflict(f"Processes {args.pid} of several machines use GPUs ({gpus}): use the service's page.")
    device, process = found[0]
    what = f"process {process.pid} ({process.name}) of uid {process.uid} on GPU {device.uuid}"
    confirm(args, f"End {what}? What it has not saved is lost.")
    path = f"devices/{quote(device.uuid, safe='')}/processes/{process.process}"
    answer = client.delete(path, wire.Devices, repeatable=True)
    return answer if args.json else None


def _what(process: wire.UnleasedProcess) -> str:
    if process.kept:
        return f"left alone: {process.kept}"
    return "told to end" if process.ending else ""
