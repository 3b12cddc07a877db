"""The extension inside a real Jupyter Server, against a broker that a test drives."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec

from jupyter_gpushare.messages import local
from jupyter_gpushare.protocol.wire import Text
from jupyter_gpushare.server.extension import GpuShareExtension
from jupyter_gpushare.server.kernels import Kernels
from tests.waiting import PATIENCE_S

LEASE_EVENT = "https://jupyter-gpushare.readthedocs.io/events/lease_state"
BROKER_EVENT = "https://jupyter-gpushare.readthedocs.io/events/broker_state"
JOB_EVENT = "https://jupyter-gpushare.readthedocs.io/events/job_state"


async def test_busy_and_idle_kernels_are_reported_by_their_notebooks_name(
    server, broker, eventually, execute_request, message, tmp_path
):
    eventually(lambda: broker.asked("POST servers/activity"))
    assert broker.asked("POST servers/activity")[0].json == {"kernels": []}

    asked = {"kernel": {"name": "python3"}, "name": "", "path": "train.ipynb", "type": "notebook"}
    session = server.request("POST", "api/sessions", json=asked).json()
    kernel = session["kernel"]["id"]

    def last() -> dict:
        kernels = broker.asked("POST servers/activity")[-1].json["kernels"]
        return next((each for each in kernels if each["id"] == kernel), {})

    async with server.socket(f"api/kernels/{kernel}/channels") as channels:
        gate = tmp_path / "gate"
        waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)"
        await channels.write_message(execute_request(waits))
        await asyncio.to_thread(eventually, lambda: last().get("busy"))
        found = last()
        cell = {"busy": True, "handles_request": True, "idle_s": 0.0, "runs": 1}
        assert found == {"id": kernel, "name": "train.ipynb"} | cell
        gate.touch()
        await asyncio.to_thread(eventually, lambda: not last()["busy"])
        assert 0 <= last()["idle_s"] < 60

        # A panel asks for the use of the kernel: this changes no report.
        reports, began_at = len(broker.asked("POST servers/activity")), time.monotonic()
        while time.monotonic() - began_at < 3:
            await channels.write_message(message("control", "usage_request", {}))
            await asyncio.sleep(0.1)
        server.request("POST", "api/terminals")
        await asyncio.to_thread(eventually, lambda: broker.asked("POST servers/activity")[reports:])
        for each in broker.asked("POST servers/activity")[reports:]:
            (state,) = each.json["kernels"]
            assert (state["busy"], state.get("handles_request"), state["runs"]) == (False, None, 1)
        assert last()["idle_s"] >= 3

    server.request("DELETE", f"api/sessions/{session['id']}")

    def ends() -> list[dict]:
        return [end for each in broker.asked("POST servers/activity") for end in each.json.get("ended", [])]

    await asyncio.to_thread(eventually, ends)
    assert [(end["id"], end["name"], end["how"]) for end in ends()] == [(kernel, "train.ipynb", "shut_down")]
    await asyncio.to_thread(eventually, lambda: not last())


async def test_change_of_state_arrives_as_jupyter_event(server, broker, golden, eventually):
    eventually(lambda: broker.polls_open)
    async with server.socket("api/events/subscribe") as events:
        broker.say_status(golden("status_asleep"))
        asleep = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
        broker.say_status(golden("status_waking"))
        waking = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
        active = golden("status_active") | {"seq": 46}
        active["jobs"][1] |= {"state": "starting", "attempt": 1, "reason": "Starting."}
        broker.say_status(active)
        back = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
        job = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
    assert asleep["schema_id"] == LEASE_EVENT
    assert (asleep["previous"], asleep["state"], asleep["seq"]) == ("running", "suspended", 44)
    lease = golden("status_asleep")["leases"][0]
    assert asleep["sentence"] == local("", msgspec.convert(lease["sentence_texts"], list[Text]))
    assert asleep["sentence"].startswith("Asleep since ")
    assert (waking["previous"], waking["state"], waking["wanted"]) == ("suspended", "resuming", True)
    assert (back["previous"], back["state"]) == ("resuming", "running")
    assert job["schema_id"] == JOB_EVENT
    assert (job["job"], job["previous"], job["state"], job["attempt"]) == (
        "p8d4w6n1ze",
        "queued",
        "starting",
        1,
    )


async def test_page_is_told_when_the_broker_falls_silent_and_when_it_is_heard_again(
    server, broker, eventually
):
    eventually(lambda: broker.polls_open)
    async with server.socket("api/events/subscribe") as events:
        await asyncio.to_thread(broker.stop)
        lost = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
        broker.start()
        back = json.loads(await asyncio.wait_for(events.read_message(), PATIENCE_S))
    assert lost["schema_id"] == back["schema_id"] == BROKER_EVENT
    assert lost["unreachable_since"].endswith("Z")
    assert back["unreachable_since"] is None


def test_only_one_long_poll_is_held_and_it_starts_where_the_last_answer_ended(
    server, broker, golden, eventually
):
    eventually(lambda: broker.polls_open)
    broker.say_status(golden("status_asleep"))
    eventually(lambda: any(r.query.get("after") == "44" for r in broker.asked("GET status")))
    polls = broker.asked("GET status")
    assert [r.query.get("after") for r in polls] == [None, "42", "44"]
    assert broker.polls_open == 1


def test_silent_broker_is_told_since_when_without_old_numbers_and_is_heard_again(
    server, broker, golden, eventually
):
    eventually(lambda: broker.polls_open)
    broker.stop()
    silent = server.get("gpushare/status")
    assert set(silent) == {"enabled", "server", "may_gain", "unreachable_since", "message"}
    assert silent["unreachable_since"].endswith("Z")
    assert "does not answer" in silent["message"]
    assert server.get("gpushare/status")["unreachable_since"] == silent["unreachable_since"]
    assert server.request("GET", "gpushare/jobs").status_code == 503
    assert server.get("gpushare/jobs")["reason"] == "unreachable"
    broker.status = golden("status_active") | {"seq": 1}  # a restarted broker counts from elsewhere
    broker.start()
    assert server.get("gpushare/status") == broker.status | {
        "enabled": True,
        "server": "",
        "may_gain": False,
        "unreachable_since": None,
    }
    eventually(lambda: broker.polls_open)


def test_server_without_a_broker_says_so_and_works(lonely_server):
    assert lonely_server.get("gpushare/status") == {"enabled": False, "unreachable_since": None}
    answer = lonely_server.request("GET", "gpushare/jobs")
    assert (answer.status_code, answer.json()["reason"]) == (404, "not_configured")
    assert lonely_server.log.read_text().count("gpushare: no GPU broker") == 1


def test_server_ends_at_once_though_a_long_poll_is_open(server, broker, eventually):
    eventually(lambda: broker.polls_open)
    assert server.stop() == 0
    eventually(lambda: not broker.polls_open)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "never" not in log


async def test_the_extension_stops_although_a_library_loses_its_first_cancellation():
    lost = 0

    async def listen() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(PATIENCE_S)
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    extension = GpuShareExtension()
    extension._broker, extension._kernels = None, Kernels()
    extension._tasks = [asyncio.create_task(listen())]
    await asyncio.sleep(0)
    await asyncio.wait_for(extension.stop_extension(), PATIENCE_S)
    assert lost == 2
