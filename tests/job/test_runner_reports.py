"""What the runner tells the broker and the Hub: progress, the start, the result, and when they are away."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx
import pytest
from certipy import Certipy

from jupyter_gpushare.internal_tls import internal_tls
from jupyter_gpushare.job.runner import Runner
from jupyter_gpushare.protocol.wire import JobSpec
from tests.job.conftest import (
    OWNER_TOKEN,
    PREFIX,
    HubAndBroker,
    Start,
    wait_for,
)
from tests.job.test_runner import python
from tests.waiting import is_alive


def test_progress_reaches_the_broker(start: Start) -> None:
    code = (
        "import time\n"
        "from jupyter_gpushare.job.progress import progress\n"
        "assert progress(3, 10)\n"
        "time.sleep(600)"
    )
    job = start(*python(code), env={"PYTHONPATH": str(Path(__file__).parents[2])})
    report = wait_for(lambda: job.others.reported("progress"), "progress is reported")
    assert (report["done"], report["total"]) == (3, 10)
    assert job.get("status", OWNER_TOKEN).json()["done"] == 3


def test_the_last_progress_is_in_the_final_report(start: Start) -> None:
    code = "from jupyter_gpushare.job.progress import progress\nfor n in range(5): progress(n + 1, 5)"
    report = start(*python(code), env={"PYTHONPATH": str(Path(__file__).parents[2])}).ended()
    assert (report["done"], report["total"]) == (5, 5)


def test_a_bar_is_reported_and_withdrawn_before_the_end_when_another_one_follows(start: Start) -> None:
    bar = "printf '\\r| %s [00:01<00:01, 1.00it/s]'"
    wait = "until [ -e go ]; do sleep 0.1; done"
    job = start("sh", "-c", f"{bar} 6/20; {wait}; {bar} 1/5; echo")
    report = wait_for(lambda: job.others.reported("progress"), "progress is reported")
    assert (report["done"], report["total"]) == (6, 20)
    (job.home / "go").touch()
    job.ended()
    told = [(each["state"], each.get("done"), each.get("total")) for each in job.others.reports[1:]]
    assert told == [("progress", 6, 20), ("progress", None, None), ("ended", None, None)]


SPEC = JobSpec(id="0123456789", attempt=1, name="train", command=["x"], cwd=None, env={}, grace_s=1.0)


async def test_a_withdrawal_that_was_not_delivered_is_sent_again(tmp_path: Path) -> None:
    sent: list[tuple[float | None, float | None]] = []
    delivered = iter([True, False, True])

    class Broker:
        async def progress(self, done: float | None, total: float | None) -> bool:
            sent.append((done, total))
            return next(delivered)

    runner = Runner(SPEC, {"HOME": str(tmp_path)})
    broker = Broker()
    await runner._send_progress(broker)  # nothing was shown yet
    runner._on_print(b"\r| 6/20 [00:01<00:01, 1.00it/s]\n")
    await runner._send_progress(broker)
    runner._on_print(b"\r| 1/20 [00:01<00:01, 1.00it/s]\n")
    for _ in range(3):
        await runner._send_progress(broker)
    assert sent == [(6, 20), (None, None), (None, None)]


def test_what_a_program_reports_goes_before_its_bars(tmp_path: Path) -> None:
    runner = Runner(SPEC, {"HOME": str(tmp_path)})
    runner._on_print(b"\r| 6/20 [00:01<00:01, 1.00it/s]\n")
    runner._on_progress(1, 3)
    runner._on_print(b"\r| 7/20 [00:01<00:01, 1.00it/s]\n")
    assert runner._progress == {"done": 1, "total": 3}


def test_garbage_in_the_progress_socket_does_no_harm(start: Start) -> None:
    job = start("sh", "-c", 'echo "$GPUSHARE_PROGRESS_SOCKET"; exec sleep 600')
    job.printed("progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(job.log.strip())
        for line in (
            b"",
            b"{",
            b"[1]",
            b"{}",
            b'{"done": NaN}',
            b'{"done": "x"}',
            b'{"done": {}}',
            b'{"done": -1}',
            b'{"done": 1' + b"0" * 400 + b"}",
            b'{"done": 1, "total": 1' + b"0" * 400 + b"}",
            b"\xff" * 9000,
        ):
            sender.send(line)
        sender.send(b'{"done": 0, "total": 2}')
    report = wait_for(lambda: job.others.reported("progress"), "progress is reported")
    assert (report["done"], report["total"]) == (0, 2)


def test_garbage_that_waits_in_the_socket_at_the_end_does_no_harm(start: Start) -> None:
    code = (
        "import os, socket\n"
        "sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "sender.connect(os.environ['GPUSHARE_PROGRESS_SOCKET'])\n"
        "for _ in range(3): sender.send(b'{\"done\": 1' + b'0' * 400 + b'}')\n"
        "os._exit(3)"
    )
    assert start(*python(code)).ended()["exit_code"] == 3


def test_while_the_broker_is_away_the_result_is_kept_and_told_later(
    start: Start, others: HubAndBroker
) -> None:
    others.broker_down = True
    job = start("sh", "-c", "exit 5")
    wait_for(lambda: job.state == "ended", "the result is on disk")
    assert not job.record["reported"]
    assert job.process.poll() is None
    others.broker_down = False
    assert job.ended()["exit_code"] == 5
    assert job.exited() == 0
    assert job.record["reported"]


def test_the_start_is_reported_and_the_hub_is_told_of_activity(start: Start, others: HubAndBroker) -> None:
    start("sleep", "600")
    wait_for(lambda: others.reported("started"), "the start is reported")
    assert "j0123456789-1" in wait_for(lambda: others.activity, "the Hub is told")[0]["servers"]


def test_a_runner_that_is_stopped_while_the_broker_is_away_ends_its_command(
    start: Start, others: HubAndBroker
) -> None:
    others.broker_down = True
    job = start("sh", "-c", "echo $$; exec sleep 600")
    job.printed("\n")
    pid = int(job.log)
    job.process.terminate()
    wait_for(lambda: not is_alive(pid), "the command is gone")
    wait_for(lambda: job.record["state"] == "ended", "the result is on disk")


def test_a_runner_that_waits_for_the_broker_leaves_when_it_is_stopped(
    start: Start, others: HubAndBroker
) -> None:
    others.broker_down = True
    job = start("sh", "-c", "exit 5")
    wait_for(lambda: job.state == "ended", "the result is on disk")
    job.process.terminate()
    assert job.exited() == 1
    assert (job.record["exit_code"], job.record["stopped"], job.record["reported"]) == (5, False, False)


def test_with_the_hubs_internal_tls_it_is_asked_and_tells_through_it(start: Start, tmp_path: Path) -> None:
    made = Certipy(store_dir=str(tmp_path / "tls"))
    made.create_ca("ca")
    files = made.create_signed_pair("both", "ca", alt_names=["DNS:localhost", "IP:127.0.0.1"])["files"]
    names = (files["key"], files["cert"], files["ca"])
    tls = dict(zip(("KEYFILE", "CERTFILE", "CLIENT_CA"), names, strict=True))
    env = {f"JUPYTERHUB_SSL_{name}": path for name, path in tls.items()}
    hub = HubAndBroker(tls=internal_tls(env, ssl.Purpose.CLIENT_AUTH))
    try:
        env["JUPYTERHUB_ACTIVITY_URL"] = f"https://127.0.0.1:{hub.port}/hub/api/users/ada/activity"
        job = start("sleep", "600", probe=False, runner_env=env)
        assert "j0123456789-1" in wait_for(lambda: hub.activity, "the Hub is told")[0]["servers"]
        asking = internal_tls(env)
        assert asking is not None
        address = f"https://127.0.0.1:{job.port}{PREFIX}api"
        assert httpx.get(address, verify=asking, trust_env=False).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{job.port}{PREFIX}api", trust_env=False)
    finally:
        hub.close()
