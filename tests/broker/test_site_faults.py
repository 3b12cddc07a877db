"""What an administrator has to mend outside the broker is in health and on the page until it is mended."""

from __future__ import annotations

import logging

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.backends import local
from jupyter_gpushare.backends.base import HubError
from jupyter_gpushare.broker.state.observations import Faults
from tests.broker.http_site import SPAWNER, Http
from tests.broker.virtual_time import until

REMEDY = "set c.JupyterHub.allow_named_servers = True"


async def _health(http: Http) -> tuple[int, list[str]]:
    answer = await http.ask("GET", "health", None)
    return answer.status_code, answer.json()["reasons"]


async def test_a_spawner_that_cannot_read_its_token_is_in_health_and_on_the_page(http: Http):
    fault = {"message": "/etc/gpushare/spawner-token cannot be read: <b>Permission denied</b>"}
    # By the uid of its process: it has no token to show.
    assert (await http.ask("POST", "spawner/fault", "-", json=fault)).status_code == 204
    status, reasons = await _health(http)
    assert status == 503
    assert len(reasons) == 1
    assert "/etc/gpushare/spawner-token cannot be read" in reasons[0]
    page = await http.client.get(http.url + "/services/gpushare/", headers={"Authorization": "token root"})
    assert "spawner-token cannot be read: &lt;b&gt;Permission denied" in page.text
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": None}
    assert (await http.ask("POST", "spawner/start", SPAWNER, json=start)).status_code == 200
    assert await _health(http) == (200, [])


async def test_a_hub_that_gives_starts_up_too_early_is_in_health_until_it_does_not(http: Http):
    http.broker.engine.start_s = 98.0
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": {"fraction": "1/4"}}
    for patience_s, said in ((30.0, 1), (2.0, 1), (150.0, 0)):
        body = start | {"patience_s": patience_s, "server": f"s{patience_s:.0f}"}
        body |= {"options": None} if patience_s == 2.0 else {}
        answer = await http.ask("POST", "spawner/start", SPAWNER, json=body)
        assert answer.status_code == 200, answer.text
        reasons = (await _health(http))[1]
        assert [reason for reason in reasons if "Set start_timeout to at least 200" in reason] == reasons
        assert len(reasons) == said


async def test_a_spawner_with_another_token_reads_that_word(http: Http):
    start = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": None}
    answer = await http.ask("POST", "spawner/start", "wrong", json=start)
    assert (answer.status_code, answer.json()["reason"]) == (403, "not_the_spawner")


def test_faults_are_logged_when_they_begin_and_end_and_at_most_once_a_minute(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    faults = Faults(lambda: now)
    for second in range(600):
        now = float(second)
        faults.found("spawner", f"The Hub's spawner cannot start server {second}.")
        faults.found("hub-start", "The Hub refuses.", forget_s=30)
    said = [each.getMessage() for each in caplog.records]
    assert said[:2] == ["The Hub's spawner cannot start server 0.", "The Hub refuses."]
    assert len(said) == 11
    faults.mended("spawner", "hub-start", "hub-stop")
    assert [each.getMessage() for each in caplog.records[11:]] == [
        "spawner: works again",
        "hub-start: works again",
    ]


def test_a_fault_that_replaces_another_is_logged_and_one_that_comes_and_goes_once_a_minute(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    faults = Faults(lambda: now)
    faults.found("hub-user", "It refuses to list.")
    for second in range(30, 600):
        now = float(second)
        faults.found("hub-user", "It refuses the token.")
    said = [each.getMessage() for each in caplog.records]
    assert said == ["It refuses to list.", "It refuses the token."]
    caplog.clear()
    for second in range(600, 1200):
        now = float(second)
        faults.found("hub-user", "It refuses the token.", forget_s=30)
        faults.mended("hub-user")
    assert len(caplog.records) <= 2 * 10 + 1
    caplog.clear()
    now = 2000.0
    faults.found("hub-user", "It refuses the token.", forget_s=30)
    now = 2031.0
    assert faults.sentences() == []
    assert [each.getMessage() for each in caplog.records][1:] == ["hub-user: works again"]


async def test_other_users_of_the_machine_report_no_fault(http: Http, monkeypatch):
    monkeypatch.setattr("jupyter_gpushare.broker.http.spawner.source_of", lambda _: "uid 1234 by socket")
    answer = await http.ask("POST", "spawner/fault", "-", json={"message": "all is lost"})
    assert answer.status_code == 403
    assert await _health(http) == (200, [])


async def test_health_is_degraded_while_the_hub_refuses_the_broker(site, broker):
    refused = HubError("the Hub did not start j1: off", not_now=True, remedy=REMEDY)
    site.fault("start_server", refused, refused)
    job = await site.submit("bo")
    await until(lambda: broker.views.health().status == "degraded")
    (reason,) = broker.views.health().reasons
    assert reason == f"The Hub refuses the broker: the Hub did not start j1: off. Remedy: {REMEDY}."
    await until(lambda: broker.state(job) == "running", 200)
    assert broker.views.health().reasons == []


async def test_a_hub_that_is_away_or_at_a_limit_does_not_refuse_the_broker(site, broker):
    site.fault("start_server", HubError("the Hub did not start j1: too many", not_now=True))
    job = await site.submit("bo")
    await until(lambda: "too many" in broker.registry.leases[job.lease_id].note)
    assert broker.views.health().reasons == []


def test_a_missing_library_is_named_and_no_lease_starts_without_it(monkeypatch, tmp_path):
    assert local.library_fault() == ""
    monkeypatch.setattr(native, "_HERE", tmp_path)
    assert "preload library is missing" in local.library_fault()
    assert "jupyter_gpushare.native.build" in local.library_fault()
    faults = Faults(lambda: 0.0)
    faults.check(local.library_fault)
    assert faults.sentences() == [local.library_fault()]


def test_faults_that_need_no_report_are_forgotten_in_time():
    now = 0.0
    faults = Faults(lambda: now)
    faults.found("hub-start", "The Hub refuses.", forget_s=600)
    faults.found("spawner", "No token.")
    now = 601.0
    assert faults.sentences() == ["No token."]
    faults.mended("spawner")
    assert faults.sentences() == []


@pytest.mark.parametrize("count", [19, 200])
def test_faults_are_bounded(count):
    faults = Faults(lambda: 0.0)
    for number in range(count):
        faults.found(str(number), "x")
    assert len(faults.sentences()) == min(count, 20)
