"""Run the demo hub of `make hub` until Ctrl-C.

The Hub, its proxy, the broker and all servers write to one log file.  The terminal shows the
address, the users, first steps, and errors.  Two demo hubs need different ports and different
folders; a second demo hub with the same folder is refused.

Environment: GPUSHARE_DEMO_PORT, GPUSHARE_DEMO_DIR (see `jupyterhub_config.py`).
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from step import bound, last_lines

ROOT = Path(__file__).resolve().parents[1]
PORTS = 4  # the Hub's page, and three internal ports of jupyterhub_config.py
_MAX_PORT = 65535 - PORTS + 1
_HEALTH = "/services/gpushare/api/v1/health"
# The Hub's log has its address, with a path if jupyterhub_config.py sets one.
_RUNS_AT = re.compile(rb"JupyterHub is now running at (http\S+?)/?\s")
_RUNS_WITHIN_BYTES = 1 << 20
# The first start imports JupyterLab and creates tables.
READY_S = 120.0
_STOP_S = 60.0
_PRINT_EVERY_S = 5.0
_POLL_S = 0.3
# The beginning of a line at these levels in JupyterHub's log and in ours.
_ERROR = re.compile(r"\[[EC] |(?:ERROR|CRITICAL)\b")


class Refused(Exception):
    """The demo cannot start; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The port and the state folder of this demo hub."""

    port: int
    folder: Path

    @property
    def url(self) -> str:
        """Return the address of the Hub's page with an unchanged jupyterhub_config.py."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """Return the path of the log of the Hub, the broker and all servers of this run."""
        return self.folder / "hub.log"

    def other(self) -> str:
        """Return a command that starts a second demo hub beside this one."""
        port = self.port + 100 if self.port + 100 <= _MAX_PORT else self.port - 100
        return f"GPUSHARE_DEMO_PORT={port} GPUSHARE_DEMO_DIR=demo-data-{port} make hub"


def settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings in the environment.

    Raises:
        Refused: GPUSHARE_DEMO_PORT is not a port with three more above it.
    """
    text = environment.get("GPUSHARE_DEMO_PORT") or "8000"
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= _MAX_PORT):
        raise Refused(
            f"GPUSHARE_DEMO_PORT={text} is not a port from 1 to {_MAX_PORT} (three more above it are used)."
        )
    folder = environment.get("GPUSHARE_DEMO_DIR") or ROOT / "demo-data"
    return Settings(int(text), Path(folder).resolve())


@contextlib.contextmanager
def folder_of(wanted: Settings) -> Iterator[None]:
    """Lock the state folder for this demo hub.

    Raises:
        Refused: another demo hub uses the folder, or it cannot be created.
    """
    try:
        wanted.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (wanted.folder / "demo.lock").open("a+")
    except OSError as error:
        raise Refused(f"{wanted.folder} cannot be used (GPUSHARE_DEMO_DIR): {error.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            running = lock.read(100).strip() or "another port"
            raise Refused(
                f"A demo hub runs at {running} with the folder {wanted.folder}.\n"
                f"Stop it, or give this one a port and a folder of its own: {wanted.other()}"
            ) from None
        lock.truncate(0)
        lock.write(wanted.url)
        lock.flush()
        yield


def check_ports(wanted: Settings) -> None:
    """Check that all ports are free.

    Raises:
        Refused: a port cannot be used.
    """
    for port in range(wanted.port, wanted.port + PORTS):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            raise Refused(
                f"Cannot use port {port}: {os.strerror(error.errno or 0)}.\n"
                f"Stop the program that listens there, or choose others: {wanted.other()}"
            ) from None


def box(wanted: Settings) -> str:
    """Return a box with the address, the users, the first steps, and how to end the demo."""
    lines = [
        f"The demo is ready:  {address(wanted)}",
        "",
        "Log in as ada, bo, cy or admin, with any password.",
        "  ada: project vision    bo: project nlp    cy: both    admin: sees all",
        "",
        "Try first: log in as ada, start with the size that is preselected, and open a",
        "notebook. Ten minutes with two users: docs/quickstart.md",
        "",
        f"Log:   {wanted.log}",
        "End:   Ctrl-C",
    ]
    width = max(map(len, lines))
    rule = f"+{'-' * (width + 2)}+"
    return "\n".join([rule, *(f"| {line:<{width}} |" for line in lines), rule])


def address(wanted: Settings) -> str:
    """Return the address of the Hub's page from its log, without a trailing slash; empty if not there yet."""
    try:
        with wanted.log.open("rb") as log:
            found = _RUNS_AT.search(log.read(_RUNS_WITHIN_BYTES))
    except OSError:
        return ""
    return found[1].decode() if found else ""


def is_ready(wanted: Settings) -> bool:
    """Return whether the broker answers through the Hub's proxy, and is healthy."""
    if not (url := urlsplit(address(wanted))).port:
        return False
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=5)
    try:
        connection.request("GET", f"{url.path}{_HEALTH}")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Demo:
    """Runs the Hub's process and prints errors from its log."""

    def __init__(self, wanted: Settings) -> None:
        self._wanted = wanted
        self._must_end = False
        self._read_bytes = 0
        if wanted.log.exists():
            wanted.log.replace(wanted.log.with_suffix(".log.1"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        with wanted.log.open("wb") as output:
            # The Hub has its own session, so Ctrl-C reaches only this process, which signals the Hub once.
            self._hub = subprocess.Popen(
                bound([sys.executable, "-m", "jupyterhub", "-f", "jupyterhub_config.py"]),
                cwd=ROOT,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                    "GPUSHARE_DEMO_PORT": str(wanted.port),
                    "GPUSHARE_DEMO_DIR": str(wanted.folder),
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._must_end = True

    def run(self) -> int:
        """Run until the Hub ends; return the exit status, which is 0 after Ctrl-C."""
        if self._wait_until_ready():
            print(box(self._wanted), flush=True)
            while not self._must_end and self._hub.poll() is None:
                self._print_errors()
                time.sleep(_POLL_S)
        return self._end()

    def _wait_until_ready(self) -> bool:
        began_at = printed_at = time.monotonic()
        print("Starting the Hub, its proxy and the GPU broker ...", flush=True)
        while not self._must_end and self._hub.poll() is None:
            if is_ready(self._wanted):
                return True
            now = time.monotonic()
            if now - began_at > READY_S:
                print(f"No answer within {READY_S:.0f} s.", file=sys.stderr)
                return False
            if now - printed_at > _PRINT_EVERY_S:
                printed_at = now
                print(f"  {now - began_at:.0f} s", flush=True)
            time.sleep(_POLL_S)
        return False

    def _print_errors(self) -> None:
        with self._wanted.log.open("rb") as log:
            log.seek(self._read_bytes)
            text, complete, _ = log.read(1 << 20).rpartition(b"\n")
        self._read_bytes += len(text) + len(complete)
        for line in text.decode(errors="replace").splitlines():
            if _ERROR.match(line):
                print(line, flush=True)

    def _end(self) -> int:
        if self._must_end:
            print("\nEnding the demo ...", flush=True)
        elif self._hub.poll() is not None or not is_ready(self._wanted):
            print("\n".join(last_lines(self._wanted.log, 20)), file=sys.stderr)
            print(f"The demo hub has failed; its log: {self._wanted.log}", file=sys.stderr)
        began_at = time.monotonic()
        if self._hub.poll() is None:
            self._hub.send_signal(signal.SIGINT)
            try:
                self._hub.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._hub.kill()
                self._hub.wait()
                print(f"The Hub did not end within {_STOP_S:.0f} s and was killed.", file=sys.stderr)
                return 1
        if not self._must_end:
            return 1
        print(
            f"Ended after {time.monotonic() - began_at:.0f} s. The state stays in {self._wanted.folder}.",
            flush=True,
        )
        return 0


def main() -> int:
    """Run the demo; return the exit status: 0 after Ctrl-C, 1 with a printed reason."""
    try:
        wanted = settings(os.environ)
        if sys.argv[1:] == ["--check"]:
            return 0
        with folder_of(wanted):
            check_ports(wanted)
            return Demo(wanted).run()
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
