"""`gpushare admin export`: what ran on this site, as a trace for `gpushare simulate`."""

from __future__ import annotations

import argparse
import csv
import sys
from contextlib import closing
from typing import IO

from jupyter_gpushare.cli.output import for_spreadsheets, note, print_json
from jupyter_gpushare.cli.verbs import EXIT_OK, connect
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol import wire

_MINUTE_S = 60.0
_COLUMNS = ("num_gpu", "submit_time", "duration", "session", "user", "project", "gpus")


def export(args: argparse.Namespace) -> int:
    """What ran on this site, as a trace for `gpushare simulate`.

    gpushare admin export jobs jobs.csv
    gpushare simulate jobs jobs.csv --gpus 8
    gpushare admin export cells cells.csv
    gpushare simulate notebooks cells.csv --gpus 8 --jobs jobs.csv --idle-timeout 900

    Raises:
        GpuShareError: the file is there already, or cannot be written.
    """
    params = {"names": 1} if args.names else {}
    with closing(connect(args)) as client:
        answer = client.get(f"trace/{args.kind}", wire.Trace, params=params)
    if args.json:
        print_json(answer)
        return EXIT_OK
    if args.file == "-":
        _write(sys.stdout, args.kind, answer)
    else:
        try:
            with open(args.file, "x", encoding="utf-8", newline="") as file:
                _write(file, args.kind, answer)
        except OSError as error:
            raise GpuShareError(f"{args.file}: {error.strerror}") from None
    left = f"; {answer.left_out} never ran and are left out" if answer.left_out else ""
    note(f"{len(answer.rows)} rows, the first at {answer.since or 'no time'}{left}.")
    return EXIT_OK


def _write(file: IO[str], kind: str, answer: wire.Trace) -> None:
    # The simulator reads jobs in seconds, and cells in minutes.
    unit_s = 1.0 if kind == "jobs" else _MINUTE_S
    table = csv.writer(file, lineterminator="\n")
    table.writerow(_COLUMNS)
    for row in answer.rows:
        times = (f"{seconds / unit_s:.6f}" for seconds in (row.submit_s, row.duration_s))
        names = (for_spreadsheets(text) for text in (row.session, row.user, row.project))
        table.writerow([row.num_gpu, *times, *names, f"{row.gpus:g}"])
