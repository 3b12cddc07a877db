"""`HelperClient` and `LocalDevices` against a helper that answers what a test told it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.backends import helper_client
from jupyter_gpushare.backends.helper_client import HelperClient, SocketAddress
from jupyter_gpushare.backends.local import LocalDevices, holder_environment
from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.gpu.service import exchange
from jupyter_gpushare.protocol import helper as protocol
from jupyter_gpushare.protocol.helper import EndProcess
from tests.waiting import PATIENCE_S

SAMPLE = protocol.Sample(
    at=1.5,
    devices=(protocol.DeviceSample(uuid="GPU-0", used_bytes=7, utilization_percent=3, healthy=True),),
    leases=(
        protocol.LeaseSample(
            lease="b-1",
            phase=protocol.Phase.SUSPENDED,
            measured_at=1.25,
            used_bytes={},
            saved_bytes={"GPU-0": 5},
            calls="opaque",
            active_at=0.5,
            suspendable=True,
            suspend_reason="",
            alive=True,
            processes=(protocol.ProcessSample(pid=1, started_at=0.1, name="p", used_bytes=0, calls=-1),),
            wanted=True,
        ),
    ),
    host_available_bytes=1,
    host_saved_bytes=5,
)
INVENTORY = protocol.Inventory(
    host="h",
    driver="1",
    simulated=True,
    devices=(protocol.Device(uuid="GPU-0", index=0, name="X", memory_bytes=9, reserve_bytes=1),),
    host_total_bytes=3,
    host_budget_bytes=2,
    at=1.0,
)


class FakeHelper:
    """A unix socket; `answer` gets the request and returns the lines to send, None: never answers."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.answer: Callable[[dict[str, Any]], bytes | None] = lambda _: ok(SAMPLE)
        self.released = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        while line := await reader.readline():
            request = protocol.decode(line)
            self.asked.append(request)
            said = self.answer(request)
            if said is None:
                await self.released.wait()
                break
            writer.write(said)
            if request["verb"] == "watch":
                break
        writer.close()


def ok(result: Any) -> bytes:
    if not isinstance(result, (dict, list)):
        result = json.loads(protocol.encode(result))
    return json.dumps({"ok": True, "result": result}).encode() + b"\n"


def no(kind: str, message: str = "no", **more: Any) -> bytes:
    return json.dumps({"ok": False, "error": {"kind": kind, "message": message, **more}}).encode() + b"\n"


@pytest.fixture
async def helper(tmp_path) -> AsyncIterator[FakeHelper]:
    fake = FakeHelper()
    server = await asyncio.start_unix_server(fake.serve, tmp_path / "h.sock", limit=1 << 20)
    yield fake
    fake.released.set()
    server.close()
    await server.wait_closed()


@pytest.fixture
async def devices(tmp_path, helper) -> AsyncIterator[LocalDevices]:
    local = LocalDevices(HelperClient(SocketAddress(tmp_path / "h.sock"), epoch=lambda: 7))
    yield local
    await local.close()


@pytest.mark.parametrize(("verb", "value"), [("inventory", INVENTORY), ("sample", SAMPLE)])
async def test_what_the_helper_measures_arrives_as_it_was(helper, devices, verb, value):
    helper.answer = lambda _: ok(value)
    assert await getattr(devices, verb)() == value
    assert helper.asked == [{"verb": verb, "epoch": 7}]


async def test_the_highest_epoch_is_asked_for_without_one(helper, devices):
    said = protocol.Hello(version="1", pid=1, boot_id="b", epoch=12, simulated=True)
    helper.answer = lambda _: ok(said)
    assert await devices.epoch() == 12
    assert helper.asked == [{"verb": "hello"}]


async def test_every_verb_is_one_the_helper_can_read(helper, devices):
    moved = protocol.MoveResult(done=False, refused=protocol.Refusal.BUSY, reason="moving")
    answers = {
        "set_limit": protocol.LeaseFiles(directory="/d"),
        "suspend": moved,
        "resume": moved,
        "signal": protocol.Signalled(count=1),
        "end_process": protocol.Signalled(count=1),
        "drop": protocol.Dropped(known=True),
    }
    helper.answer = lambda request: ok(answers[request["verb"]])
    prepared = protocol.SetLimit(
        lease="j-1",
        uid=1000,
        limits={"GPU-1": 5, "GPU-0": 6},
        guaranteed={"GPU-1": 5, "GPU-0": 0},
        suspended=True,
        unattended=True,
        stops=True,
    )
    await devices.prepare(prepared)
    assert await devices.suspend("j-1", "calls") == moved
    assert await devices.resume("j-1") == moved
    await devices.signal("j-1", 15, "leader")
    await devices.end_process("GPU-1", "12-345")
    await devices.drop("j-1")
    expected = [
        ("set_limit", prepared),
        ("suspend", protocol.Suspend(lease="j-1", calls="calls")),
        ("resume", protocol.Resume(lease="j-1")),
        ("signal", protocol.Signal(lease="j-1", number=15, to="leader")),
        ("end_process", EndProcess(device="GPU-1", process="12-345")),
        ("drop", protocol.Drop(lease="j-1", end_processes=True)),
    ]
    for asked, (verb, request) in zip(helper.asked, expected, strict=True):
        assert (asked.pop("verb"), asked.pop("epoch")) == (verb, 7)
        assert protocol.build(type(request), asked) == request


async def test_a_move_names_its_devices_in_order_and_reads_where_the_lease_is(helper, devices):
    moved = protocol.MoveResult(done=False, refused=protocol.Refusal.BUSY, devices=("GPU-3", "GPU-2"))
    helper.answer = lambda _: ok(moved)
    assert await devices.resume("j-1", devices=("GPU-2", "GPU-3")) == moved
    (asked,) = helper.asked
    assert asked["devices"] == ["GPU-2", "GPU-3"]


@pytest.mark.parametrize("kind", ["stale_epoch", "conflict", "busy", "something_new"])
async def test_a_refusal_keeps_its_word(helper, devices, kind):
    helper.answer = lambda _: no(kind, "says why")
    with pytest.raises(HelperError, match="says why") as refused:
        await devices.drop("j-1")
    assert refused.value.kind == kind


async def test_an_error_of_the_driver_arrives_as_the_helper_raised_it(helper, devices):
    raised = DeviceError("cuCheckpointProcessRestore", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    helper.answer = lambda _: protocol.encode(exchange.error_answer(raised))
    with pytest.raises(DeviceError) as failed:
        await devices.resume("j-1")
    assert str(failed.value) == str(raised)
    assert (failed.value.call, failed.value.code) == (raised.call, raised.code)


async def test_a_signal_to_a_lease_that_is_gone_is_done(helper, devices):
    helper.answer = lambda _: no("unknown_lease")
    await devices.signal("j-1", 15, "leader")
    helper.answer = lambda _: no("stale_epoch")
    with pytest.raises(HelperError):
        await devices.signal("j-1", 15, "leader")


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b'{"ok": true}\n',
        b'{"ok": true, "result": {"done": "maybe"}}\n',
        b'{"ok": false}\n',
        b'{"ok": false, "error": "x"}\n',
        b"\xff\xfe\n",
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error_of_the_helper(helper, devices, line):
    helper.answer = lambda _: line
    with pytest.raises(HelperError) as failed:
        await devices.resume("j-1")
    assert failed.value.kind == "garbled"


async def test_a_connection_that_is_closed_without_an_answer_is_silence(helper, devices):
    helper.answer = lambda _: b""
    with pytest.raises(HelperError) as failed:
        await devices.sample()
    assert failed.value.kind == "silent"


async def test_a_line_without_end_is_not_read_for_ever(helper, devices):
    helper.answer = lambda _: b"x" * (protocol.MAX_LINE_BYTES + 100_000)
    with pytest.raises(HelperError) as failed:
        await devices.sample()
    assert failed.value.kind == "silent"


async def test_a_helper_that_hangs_is_given_up(helper, tmp_path):
    helper.answer = lambda _: None
    with pytest.raises(HelperError, match="did not answer sample") as failed:
        await HelperClient(SocketAddress(tmp_path / "h.sock"), lambda: 1).ask(
            "sample", None, protocol.Sample, timeout_s=0.05
        )
    assert failed.value.kind == "silent"


async def test_one_connection_serves_one_request_after_the_other(helper, devices):
    for _ in range(3):
        await devices.sample()
    assert len(helper.connections) == 1
    await asyncio.gather(*(devices.sample() for _ in range(3)))  # none waits for another
    assert len(helper.connections) == 3
    await devices.sample()
    assert len(helper.connections) == 3


async def test_a_connection_that_has_served_its_time_gives_way_to_another(helper, devices, monkeypatch):
    await devices.sample()
    monkeypatch.setattr(helper_client, "KEEP_S", -1.0)
    await devices.sample()
    assert len(helper.connections) == 2


async def test_a_helper_that_has_closed_the_connection_is_asked_on_another(helper, devices):
    await devices.sample()
    helper.connections[0].close()
    assert await devices.sample() == SAMPLE
    assert len(helper.connections) == 2


async def test_only_reads_use_the_connection_that_is_kept(helper, devices):
    await devices.sample()
    helper.answer = lambda _: ok({"known": True})
    await devices.drop("b-1")
    assert len(helper.connections) == 2
    helper.answer = lambda _: ok(SAMPLE)
    await devices.sample()
    assert len(helper.connections) == 2


async def test_a_client_that_is_closed_keeps_no_connection(helper, devices):
    asked = asyncio.create_task(devices.sample())
    while not helper.connections:
        await asyncio.sleep(0)
    await devices.close()
    assert await asked == SAMPLE
    async with asyncio.timeout(PATIENCE_S):
        await helper.connections[0].wait_closed()


async def test_an_answer_that_comes_too_late_answers_no_other_request(helper, devices):
    helper.answer = lambda _: None
    given_up = asyncio.create_task(devices.sample())
    while not helper.asked:
        await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    helper.answer = lambda _: ok(SAMPLE)
    assert await devices.sample() == SAMPLE
    assert len(helper.connections) == 2


async def test_no_helper_at_all_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(HelperError, match=r"no device helper at .*none\.sock") as failed:
        await HelperClient(SocketAddress(tmp_path / "none.sock"), lambda: 1).ask(
            "sample", None, protocol.Sample
        )
    assert failed.value.kind == "unreachable"


async def test_events_come_one_by_one_until_the_connection_ends(helper, devices):
    events = [
        protocol.Event(
            seq=1, at=1.0, kind=protocol.EventKind.WANTED, lease="b-1", fields={"queries_only": "false"}
        ),
        protocol.Event(seq=2, at=2.0, kind=protocol.EventKind.ENDED, lease="b-1"),
    ]
    helper.answer = lambda _: ok(SAMPLE) + b"".join(protocol.encode(e) for e in events)
    assert [event async for event in devices.watch()] == [None, *events]


async def test_events_that_are_refused_or_make_no_sense_are_errors(helper, devices):
    for line, kind in [(no("stale_epoch"), "stale_epoch"), (b"not json\n", "silent")]:
        helper.answer = lambda _, line=line: line
        with pytest.raises(HelperError) as failed:
            await anext(devices.watch())
        assert failed.value.kind == kind


def test_a_holder_sees_its_devices_its_limit_and_our_library():
    env = holder_environment("b-1", "/d", {"GPU-1": 5, "GPU-0": 6})
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert env["GPUSHARE_MEMORY_LIMIT"] == "11"
    assert (env["GPUSHARE_LEASE"], env["GPUSHARE_LEASE_DIR"]) == ("b-1", "/d")
    assert env["LD_PRELOAD"].endswith("libgpushare_preload.so")


async def test_no_lease_is_prepared_without_the_library(helper, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    request = protocol.SetLimit(lease="a-1", uid=1000, limits={"GPU-0": 1})
    with pytest.raises(HelperError, match="preload library is missing"):
        await devices.prepare(request)
    assert helper.asked == []
