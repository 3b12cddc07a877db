"""One user's requests, names and files stay that user's problem."""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

from jupyter_gpushare import listener
from jupyter_gpushare.broker.app import _Formatter
from jupyter_gpushare.broker.http import base, handlers
from jupyter_gpushare.broker.http.listener import CallerQueues, Rate
from jupyter_gpushare.broker.views import cluster_view
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import TooMany
from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.protocol import wire
from tests.broker.http_site import PREFIX, Http
from tests.waiting import becomes

HOSTILE = "evil\x1b[2J\r\nINJECTED\x07\u202eabc\x9b"


async def test_a_user_that_submits_all_the_time_is_told_when_to_come_again_and_others_are_not(http: Http):
    http.service.limits.changes = Rate(per_s=0.5, burst=3, clock=lambda: 0.0)
    for _ in range(3):
        await http.submit("bo")
    refused = await http.ask("POST", "jobs", "bo", json={"command": ["true"]})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    job = next(iter(http.broker.registry.jobs))
    assert (await http.refused("DELETE", f"jobs/{job}", "bo")).status == 429
    assert (await http.ask("GET", "status", "bo")).status_code == 200
    await http.submit("ada")
    assert len(http.broker.registry.jobs) == 4


async def test_six_threads_of_one_user_submit_one_after_the_other_beside_other_users(http: Http, monkeypatch):
    submit, running, most = http.broker.requests.submit, Counter(), Counter()
    let_bo_go = asyncio.Event()

    async def slow(user, *rest):
        running[user] += 1
        most[user] = max(most[user], running[user])
        if user == "bo":
            await let_bo_go.wait()
        job = await submit(user, *rest)
        running[user] -= 1
        return job

    monkeypatch.setattr(http.broker.requests, "submit", slow)
    six = asyncio.gather(*(http.submit("bo") for _ in range(6)))
    await http.submit("ada")  # while one of bo's is under way
    let_bo_go.set()
    await six
    assert most == {"ada": 1, "bo": 1}
    assert not http.service.limits.submits._slots


async def test_a_submitted_job_is_answered_without_a_plan_where_planning_takes_long(http: Http, monkeypatch):
    made = []
    view = cluster_view.ClusterView
    monkeypatch.setattr(cluster_view, "ClusterView", lambda *args: made.append(args) or view(*args))
    monkeypatch.setattr(cluster_view, "_COSTLY_S", 0.0)
    monkeypatch.setattr(cluster_view, "_FRESH_S", 600.0)
    for _ in range(5):
        answer = await http.ask("POST", "jobs", "bo", json={"command": ["true"], "gpus": "1"})
        assert answer.status_code == 201
    assert len(made) == 1
    assert answer.json()["reason"] == "Waits for 1 GPU."
    listed = (await http.ask("GET", "jobs", "bo")).json()["jobs"]
    assert len(made) == 2
    assert {job["position"] for job in listed} - {None} != set()


async def test_our_client_waits_as_told_and_then_submits(http: Http):
    http.service.limits.changes = Rate(per_s=1.0, burst=1)
    client = BrokerClient(http.api, "bo")
    for key in ("a", "b"):
        await client.post("jobs", wire.JobRequest(command=["true"]), wire.Job, key=key)
    await client.close()
    http.service.limits.changes = Rate(per_s=1 / 3600, burst=1)  # a slow machine must not come too late
    client = BrokerClient(http.api, "bo", retry_s=0.0)
    await client.post("jobs", wire.JobRequest(command=["true"]), wire.Job, key="c")
    with pytest.raises(TooMany):
        await client.post("jobs", wire.JobRequest(command=["true"]), wire.Job, key="d")
    await client.close()
    assert len(http.broker.registry.jobs) == 3


async def test_control_characters_in_a_name_reach_neither_page_nor_csv(http: Http):
    await http.submit("bo", name=HOSTILE)
    await http.broker.registry.record_notice(None, "watchdog", "notice.of", HOSTILE)
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    assert "evil?[2J INJECTED??abc?" in page
    table = (await http.ask("GET", f"{http.url}{PREFIX}decisions.csv", "root")).text
    for text in (page.replace("\n", ""), table.replace("\r\n", "")):
        assert not [c for c in text if not c.isprintable()]
    assert {len(row) for row in csv.reader(io.StringIO(table))} == {9}


def test_a_message_of_the_brokers_log_is_one_line_whatever_a_name_holds():
    record = logging.makeLogRecord({"msg": "job=%s", "args": (HOSTILE,), "levelname": "INFO", "name": "x"})
    assert _Formatter("[%(levelname).1s] %(message)s").format(record) == "[I] job=evil?[2J??INJECTED??abc?"


_HOLDS_A_LEASE = """
import fcntl, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = open(sys.argv[1], "rb")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("held", flush=True)
time.sleep(60)
"""


def test_a_file_lease_on_an_account_that_has_grown_keeps_the_helper_waiting_for_nothing(tmp_path):
    account = tmp_path / "account"
    account.write_bytes(b"x" * (files.ACCOUNT_BYTES + 1))
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_LEASE, str(account)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        fd = files.open_regular(account)
        began_at = time.monotonic()
        files._cut(fd)
        assert time.monotonic() - began_at < 2.0
        os.close(fd)
        assert account.stat().st_size == files.ACCOUNT_BYTES + 1
    finally:
        holder.kill()
        holder.communicate()
    fd = files.open_regular(account)
    files._cut(fd)
    os.close(fd)
    assert account.stat().st_size == files.ACCOUNT_BYTES


async def test_slow_bodies_of_one_user_leave_connections_to_others(http: Http, monkeypatch):
    requests = http.service.gate.connections._requests
    monkeypatch.setattr(base, "_MAX_REQUESTS", 2)
    head = f"POST {PREFIX}api/v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: token bo\r\n"
    head += "Content-Length: 9\r\n\r\n"
    slow = []
    for _ in range(2):
        slow.append(await asyncio.open_connection("127.0.0.1", http.port))
        slow[-1][1].write(head.encode())
    await becomes(lambda: requests["user bo"] == 2)
    refused = await http.ask("POST", "jobs", "bo", json={"command": ["true"]})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    await http.submit("ada")
    for _, writer in slow:
        writer.close()
    await becomes(lambda: not requests["user bo"])
    await http.submit("bo")


async def test_of_many_requests_at_once_each_users_first_one_is_answered_first(http: Http, monkeypatch):
    asked = []
    status = http.service.views.status

    def counted(_, user, *rest, **more):
        asked.append(user)
        return status(user, *rest, **more)

    monkeypatch.setattr(type(http.service.views), "status", counted)
    head = f"GET {PREFIX}api/v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: token "
    opened = [
        (user, await asyncio.open_connection("127.0.0.1", http.port)) for user in 100 * ["bo"] + ["ada"]
    ]
    async with asyncio.timeout(30):
        for _ in range(2):  # first each token becomes known
            asked.clear()
            for user, (_, writer) in opened:
                writer.write(f"{head}{user}\r\n\r\n".encode())
            for _, (reader, _) in opened:
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await reader.readexactly(length)
    for _, (_, writer) in opened:
        writer.close()
    assert len(asked) == 101
    assert asked.index("ada") <= 2


async def test_questions_about_unknown_tokens_of_one_peer_leave_the_hub_to_others(http: Http):
    http.service.limits.checks = CallerQueues(at_once=4, maximum=20)
    proxied = {"X-Forwarded-For": "203.0.113.66"}
    ask = functools.partial(http.ask, "GET", "status", "hub-waits", headers=proxied)
    waiting = [asyncio.create_task(ask()) for _ in range(30)]
    await becomes(lambda: sum(each.done() for each in waiting) >= 10 and http.hub_asked["hub-waits"] >= 4)
    refused = [each.result() for each in waiting if each.done()]
    assert {(each.status_code, each.headers["Retry-After"]) for each in refused} == {(429, "1")}
    assert http.hub_asked["hub-waits"] == 4
    other = {"X-Forwarded-For": "203.0.113.7"}
    assert (await http.ask("GET", "status", "ada", headers=other)).status_code == 200
    http.hub_goes_on.set()
    assert {each.status_code for each in await asyncio.gather(*waiting)} == {401, 429}


async def test_unknown_tokens_keep_no_user_with_a_known_token_waiting(http: Http):
    http.service.limits.checks = CallerQueues(at_once=4, maximum=8)
    http.service.access.hub_auth.cache_max_age = 300
    ask = functools.partial(http.ask, "GET", "status", headers={"X-Forwarded-For": "203.0.113.66"})
    assert (await ask("ada")).status_code == 200
    waiting = [asyncio.create_task(ask("hub-waits")) for _ in range(12)]
    await becomes(lambda: sum(each.done() for each in waiting) >= 4)
    assert (await ask("ada")).status_code == 200
    http.hub_goes_on.set()
    await asyncio.gather(*waiting)


async def test_the_hub_is_not_asked_for_callers_that_have_left(http: Http):
    port, checks = http.port, http.service.limits.checks
    head = f"GET {PREFIX}api/v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: token hub-waits-"
    writers = []
    for n in range(10):
        writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
        writers[-1].write(f"{head}{n}\r\n\r\n".encode())
    await becomes(lambda: sum(checks._callers.values()) >= 10 and http.hub_asked.total() >= 4)
    for writer in writers:
        writer.close()
    await becomes(lambda: not len(http.service.gate.connections))
    http.hub_goes_on.set()
    await becomes(lambda: not checks._callers)
    assert http.hub_asked.total() == 4


async def test_logins_of_one_peer_alone_wait_for_the_hub(http: Http):
    http.service.limits.checks = CallerQueues(at_once=4, maximum=20)
    path, proxied = f"{http.url}{PREFIX}oauth_callback?code=c&state=s", {"X-Forwarded-For": "203.0.113.66"}
    waiting = [asyncio.create_task(http.ask("GET", path, "hub-waits", headers=proxied)) for _ in range(30)]
    await becomes(lambda: sum(each.done() for each in waiting) >= 10 and http.hub_asked["hub-waits"] >= 4)
    assert {each.result().status_code for each in waiting if each.done()} == {429}
    assert (await http.ask("GET", "status", "ada")).status_code == 200
    http.hub_goes_on.set()
    assert {each.status_code for each in await asyncio.gather(*waiting)} == {403, 429}


async def test_answers_that_a_user_does_not_read_are_few_and_not_kept(http: Http, monkeypatch):
    monkeypatch.setattr(base, "_MAX_REQUESTS", 2)

    async def large(self):
        await self.identify()
        self.finish(bytes(16 << 20))

    monkeypatch.setattr(handlers.DevicesHandler, "get", large)
    requests = http.service.gate.connections._requests
    head = f"GET {PREFIX}api/v1/devices HTTP/1.1\r\nHost: x\r\nAuthorization: token bo\r\n\r\n"
    deaf = []
    for _ in range(2):
        deaf.append(socket.create_connection(("127.0.0.1", http.port)))
        deaf[-1].sendall(head.encode())
    await becomes(lambda: requests["user bo"] == 2)
    refused = await http.ask("GET", "status", "bo")
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert (await http.ask("GET", "status", "ada")).status_code == 200
    monkeypatch.setattr(listener, "UNREAD_S", 0.5)
    await becomes(lambda: not requests["user bo"])
    assert (await http.ask("GET", "status", "bo")).status_code == 200
    for each in deaf:
        each.close()


async def test_requests_without_a_token_are_answered_in_between_those_of_others(http: Http, monkeypatch):
    http.service.access.hub_auth.cache_max_age = 300
    assert (await http.ask("GET", "status", "ada")).status_code == 200
    answered, answer = [], base.Base.answer

    def noted(self, *args, **options):
        answered.append(self.request.path.rpartition("/")[2])
        answer(self, *args, **options)

    monkeypatch.setattr(base.Base, "answer", noted)
    port, forwarded = http.port, "X-Forwarded-For: 203.0.113.66\r\n"
    paths = 33 * ["health", "openapi.json", "no-such"] + ["status"]
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in paths]
    async with asyncio.timeout(30):
        for path, (_, writer) in zip(paths, opened, strict=True):
            header = "Authorization: token ada\r\n" if path == "status" else forwarded
            writer.write(f"GET {PREFIX}api/v1/{path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        for reader, _ in opened:
            await reader.readuntil(b"\r\n\r\n")
    for _, writer in opened:
        writer.close()
    assert len(answered) == 100
    assert answered.index("status") <= 10


async def test_a_flood_of_changes_is_no_flood_to_the_hub(http: Http, monkeypatch):
    monkeypatch.setattr(base, "_REFUSAL_S", 0.0)
    http.service.limits.changes = Rate(per_s=0.001, burst=2, clock=lambda: 0.0)
    asked = []
    auth = http.service.access.hub_auth
    auth.cache_max_age = 300
    real = auth.user_for_token

    def counted(token, use_cache=True, **options):
        asked.append(use_cache)
        return real(token, use_cache=use_cache, **options)

    monkeypatch.setattr(auth, "user_for_token", counted)
    for _ in range(20):
        await http.ask("POST", "jobs", "bo", json={"command": ["true"]})
    assert asked.count(False) == 2
