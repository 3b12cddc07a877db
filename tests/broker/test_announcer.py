"""What the broker tells the administrator's webhook and mail command about jobs."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path

import pytest
from traitlets import TraitError

from jupyter_gpushare.broker.control import announcer as module
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.settings import BrokerTraits
from jupyter_gpushare.broker.state.policy import Receivers
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from tests.broker import stored
from tests.broker.machine import Program
from tests.broker.virtual_time import until
from tests.waiting import until as eventually

NASTY = "nig\u202eht\r\nBcc: eve@example.org\x1b[31m"
WRITE = "import os, sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


def job(mail: bool = False, name: str = NASTY, user: str = "bo") -> JobRecord:
    request = wire.encode(wire.JobRequest(command=["x"], notify_mail=mail)).decode()
    return replace(stored.JOB, user=user, name=name, request=request)


@asynccontextmanager
async def running(receivers: Receivers):
    announcer = Announcer(receivers)
    task = asyncio.create_task(announcer.run())
    yield announcer
    task.cancel()
    await asyncio.wait([task])


async def test_the_webhook_is_told_with_names_as_data(receiver):
    async with running(Receivers(url=receiver.url)) as announcer:
        announcer.job("ended", job(), "failed", "It ended with exit code 3.\nlast line\x07")
        await asyncio.to_thread(eventually, lambda: receiver.told)
    (told,) = receiver.told
    assert told.pop("at").endswith("Z")
    assert told == {
        "text": "nig?ht Bcc: eve@example.org?[31m has failed. It ended with exit code 3. last line?",
        "event": "ended",
        "user": "bo",
        "project": "nlp",
        "job": stored.JOB.id,
        "name": "nig?ht Bcc: eve@example.org?[31m",
        "state": "failed",
        "reason": "It ended with exit code 3. last line?",
    }


async def test_only_jobs_that_asked_for_it_are_mailed_without_shell_or_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret-of-the-broker")
    out = tmp_path / "a mail; touch x"
    program = f"{WRITE}; open(sys.argv[1] + '.env', 'w').write(repr(dict(os.environ)))"
    receivers = Receivers(
        mail_command=(sys.executable, "-c", program, str(out)),
        mail_to="{user}@example.org",
        mail_from="gpu@example.org",
    )
    async with running(receivers) as announcer:
        announcer.job("started", job(), "running")
        announcer.job("ended", job(mail=True), "succeeded", "It ran to its end.")
        await asyncio.to_thread(eventually, Path(f"{out}.env").exists)
        await asyncio.to_thread(eventually, lambda: Path(f"{out}.env").read_text())
    mail = message_from_bytes(out.read_bytes())
    assert mail["To"] == "bo@example.org"
    assert mail["From"] == "gpu@example.org"
    assert mail["Subject"] == "nig?ht Bcc: eve@example.org?[31m is done"
    assert mail["Bcc"] is None
    assert "It ran to its end." in mail.get_payload()
    assert "secret-of-the-broker" not in Path(f"{out}.env").read_text()
    assert sorted(os.listdir(tmp_path)) == [out.name, f"{out.name}.env"]


async def test_a_receiver_that_fails_is_logged_once_and_stops_nothing(receiver, caplog):
    caplog.set_level("INFO", "gpushare.broker")
    receiver.status, receiver.moved_to = 302, "/elsewhere"
    receivers = Receivers(url=receiver.url, mail_command=("/no/such/program",), mail_to="{user}@example.org")
    async with running(receivers) as announcer:
        for _ in range(3):
            announcer.job("ended", job(mail=True), "succeeded")
        await asyncio.to_thread(eventually, lambda: len(receiver.told) == 3)
        receiver.status = 200
        announcer.job("ended", job(), "succeeded")
        await asyncio.to_thread(eventually, lambda: "webhook of the site: works again" in caplog.text)
        await asyncio.to_thread(eventually, lambda: "the mail command" in caplog.text)
    assert caplog.text.count("the webhook of the site: it answered 302") == 1
    assert caplog.text.count("the mail command: /no/such/program ended with exit code 127") == 1


async def test_a_command_that_hangs_is_killed_with_what_it_started_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 2.0)
    pids = tmp_path / "pids"
    command = ("sh", "-c", f"sleep 600 & echo $! $$ > {pids}; wait")
    async with running(Receivers(mail_command=command, mail_to="{user}@example.org")) as announcer:
        announcer.job("ended", job(mail=True), "succeeded")
        await asyncio.to_thread(eventually, lambda: pids.exists() and len(pids.read_text().split()) == 2)
        for pid in pids.read_text().split():
            await asyncio.to_thread(eventually, lambda pid=pid: not _runs(pid))


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_full_queue_drops_the_oldest_and_says_so_once_a_minute(receiver, caplog):
    announcer = Announcer(Receivers(url=receiver.url))
    for n in range(1_005):
        announcer.job("ended", job(name=f"job {n}"), "succeeded")
    assert caplog.text.count("the webhook of the site: 1000 messages wait: the 1 oldest dropped") == 1
    assert caplog.text.count("oldest dropped") == 1
    announcer._webhook._logged_at -= 60
    announcer.job("ended", job(name="job 1005"), "succeeded")
    assert caplog.text.count("the webhook of the site: 1000 messages wait: the 5 oldest dropped") == 1
    task = asyncio.create_task(announcer.run())
    await asyncio.to_thread(eventually, lambda: len(receiver.told) == 1_000)
    task.cancel()
    await asyncio.wait([task])
    assert [told["name"] for told in receiver.told] == [f"job {n}" for n in range(6, 1_006)]


async def test_the_jobs_of_one_user_displace_no_mail_of_another(receiver, tmp_path):
    out = tmp_path / "mail"
    mail = Receivers(mail_command=(sys.executable, "-c", WRITE, str(out)), mail_to="{user}@example.org")
    announcer = Announcer(mail)
    announcer.job("ended", job(mail=True, user="ada"), "succeeded")
    for n in range(1_500):
        announcer.job("ended", job(mail=n % 2 == 0 or n > 100), "succeeded")
    assert [user for user, _ in announcer._mail._waiting].count("ada") == 1
    assert len(announcer._mail._waiting) == 1_000
    asked = Announcer(mail)
    for _ in range(1_500):
        asked.job("ended", job(mail=False), "succeeded")
    assert not asked._mail._waiting, "mails that no job asked for take no place"


async def test_a_receiver_that_hangs_delays_no_other(receiver, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 600.0)
    told = tmp_path / "told"
    hanging = Receivers(
        url=receiver.url,
        mail_command=("sh", "-c", f"echo >> {told}; sleep 600"),
        mail_to="{user}@example.org",
    )
    async with running(hanging) as announcer:
        announcer.job("ended", job(mail=True, name="first"), "succeeded")
        await asyncio.to_thread(eventually, told.exists)
        for n in range(20):
            announcer.job("ended", job(mail=True, name=f"job {n}"), "succeeded")
        await asyncio.to_thread(eventually, lambda: len(receiver.told) == 21)
        assert told.read_text() == "\n", "the first mail still hangs"
    assert [each["name"] for each in receiver.told] == ["first", *(f"job {n}" for n in range(20))]


def test_a_name_that_makes_no_address_gets_no_mail():
    receivers = Receivers(mail_command=("x",), mail_to="{user}@example.org")
    asked = wire.JobRequest(command=["x"], notify_mail=True)
    receivers.check("bo", asked)
    for name in ("-oQ/tmp", "a b", "a\nBcc: x", "a,b", "ä", ""):
        with pytest.raises(InvalidRequest, match="no mail address"):
            receivers.check(name, asked)
    with pytest.raises(InvalidRequest, match="sends no mail"):
        Receivers().check("bo", asked)
    Receivers().check("bo", wire.JobRequest(command=["x"]))


@pytest.mark.parametrize(
    ("trait", "value"),
    [("notify_url", "example.org"), ("mail_to", "bo@example.org"), ("mail_to", "{user}\n@example.org")],
)
def test_a_wrong_setting_is_refused(trait, value):
    with pytest.raises(TraitError, match=trait):
        BrokerTraits(**{trait: value})


async def test_the_story_of_a_job_is_announced_in_order(site, broker):
    said: list[tuple[str, str]] = []
    announcer = broker.loop.announcer
    announcer.job = lambda event, job, state, reason="": said.append((event, state))  # type: ignore[method-assign]
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", max_run_s=600.0, program=Program(work_s=9_000))
    await until(lambda: broker.state(job) == "running", 120)
    await site.gpu_cell(ada)
    await until(lambda: broker.job(job).result, 3_600)
    assert said == [
        ("started", "running"),
        ("paused", "suspended"),
        ("attention", "running"),
        ("ended", "timed_out"),
    ]
