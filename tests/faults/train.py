"""The command of a job: records that it runs, holds GPU memory for a while, and records the result.

    train.py FOLDER SECONDS|FILE MIB...    MIB on each of its devices in turn; until FILE exists

Lines of FOLDER/runs: "JOB ATTEMPT begin", "JOB ATTEMPT end", and for violations "twice" (another attempt
of this job lives) and "memory" (less memory than its lease has, or its bytes changed).
"""

import fcntl
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import worker

folder, seconds, *sizes = sys.argv[1:]
name = os.environ["GPUSHARE_JOB_ID"]
runs = os.open(f"{folder}/runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(what: str) -> None:
    os.write(runs, f"{name} {os.environ['GPUSHARE_JOB_ATTEMPT']} {what}\n".encode())


note("begin")
lock = os.open(f"{folder}/{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("twice")
contexts = []
for ordinal, mib in enumerate(sizes):
    code, context = worker.init(ordinal)
    if code or worker.alloc(int(mib)):
        note("memory")
        sys.exit(3)
    contexts.append(context)
until = time.monotonic() + (float("inf") if "/" in seconds else float(seconds))
while time.monotonic() < until and not ("/" in seconds and os.path.exists(seconds)):
    time.sleep(0.05)
    if worker.check(contexts[0]) != "ok":
        note("memory")
        sys.exit(4)
note("end")
