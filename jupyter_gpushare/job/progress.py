"""Progress reports from training programs.  Standard library only.

    from jupyter_gpushare.job.progress import progress

    for step in range(steps):
        train(step)
        progress(step + 1, steps)

Outside a job, and when the runner is busy or gone, `progress` does nothing.  It
never blocks a program.
"""

from __future__ import annotations

import json
import math
import os
import socket

SOCKET_VARIABLE = "GPUSHARE_PROGRESS_SOCKET"


def progress(done: float, total: float | None = None) -> bool:
    """Report ``done`` of ``total`` to the runner, in any unit; return whether the report was delivered.

    Raises:
        ValueError: a number is negative or not finite.
    """
    for value in (done, 0.0 if total is None else total):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"progress is counted in finite numbers from 0, not {value!r}")
    address = os.environ.get(SOCKET_VARIABLE)
    if not address:
        return False
    line = json.dumps({"done": float(done), "total": None if total is None else float(total)})
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(line.encode() + b"\n", address)
    except OSError:
        return False
    return True
