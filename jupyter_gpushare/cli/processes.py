"""`gpushare admin release`: processes that use a GPU without a lease."""

from __future__ import annotations

import argparse
from contextlib import closing
from urllib.parse import quote

from jupyter_gpushare.cli.output import confirmed, note, print_json, print_table, say
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, connect
from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.protocol import wire


def release(args: argparse.Namespace) -> int:
    """Print the processes without a lease, or end one of them; return the exit code."""
    with closing(connect(args)) as client:
        answer = client.get("devices", wire.Devices)
        if args.pid is not None:
            found = [(d, p) for d in answer.devices for p in d.unleased if p.pid == args.pid]
            if not found:
                note(
                    f"No process {args.pid} uses a GPU without a lease; `gpushare admin release` lists them."
                )
                return EXIT_REFUSED
            if len({process.process for _, process in found}) > 1:
                gpus = ", ".join(device.uuid for device, _ in found)
                note(f"Processes {args.pid} of several machines use GPUs ({gpus}): use the service's page.")
                return EXIT_REFUSED
            device, process = found[0]
            what = f"process {process.pid} ({process.name}) of uid {process.uid} on GPU {device.uuid}"
            if not args.yes and not confirmed(args, f"End {what}? What it has not saved is lost."):
                return EXIT_REFUSED
            path = f"devices/{quote(device.uuid, safe='')}/processes/{process.process}"
            answer = client.delete(path, wire.Devices, repeatable=True)
    if args.json:
        print_json(answer)
    elif args.pid is not None:
        say("It was told to end.")
    else:
        _print(answer)
    return EXIT_OK


def _print(answer: wire.Devices) -> None:
    rows = [
        [str(p.pid), str(p.uid), p.name, d.uuid, gibibytes(p.used_bytes) if p.used_bytes else "-", _what(p)]
        for d in answer.devices
        for p in d.unleased
    ]
    if not rows:
        say("No process is known to use a GPU without a lease.")
        return
    print_table(["PID", "UID", "NAME", "GPU", "MEMORY", ""], rows)


def _what(process: wire.UnleasedProcess) -> str:
    if process.kept:
        return f"left alone: {process.kept}"
    return "told to end" if process.ending else ""
