"""A seat: the process of the pod that Kubernetes places and evicts for one lease (`protocol.seats`).

    start    ask the driver for the devices of this container, and report them to the node's helper
    wait     until SIGTERM; reopen a lost connection
    SIGTERM  ask the helper to take the lease off the devices, and end once it has

The devices never come from the environment, because an image or a runtime may set anything there.
A seat that no helper has accepted stands for no memory, and ends at once on SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jupyter_gpushare.command_line import Option, Parser
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.gpu.driver.nvml import Nvml
from jupyter_gpushare.gpu.service.lines import Closed, Lines
from jupyter_gpushare.protocol.helper import ErrorKind, encode
from jupyter_gpushare.protocol.seats import Sit, Vacate

log = logging.getLogger(__name__)

SOCKET = "seat.sock"  # in the helper's folder
RETRY_S = 0.5
ANSWER_S = 10.0
# Refusals that no retry changes.
_FINAL = (ErrorKind.STALE_EPOCH, ErrorKind.BAD_REQUEST, ErrorKind.NOT_ALLOWED)


class SeatProcess:
    """One seat and its connection to the helper."""

    def __init__(self, sit: Sit, path: Path, stop: int) -> None:
        """``path`` is the helper's socket; a signal makes the descriptor ``stop`` readable.

        `Sit.returns` becomes true once a helper has accepted the seat.
        """
        self._sit = sit
        self._path = path
        self._stop = stop

    def run(self) -> str:
        """Run until the seat may end; return what became of the lease's memory.

        Raises:
            HelperError: the helper refuses this seat for good.
        """
        kill_at: float | None = None
        while True:
            if kill_at is None and self._is_stopped(0.0):
                kill_at = time.monotonic() + self._sit.grace_s
            if kill_at is not None and not self._sit.returns:
                return "no helper has accepted it"
            with contextlib.suppress(OSError), self._connected() as helper:
                if self._is_seated(helper, kill_at is not None):
                    if kill_at is None and self._wait(helper):
                        kill_at = time.monotonic() + self._sit.grace_s
                    if kill_at is not None and (outcome := self._vacate(helper, kill_at)):
                        return outcome
            self._pause(kill_at is not None)

    def _connected(self) -> socket.socket:
        helper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            helper.settimeout(ANSWER_S)
            helper.connect(str(self._path))
        except OSError as error:
            helper.close()
            log.warning("no device helper at %s: %s", self._path, error.strerror)
            raise
        return helper

    def _is_seated(self, helper: socket.socket, leaving: bool) -> bool:
        """Register this seat with the helper; return False if the helper refuses it for now."""
        if self._ask(helper, "sit", replace(self._sit, leaving=leaving), ANSWER_S) is None:
            return False
        self._sit = replace(self._sit, returns=True)
        log.info("lease=%s sits on %s", self._sit.lease, ", ".join(self._sit.devices))
        return True

    def _wait(self, helper: socket.socket) -> bool:
        """Wait until the seat is asked to end; return False if the connection is lost first."""
        ready, _, _ = select.select([helper.fileno(), self._stop], [], [])
        return self._stop in ready

    def _vacate(self, helper: socket.socket, kill_at: float) -> str:
        """Have the helper free the devices; return what became of the memory, or "" on a lost connection."""
        remaining_s = max(0.0, kill_at - time.monotonic())
        log.info("lease=%s leaves within %.0f s", self._sit.lease, remaining_s)
        # If the helper never answers, the kubelet ends the wait.
        answer = self._ask(helper, "vacate", Vacate(left_s=remaining_s), None)
        if answer is None:
            return ""
        return " ".join(word for word in (str(answer.get("outcome")), str(answer.get("reason", ""))) if word)

    def _ask(
        self, helper: socket.socket, verb: str, request: Sit | Vacate, timeout_s: float | None
    ) -> dict[str, Any] | None:
        """Send a request and return the helper's answer; None on a closed connection or a refusal for now.

        Raises:
            HelperError: the helper refused for good.
            OSError: it does not answer.
        """
        lines = Lines(helper, timeout_s)
        lines.write(encode({"verb": verb, **asdict(request)}))
        try:
            answer: dict[str, Any] = json.loads(lines.read())
        except Closed:
            return None
        if answer.get("ok"):
            result: dict[str, Any] = answer["result"]
            return result
        error = answer["error"]
        if error["kind"] in _FINAL:
            raise HelperError(error["kind"], error["message"])
        log.warning("the helper refuses for now: %s", error["message"])
        return None

    def _pause(self, stopping: bool) -> None:
        if stopping:
            time.sleep(RETRY_S)
        else:
            self._is_stopped(RETRY_S)

    def _is_stopped(self, within_s: float) -> bool:
        return bool(select.select([self._stop], [], [], within_s)[0])


_OPTIONS = (
    Option("--name NAME", "of the pod", required=True),
    Option("--lease LEASE", "the lease that sits here", required=True),
    Option("--epoch EPOCH", "of the broker that created the pod", int, required=True),
    Option(
        "--grace-s SECONDS",
        "grace of the pod: between SIGTERM and SIGKILL (default 180)",
        float,
        default=180.0,
    ),
    Option(
        "--host-dir PATH",
        f"folder of the node's device helper, with its {SOCKET} (default /run/gpushare)",
        Path,
        default=Path("/run/gpushare"),
    ),
)


def parse(argv: Sequence[str]) -> tuple[Sit, Path]:
    """Return the seat, without devices, and the helper's socket; exit with 2 if an option is wrong."""
    parser = Parser(
        prog="gpushare seat",
        description="Stands for one lease on a Kubernetes node; started by the broker, in a pod that the "
        "cluster's scheduler places and evicts (docs/kubernetes.md).",
    )
    for option in _OPTIONS:
        option.add_to(parser)
    given = parser.parse_args(argv)
    sit = Sit(seat=given.name, lease=given.lease, epoch=given.epoch, devices=(), grace_s=given.grace_s)
    return sit, given.host_dir / SOCKET


def main(argv: Sequence[str] | None = None) -> int:
    """Run a seat until it is asked to end and its lease is off the devices; on failure exit with 1."""
    sit, path = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr
    )
    stop, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    try:
        nvml = Nvml()
        devices = tuple(gpu.uuid for gpu in nvml.gpus)
        if not devices:
            reason = "; ".join(nvml.left_out) or "the driver shows no device in this container"
            raise HelperError("no_device", reason)
        outcome = SeatProcess(replace(sit, devices=devices), path, stop).run()
    except GpuShareError as error:
        print(f"gpushare seat: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread that hangs in the driver must not keep the process alive
    log.info("lease=%s seat=%s ends: %s", sit.lease, sit.seat, outcome)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
