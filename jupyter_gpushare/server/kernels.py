"""Watch which kernels of a server run a cell, according to the messages that they publish.

`MESSAGES` has the rules.  A status message names its request, which distinguishes a cell from a request
that a panel sends on the control channel; the `execution_state` of Jupyter Server does not.  A cell lasts
from its ``execute_input`` to the idle status of the same request.  Silent and aborted requests have no
``execute_input``, and neither ``input()`` nor an interrupt ends a cell.  A subshell runs one cell at a
time, so a cell whose end was lost ends with the next one there, at the latest with its process.

For a kernel that has not published anything, such as one behind a gateway, ``execution_state`` counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zmq
from jupyter_client.session import Session

# The maximum number of watched kernels; for others their `execution_state` counts.
MAX_KERNELS = 200
# The maximum number of simultaneous requests of one kernel: a cell and another request per subshell.
MAX_REQUESTS = 64
MAX_ID = 200
# Larger statuses and headers are not parsed.  ZeroMQ keeps at most 1,000 unread messages of a kernel.
MAX_BYTES = 65_536
# Messages that are read in one turn of the server's loop, so that a flood of output drops no status.
MESSAGES_AT_ONCE = 100
# A request that takes longer may wait for the GPU.  Requests caused by typing never take that long.
LONG_S = 1.0


class Counts(StrEnum):
    """Whether a message keeps a session awake."""

    CELL = "yes, up to `max_hold`"
    GPU_WORK = "its GPU work does"
    NO = "no"


@dataclass(frozen=True, slots=True)
class MessageType:
    """A type of message of the Jupyter messaging specification; ``channels`` are separated by ``", "``."""

    channels: str
    name: str
    counts: Counts
    why: str


_TYPING = "pages send it while someone types or reads help"
_ASKS = "it asks about the kernel or a cell"
_OUTPUT = "the cell that it comes from counts, while it runs"
_INPUT = "the cell that asks counts"
_MANAGES = "it manages the kernel"
_WIDGET = "a message of a widget runs code, often without its user"

MESSAGES = (
    MessageType("shell", "execute_request", Counts.CELL, "a cell runs, also while it waits in `input()`"),
    MessageType("shell", "execute_request, silent", Counts.GPU_WORK, "the page asks, not its user"),
    MessageType("shell", "inspect_request", Counts.NO, _TYPING),
    MessageType("shell", "complete_request", Counts.NO, _TYPING),
    MessageType("shell", "history_request", Counts.NO, _TYPING),
    MessageType("shell", "is_complete_request", Counts.NO, _TYPING),
    MessageType("shell", "connect_request", Counts.NO, _ASKS),
    MessageType("shell", "comm_info_request", Counts.NO, _ASKS),
    MessageType("shell, control", "kernel_info_request", Counts.NO, _ASKS),
    MessageType("shell", "comm_open", Counts.GPU_WORK, _WIDGET),
    MessageType("shell", "comm_msg", Counts.GPU_WORK, _WIDGET),
    MessageType("shell", "comm_close", Counts.GPU_WORK, _WIDGET),
    MessageType("control", "usage_request", Counts.NO, "panels of resources send it every few seconds"),
    MessageType("control", "debug_request", Counts.NO, "the cell that stands at a breakpoint counts"),
    MessageType("control", "interrupt_request", Counts.NO, _MANAGES),
    MessageType("control", "shutdown_request", Counts.NO, _MANAGES),
    MessageType("control", "create_subshell_request", Counts.NO, _MANAGES),
    MessageType("control", "delete_subshell_request", Counts.NO, _MANAGES),
    MessageType("control", "list_subshell_request", Counts.NO, _MANAGES),
    MessageType("stdin", "input_request", Counts.NO, _INPUT),
    MessageType("stdin", "input_reply", Counts.NO, _INPUT),
    MessageType("iopub", "status", Counts.NO, "idle: the cell of its request has ended"),
    MessageType("iopub", "execute_input", Counts.CELL, "the cell of its request has begun"),
    MessageType("iopub", "stream", Counts.NO, _OUTPUT),
    MessageType("iopub", "display_data", Counts.NO, _OUTPUT),
    MessageType("iopub", "update_display_data", Counts.NO, _OUTPUT),
    MessageType("iopub", "execute_result", Counts.NO, _OUTPUT),
    MessageType("iopub", "error", Counts.NO, _OUTPUT),
    MessageType("iopub", "clear_output", Counts.NO, _OUTPUT),
    MessageType("iopub", "debug_event", Counts.NO, _OUTPUT),
    MessageType("iopub", "comm_open", Counts.NO, _OUTPUT),
    MessageType("iopub", "comm_msg", Counts.NO, _OUTPUT),
    MessageType("iopub", "comm_close", Counts.NO, _OUTPUT),
    MessageType("iopub", "iopub_welcome", Counts.NO, "it confirms a subscription"),
)
# Messages that are not in the table, such as replies, count as `NO`.
_COUNTING = [each for each in MESSAGES if each.counts is Counts.CELL]
_CELLS = frozenset(each.name for each in _COUNTING if each.channels != "iopub")
_BEGINNINGS = frozenset(each.name for each in _COUNTING if each.channels == "iopub")
# Only these requests certainly occupy the thread that runs the user's code.
_ON_SHELL = frozenset(each.name for each in MESSAGES if each.channels == "shell")


@dataclass(frozen=True, slots=True)
class KernelState:
    """The state of one kernel, comparable with an earlier one."""

    id: str
    name: str = ""
    runs_cell: bool = False
    handles_request: bool = False  # a cell, or another request for `LONG_S`, which may wait for the GPU
    cells: int = 0  # begun since the kernel is watched
    last_cell_at: float = 0.0  # on the clock of `Kernels`; the start of `Kernels` if no cell ran


@dataclass(frozen=True, slots=True)
class _KernelRequest:
    """A request that a kernel handles."""

    id: str
    began_at: float
    process: int | None


class _Watch:
    """Follows one kernel's requests."""

    def __init__(self, kernel: Any, clock: Callable[[], float], began_at: float) -> None:
        self.kernel, self._clock = kernel, clock
        self._stream: Any = None
        self._ports: object = None  # of the last attempt to connect
        self._session: Any = None
        # The keys are a subshell, and whether the request is its cell.
        self._requests: dict[tuple[str, bool], _KernelRequest] = {}
        self._has_published = self._was_busy = False
        self._cells, self._last_cell_at = 0, began_at

    @property
    def is_connected(self) -> bool:
        """Return whether the kernel's messages are received."""
        return self._stream is not None

    def state(self, id_: str) -> KernelState:
        """Return the state of the kernel now."""
        now, process = self._clock(), _process_of(self.kernel)
        for key, request in list(self._requests.items()):
            if request.process != process:
                self._end(key)  # its process has ended
        is_busy = not self._has_published and getattr(self.kernel, "execution_state", "") == "busy"
        if is_busy:
            self._cells += not self._was_busy
            self._last_cell_at = now
        self._was_busy = is_busy
        runs_cell = is_busy or any(is_cell for _, is_cell in self._requests)
        takes_long = any(now - request.began_at >= LONG_S for request in self._requests.values())
        return KernelState(
            id=id_,
            name=str(getattr(self.kernel, "kernel_name", "")),
            runs_cell=runs_cell,
            handles_request=runs_cell or takes_long,
            cells=self._cells,
            last_cell_at=self._last_cell_at,
        )

    def connect(self) -> None:
        """Subscribe to the kernel's messages, and again if a restart changed its ports."""
        ports = list(getattr(self.kernel, "ports", ()))
        if ports == self._ports or not getattr(self.kernel, "iopub_port", 0):
            return
        self.close()
        self._ports = ports
        try:
            shared = self.kernel.session
            # A session of its own: a second reader would take every message for a replay.
            self._session = Session(config=shared.config, key=shared.key, digest_history_size=0)
            self._stream = self.kernel.connect_iopub()
            self._stream.on_recv(self._receive)
        except Exception:
            # With an unusual kernel manager the `execution_state` of the kernel counts.
            self.close()

    def close(self) -> None:
        """End the subscription."""
        if self._stream is not None and not self._stream.closed():
            self._stream.close()
        self._stream = None

    def _receive(self, parts: list[bytes]) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            with contextlib.suppress(Exception):  # nothing that a kernel publishes may harm the server
                self._read(parts)
            try:
                parts = self._stream.socket.recv_multipart(zmq.NOBLOCK)
            except (zmq.ZMQError, AttributeError):
                return

    def _read(self, parts: list[bytes]) -> None:
        """Handle one raw message; only messages about the state of requests are parsed."""
        _, parts = self._session.feed_identities(parts)
        header = parts[1]
        if b'"status"' not in header and b'"execute_input"' not in header:
            return
        if sum(map(len, parts[:4])) > MAX_BYTES:
            return
        message = self._session.deserialize(parts, content=False)
        msg_type, content, state = message["header"]["msg_type"], message["content"], ""
        if msg_type == "status":
            if len(content) > MAX_BYTES:
                return
            state = self._session.unpack(content)["execution_state"]
        self._note(msg_type, state, message["parent_header"])

    def _note(self, msg_type: str, state: str, parent: Mapping[str, Any]) -> None:
        """Handle a status or an ``execute_input``; ``parent`` is the header of its request."""
        request_type, id_ = parent.get("msg_type"), str(parent.get("msg_id"))
        shell = str(parent.get("subshell_id") or "")
        if len(id_) > MAX_ID or len(shell) > MAX_ID:
            return
        self._has_published = True
        if state == "starting":
            for key in list(self._requests):
                self._end(key)
        elif state == "idle":
            for key, request in list(self._requests.items()):
                if request.id == id_:
                    self._end(key)
        elif msg_type in _BEGINNINGS and request_type in _CELLS:
            self._begin((shell, True), id_)
            self._cells += 1
            self._last_cell_at = self._clock()
        elif state == "busy" and request_type in _ON_SHELL:
            self._begin((shell, False), id_)

    def _begin(self, key: tuple[str, bool], id_: str) -> None:
        self._requests.pop(key, None)
        if len(self._requests) >= MAX_REQUESTS:
            self._end(next(iter(self._requests)))
        self._requests[key] = _KernelRequest(id_, self._clock(), _process_of(self.kernel))

    def _end(self, key: tuple[str, bool]) -> None:
        del self._requests[key]
        if key[1]:
            self._last_cell_at = self._clock()


def _process_of(kernel: Any) -> int | None:
    """Return the process id of a kernel; None if its process has ended or is unknown."""
    process = getattr(getattr(kernel, "provisioner", None), "process", None)
    poll = getattr(process, "poll", None)
    return getattr(process, "pid", None) if callable(poll) and poll() is None else None


class Kernels:
    """Watches all kernels of a server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._watches: dict[str, _Watch] = {}

    def sample(self, manager: Any) -> list[KernelState]:
        """Return the state of each kernel of a kernel manager; start to watch new kernels."""
        kernels = {str(id_): manager.get_kernel(id_) for id_ in manager.list_kernel_ids()}
        for id_, watch in list(self._watches.items()):
            if kernels.get(id_) is not watch.kernel:
                self._watches.pop(id_).close()
        states = []
        for id_, kernel in kernels.items():
            if id_ not in self._watches:
                self._watches[id_] = _Watch(kernel, self._clock, self._began_at)
            watch = self._watches[id_]
            if watch.is_connected or self._connected < MAX_KERNELS:
                watch.connect()
            states.append(watch.state(id_))
        return states

    def close(self) -> None:
        """End all subscriptions."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    @property
    def _connected(self) -> int:
        return sum(watch.is_connected for watch in self._watches.values())
