"""What keeps a session awake: `MESSAGES`, sent to a real kernel, and what kernels may do besides."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.session import Session
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from jupyter_gpushare.server import kernels
from jupyter_gpushare.server.kernels import LONG_S, MAX_BYTES, MESSAGES, Counts, Kernels, KernelState
from tests.waiting import PATIENCE_S

# ---- a real kernel of Jupyter Server -----------------------------------------

# What each request holds, beside which it may be empty.
CONTENTS: dict[str, dict[str, Any]] = {
    "inspect_request": {"code": "print", "cursor_pos": 5, "detail_level": 1},
    "complete_request": {"code": "pri", "cursor_pos": 3},
    "history_request": {"hist_access_type": "tail", "n": 3, "output": False, "raw": True},
    "is_complete_request": {"code": "print("},
    "comm_open": {"comm_id": "c", "target_name": "works", "data": {}},
    "comm_msg": {"comm_id": "c", "data": {}},
    "comm_close": {"comm_id": "c", "data": {}},
    "debug_request": {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}},
    "delete_subshell_request": {"subshell_id": "nosuch"},
    "shutdown_request": {"restart": True},
}
# A target of comms whose messages run code, as those of widgets do.
TARGET = """
def _works(comm, _):
    @comm.on_msg
    def _wait(message):
        if path := message["content"]["data"].get("until"):
            wait_for(path)
get_ipython().kernel.comm_manager.register_target("works", _works)
def wait_for(path):
    import os, time
    while not os.path.exists(path):
        time.sleep(0.02)
"""


def code(text: str, *, silent: bool = False, stdin: bool = False) -> dict[str, Any]:
    return {
        "code": text,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": {},
        "allow_stdin": stdin,
    }


@dataclass
class Live:
    """A kernel, a client, and what the extension sees of it."""

    manager: AsyncMappingKernelManager
    id: str
    client: AsyncKernelClient
    now: float = 1_000.0
    watched: Kernels = field(init=False)

    def __post_init__(self) -> None:
        self.watched = Kernels(lambda: self.now)

    def sample(self) -> KernelState:
        (state,) = self.watched.sample(self.manager)
        return state

    async def until(self, condition: Callable[[KernelState], bool]) -> KernelState:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(state := self.sample()):
                await asyncio.sleep(0.02)
        return state

    def send(self, channel: str, msg_type: str, content: dict[str, Any], **header: str) -> str:
        """Send a message and return its id."""
        message = self.client.session.msg(msg_type, content)
        message["header"] |= header
        getattr(self.client, f"{channel}_channel").send(message)
        return str(message["header"]["msg_id"])

    async def ended(self, id_: str) -> None:
        """Wait until a request is done, and the extension has read that as well."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.client.get_iopub_msg()
                about, state = (
                    message["parent_header"].get("msg_id"),
                    message["content"].get("execution_state"),
                )
                if (about, state) == (id_, "idle"):
                    break
        await self.seen(id_)

    async def seen(self, id_: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while id_ not in self.read:
                await asyncio.sleep(0.01)

    read: set[str] = field(default_factory=set)  # requests of which an idle status was read

    async def run(self, text: str) -> None:
        await self.ended(self.send("shell", "execute_request", code(text)))


@pytest.fixture
async def live(monkeypatch, tmp_path) -> AsyncIterator[Live]:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    manager = AsyncMappingKernelManager()
    id_ = await manager.start_kernel(kernel_name="python3")
    client = manager.get_kernel(id_).client()
    live = Live(manager, id_, client)
    note_message = kernels._Watch._note

    def note(watch: Any, msg_type: str, state: str, parent: dict[str, Any]) -> None:
        note_message(watch, msg_type, state, parent)
        if state == "idle":
            live.read.add(parent.get("msg_id", ""))

    monkeypatch.setattr(kernels._Watch, "_note", note)
    live.sample()
    client.start_channels()
    await client.wait_for_ready(PATIENCE_S)
    await live.run(TARGET)
    yield live
    client.stop_channels()
    live.watched.close()
    await manager.shutdown_all(now=True)


async def test_each_type_of_message_counts_as_the_table_says(live):
    requests = [(each, channel) for each in MESSAGES for channel in each.channels.split(", ")]
    requests.sort(key=lambda request: request[0].name == "shutdown_request")  # ends the kernel
    asked = dict.fromkeys(("shell", "control"), 0)
    for each, channel in requests:
        if channel not in asked:
            continue
        asked[channel] += 1
        name, _, silent = each.name.partition(", ")
        content = code("1", silent=bool(silent)) if name == "execute_request" else CONTENTS.get(name, {})
        before = live.sample()
        live.now += 60
        await live.ended(live.send(channel, name, content))
        after = live.sample()
        assert not after.handles_request
        counted = (after.cells - before.cells, after.last_cell_at - before.last_cell_at)
        assert counted == ((1, 60) if each.counts is Counts.CELL else (0, 0)), each
    assert asked == {"shell": 12, "control": 8}


async def test_a_request_of_an_unknown_type_counts_for_nothing(live):
    before = live.sample()
    for channel in ("shell", "control"):
        await live.ended(live.send(channel, "request_of_a_later_version", {}))
    assert live.sample() == before


async def test_polls_of_a_panel_end_no_cell_that_runs_and_begin_none(live, tmp_path):
    gate = tmp_path / "gate"
    cell = live.send("shell", "execute_request", code(f"wait_for({str(gate)!r})"))
    await live.until(lambda state: state.runs_cell)
    for channel, name in (("control", "usage_request"), ("control", "kernel_info_request")):
        await live.ended(live.send(channel, name, {}))
        assert live.sample().runs_cell
    gate.touch()
    await live.ended(cell)
    assert not live.sample().runs_cell


@pytest.mark.parametrize("kind", ["a silent request", "a widget"])
async def test_code_that_is_no_cell_counts_by_its_gpu_work_and_may_wait_for_the_gpu(live, tmp_path, kind):
    gate = str(tmp_path / "gate")
    await live.ended(live.send("shell", "comm_open", CONTENTS["comm_open"]))
    before = live.sample()
    if kind == "a widget":
        asked = live.send("shell", "comm_msg", {"comm_id": "c", "data": {"until": gate}})
    else:
        asked = live.send("shell", "execute_request", code(f"wait_for({gate!r})", silent=True))

    def is_handled(state: KernelState) -> bool:
        live.now += LONG_S
        return state.handles_request

    state = await live.until(is_handled)
    assert (state.runs_cell, state.cells, state.last_cell_at) == (False, before.cells, before.last_cell_at)
    Path(gate).touch()
    await live.ended(asked)
    assert not live.sample().handles_request


async def test_a_cell_that_asks_its_user_runs_until_it_has_ended(live):
    cell = live.send("shell", "execute_request", code("input()", stdin=True))
    async with asyncio.timeout(PATIENCE_S):
        await live.client.get_stdin_msg()
        while not live.sample().runs_cell:  # the question may come before the beginning of the cell is read
            await asyncio.sleep(0.01)
    live.client.input("yes")
    await live.ended(cell)
    assert not live.sample().runs_cell


async def test_aborted_cells_never_ran(live):
    before = live.sample().cells
    sent = [live.send("shell", "execute_request", code(text)) for text in ("1 / 0", "2", "3")]
    for each in sent:
        await live.ended(each)
    assert live.sample().cells == before + 1
    assert not live.sample().runs_cell


async def test_output_after_a_cell_counts_for_nothing(live):
    await live.run(
        "import threading, time\n"
        "def talk():\n"
        "    for _ in range(50): print('x', flush=True); time.sleep(0.01)\n"
        "thread = threading.Thread(target=talk); thread.start()"
    )
    before = live.sample()
    async with asyncio.timeout(PATIENCE_S):
        while (await live.client.get_iopub_msg())["msg_type"] != "stream":
            pass
    assert live.sample() == before


async def test_a_flood_of_output_in_a_busy_server_hides_no_end_of_a_cell(live):
    async def answer_others() -> None:
        while True:
            time.sleep(0.003)
            await asyncio.sleep(0)

    live.client.iopub_channel.stop()  # only the extension reads
    busy = asyncio.create_task(answer_others())
    cell = live.send("shell", "execute_request", code("for n in range(4_000): display(str(n) * 5_000)"))
    await live.seen(cell)
    busy.cancel()
    assert not live.sample().runs_cell


async def test_a_cell_of_a_subshell_runs_beside_one_of_the_main_shell(live, tmp_path):
    live.send("control", "create_subshell_request", {})
    async with asyncio.timeout(PATIENCE_S):
        while (reply := await live.client.get_control_msg())["msg_type"] != "create_subshell_reply":
            pass
    beside = reply["content"]["subshell_id"]
    main, gate = str(tmp_path / "main"), str(tmp_path / "gate")
    long = live.send("shell", "execute_request", code(f"wait_for({main!r})"))
    await live.until(lambda state: state.runs_cell)
    short = live.send("shell", "execute_request", code(f"wait_for({gate!r})"), subshell_id=beside)
    await live.until(lambda state: state.cells == 3)
    Path(gate).touch()
    await live.ended(short)
    assert live.sample().runs_cell
    Path(main).touch()
    await live.ended(long)
    assert not live.sample().runs_cell


@pytest.mark.parametrize("end", ["interrupt", "restart", "crash"])
async def test_a_cell_ends_with_an_interrupt_a_restart_or_its_process(live, tmp_path, end):
    live.send("shell", "execute_request", code(f"wait_for({str(tmp_path / 'never')!r})"))
    await live.until(lambda state: state.runs_cell)
    live.now += 60
    kernel = live.manager.get_kernel(live.id)
    if end == "interrupt":
        await kernel.interrupt_kernel()
    elif end == "restart":
        await live.manager.restart_kernel(live.id)
    else:
        os.kill(kernel.provisioner.pid, signal.SIGKILL)
    state = await live.until(lambda state: not state.runs_cell)
    assert state.last_cell_at == live.now
    if end != "crash":
        await live.client.wait_for_ready(PATIENCE_S)
        await live.run("1")
        assert live.sample().cells == state.cells + 1


# ---- kernels that stand for others -------------------------------------------


class Fake:
    """A kernel whose messages a test makes."""

    def __init__(self, execution_state: str = "idle", **more: Any) -> None:
        self.execution_state, self.kernel_name = execution_state, "python3"
        self.ports, self.iopub_port = [1, 2, 3, 4, 5], 2
        self.session = Session(key=b"secret")
        self.closed: list[bool] = []
        self.waiting: list[list[bytes]] = []
        vars(self).update(more)

    def connect_iopub(self) -> Any:
        number = len(self.closed)
        self.closed.append(False)

        def on_recv(read: Callable[[list[bytes]], None]) -> None:
            self.read = read

        def recv_multipart(_: int) -> list[bytes]:
            if not self.waiting:
                raise zmq.Again
            return self.waiting.pop(0)

        def close() -> None:
            self.closed[number] = True

        return SimpleNamespace(
            on_recv=on_recv,
            socket=SimpleNamespace(recv_multipart=recv_multipart),
            closed=lambda: self.closed[number],
            close=close,
        )

    def parts(self, published: str, content: Any, **parent: Any) -> list[bytes]:
        message = self.session.msg(published, content) | {"parent_header": parent}
        return self.session.serialize(message, ident=b"topic")

    def status(self, state: Any, id_: str = "1", msg_type: str = "execute_request", **more: Any) -> None:
        self.read(self.parts("status", {"execution_state": state}, msg_id=id_, msg_type=msg_type, **more))

    def begin(self, id_: str = "1", **more: Any) -> None:
        self.status("busy", id_, **more)
        content = {"code": "1", "execution_count": 1}
        self.read(self.parts("execute_input", content, msg_id=id_, msg_type="execute_request", **more))


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def manager(**found: Any) -> Any:
    return SimpleNamespace(list_kernel_ids=lambda: list(found), get_kernel=found.__getitem__)


def sampler(kernel: Any, clock: Any = None) -> Callable[[], KernelState]:
    """Watch a kernel; the returned function samples it."""
    watched, there = Kernels(clock or Clock()), manager(k=kernel)

    def sample() -> KernelState:
        (state,) = watched.sample(there)
        return state

    sample()
    return sample


@pytest.mark.parametrize(
    "each", [each for each in MESSAGES if each.channels == "iopub"], ids=lambda e: e.name
)
def test_what_a_kernel_publishes_counts_as_the_table_says(each):
    kernel = Fake()
    sample = sampler(kernel)
    content = {"execution_state": "busy"} if each.name == "status" else {"name": "stdout", "text": "status"}
    kernel.read(kernel.parts(each.name, content, msg_id="1", msg_type="execute_request"))
    assert sample().runs_cell == (each.counts is Counts.CELL)


def test_the_next_cell_ends_one_whose_end_was_lost():
    kernel = Fake()
    sample = sampler(kernel)
    kernel.begin("1")
    kernel.begin("2")
    kernel.status("idle", "2")
    assert (sample().runs_cell, sample().cells) == (False, 2)


@pytest.mark.parametrize("name", ["status", "execute_input"])
def test_a_user_may_have_any_name(name):
    kernel = Fake(session=Session(key=b"secret", username=name))
    sample = sampler(kernel)
    kernel.read(
        kernel.parts("stream", {"name": "stdout", "text": "x"}, msg_id="1", msg_type="execute_request")
    )
    assert not sample().runs_cell
    kernel.begin()
    assert sample().runs_cell
    kernel.status("idle")
    assert not sample().runs_cell


def test_a_kernel_that_starts_runs_nothing():
    kernel = Fake()
    sample = sampler(kernel)
    kernel.begin()
    assert sample().runs_cell
    kernel.read(kernel.parts("status", {"execution_state": "starting"}))
    assert not sample().runs_cell


def test_until_its_first_message_a_kernel_counts_by_what_its_manager_says():
    clock, kernel = Clock(), Fake("busy")
    sample = sampler(kernel, clock)
    clock.now += 10
    assert sample() == KernelState("k", "python3", True, True, 1, clock.now)
    kernel.execution_state = "idle"
    clock.now += 10
    assert sample() == KernelState("k", "python3", False, False, 1, clock.now - 10)
    kernel.execution_state = "busy"
    assert sample().cells == 2
    kernel.status("idle", msg_type="kernel_info_request")
    assert not sample().runs_cell


@pytest.mark.parametrize("more", [{"iopub_port": 0}, {"session": None}, {"connect_iopub": None}])
def test_a_kernel_whose_messages_cannot_be_read_counts_by_what_its_manager_says(more):
    kernel = Fake("busy", **more)
    sample = sampler(kernel)
    assert sample().runs_cell
    kernel.execution_state = "idle"
    assert not sample().runs_cell
    assert all(kernel.closed)


def test_typing_is_never_taken_for_a_wait_for_the_gpu():
    clock, kernel = Clock(), Fake()
    sample = sampler(kernel, clock)
    kernel.status("busy", msg_type="complete_request")
    clock.now += LONG_S / 2
    assert not sample().handles_request
    clock.now += LONG_S / 2
    assert sample().handles_request
    kernel.status("busy", "2", msg_type="usage_request")
    kernel.status("idle")
    clock.now += LONG_S
    assert not sample().handles_request


def test_whatever_a_kernel_publishes_the_server_goes_on_and_keeps_little():
    kernel = Fake()
    sample = sampler(kernel)
    kernel.begin()
    good = kernel.parts("status", {"execution_state": "idle"}, msg_id="1", msg_type="execute_request")
    forged = [*good[:2], b"0" * 64, *good[3:]]
    large = kernel.parts("status", {"execution_state": "idle", "x": "x" * MAX_BYTES}, msg_id="1")
    odd = [kernel.parts("status", content, msg_id="1") for content in ({}, {"execution_state": []})]
    nobody = kernel.session.serialize(kernel.session.msg("status", {"execution_state": "idle"}), ident=b"t")
    for parts in ([], [b""], [b"topic"], good[:4], forged, large, *odd, nobody):
        kernel.read(parts)
    assert sample().runs_cell
    for n in range(1_000):
        kernel.begin(str(n), subshell_id=str(n))
        kernel.status("busy", "x" * 1_000, subshell_id="x" * 1_000)
    (watch,) = sample.__closure__[1].cell_contents._watches.values()
    assert len(watch._requests) <= kernels.MAX_REQUESTS
    kernel.waiting = [kernel.parts("status", {"execution_state": "starting"})] * 2
    kernel.read([])
    assert not sample().runs_cell


def test_a_restart_with_other_ports_is_followed_and_an_end_closes_the_connection():
    kernel, there = Fake(), {}
    there["k"] = kernel
    watched = Kernels(Clock())
    found = SimpleNamespace(list_kernel_ids=lambda: list(there), get_kernel=there.__getitem__)
    watched.sample(found)
    watched.sample(found)
    assert kernel.closed == [False]
    kernel.ports = [6, 7, 8, 9, 10]
    watched.sample(found)
    assert kernel.closed == [True, False]
    other = there["k"] = Fake()
    watched.sample(found)
    assert (kernel.closed, other.closed) == ([True, True], [False])
    del there["k"]
    assert watched.sample(found) == []
    assert other.closed == [True]


def test_no_more_kernels_are_connected_than_the_bound(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_KERNELS", 2)
    found = {f"k{n}": Fake("busy") for n in range(4)}
    watched = Kernels(Clock())
    states = watched.sample(manager(**found))
    watched.sample(manager(**found))
    assert [len(each.closed) for each in found.values()] == [1, 1, 0, 0]
    assert [each.runs_cell for each in states] == [True] * 4
    watched.close()
    assert found["k0"].closed == [True]
