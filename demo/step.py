"""Run one step of the set-up with its output in a log file, and show its progress.

    python demo/step.py "Installing JupyterLab" .venv/stamps/package.log -- pip install jupyterlab

It prints the label, every few seconds the elapsed time and the last line of the log, and
finally the duration.  It exits like the command; if that fails, it prints the end of the log.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EVERY_S = 5.0
_PARENT = Path(__file__).resolve().parents[1] / "jupyter_gpushare" / "parent.py"
_TAIL_LINES = 40
_TAIL_BYTES = 64 << 10
_WIDTH = 70


def bound(command: Sequence[str]) -> list[str]:
    """Return a command line that runs ``command`` so that it gets SIGTERM when this process ends."""
    numbers = (str(os.getpid()), str(int(signal.SIGTERM)))
    return [sys.executable, "-IS", str(_PARENT), *numbers, *command]


def last_lines(log: Path, count: int) -> list[str]:
    """Return at most ``count`` last lines of a log that are not blank; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def run(label: str, log: Path, command: Sequence[str], *, every_s: float = EVERY_S) -> int:
    """Run ``command``; return its exit status (128 + N for signal N)."""
    print(f"{label} ...", flush=True)
    began_at = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            bound(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    while True:
        try:
            status = process.wait(every_s)
            break
        except subprocess.TimeoutExpired:
            print(f"  {time.monotonic() - began_at:.0f} s  {_last(log)}", flush=True)
    if status:
        print("\n".join(last_lines(log, _TAIL_LINES)), file=sys.stderr)
        print(f"{label}: failed with status {status}; all of its output: {log}", file=sys.stderr)
        return status if status > 0 else 128 - status
    print(f"{label}: done in {time.monotonic() - began_at:.0f} s", flush=True)
    return 0


def _last(log: Path) -> str:
    """Return the last line of the log, cut to the width of a terminal."""
    found = " ".join("".join(last_lines(log, 1)).split())
    return found if len(found) <= _WIDTH else f"{found[: _WIDTH - 3]}..."


def main(words: Sequence[str]) -> int:
    """Run the step; return the exit status of the command, or 2 after wrong usage."""
    if len(words) < 4 or words[2] != "--":
        print(f"usage: {os.path.basename(__file__)} LABEL LOG -- COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    try:
        return run(words[0], Path(words[1]), words[3:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
