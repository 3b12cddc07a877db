"""The service's own page: what each identity sees, quotas that are changed, decisions as CSV."""

from __future__ import annotations

import csv
import io
import re

import pytest
from playwright.async_api import async_playwright

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.transitions import Started
from tests.broker.http_site import PREFIX
from tests.broker.site import spawn
from tests.waiting import PATIENCE_S


async def test_an_admin_changes_a_quota_and_sees_it(http):
    page = (await http.ask("GET", f"{http.url}{PREFIX}?edit=vision", "root")).text
    assert 'name="quota"' in page
    form = {"project": "vision", "quota": "1.5", "weight": "3"}
    refused = await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)
    assert refused.status_code == 409
    assert "fewer than the 2.5" in refused.text
    form["force"] = "1"
    saved = await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)
    assert (saved.status_code, saved.headers["Location"]) == (303, f"{PREFIX}?period=24h")
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    assert "1.5" in page
    assert "(changed)" in page
    assert "http-equiv" not in page  # nothing moves while a user reads or types
    live = (await http.ask("GET", f"{http.url}{PREFIX}?live=1", "root")).text
    (every_s,) = re.findall(r'http-equiv="refresh" content="(\d+)"', live)
    (late_s,) = re.findall(r"animation: late 0s (\d+)s", live)
    assert int(every_s) < int(late_s) < int(every_s) + 4, "it says so within 4 s of its question"
    assert "The GPU broker does not answer: these figures are from " in live


@pytest.mark.parametrize(
    ("form", "status", "says"),
    [
        ({"project": "vision", "quota": "many"}, 400, "a number of GPUs"),
        ({"project": "vision", "quota": "-1"}, 400, "quota"),
        ({"project": "<b>", "quota": "1"}, 404, "&lt;b&gt;"),
        ({"lend": "bnone"}, 404, "no such lease"),
    ],
)
async def test_a_change_that_cannot_be_is_said_on_the_page_and_changes_nothing(http, form, status, says):
    refused = await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)
    assert refused.status_code == status
    assert "Nothing was changed" in refused.text
    assert says in refused.text
    assert not http.broker.registry.overrides


async def test_the_administrator_is_told_to_give_each_user_a_host_name(http, monkeypatch):
    async def advised(identity: str) -> bool:
        page = (await http.ask("GET", f"{http.url}{PREFIX}", identity)).text
        return "<code>c.JupyterHub.subdomain_host</code>" in page

    assert [await advised(identity) for identity in ("root", "ada")] == [True, False]
    monkeypatch.setattr(http.service.access.hub_auth, "hub_host", "https://hub.example.org")
    assert not await advised("root")


async def test_only_admins_change_anything_on_the_page(http):
    for identity in ("ada", "prometheus"):
        refused = await http.ask(
            "POST", f"{http.url}{PREFIX}", identity, data={"project": "vision", "quota": "1"}
        )
        assert refused.status_code == 403
    page = (await http.ask("GET", f"{http.url}{PREFIX}?edit=vision", "ada")).text
    assert "<form" not in page
    assert "Needs a look" not in page


async def test_a_period_that_does_not_exist_is_a_day(http):
    page = (await http.ask("GET", f"{http.url}{PREFIX}?period=<x>", "root")).text
    assert '<a href="?period=24h" aria-current="true">' in page


@pytest.mark.browser
async def test_times_are_in_utc_until_the_only_script_writes_them_in_the_readers_zone(http, chromium):
    grant = await http.broker.admission.start(spawn("ada", "1/2"))
    ada = await http.broker.registry.advance(http.broker.registry.by_handle(grant.lease), Started())
    await http.broker.requests.keep(ada, 30)
    await http.broker.registry.record_notice(None, "watchdog", "notice.of", "<b>at 2031-05-06T14:20Z")
    answer = await http.ask("GET", f"{http.url}{PREFIX}", "root")
    at = "2031-05-06"
    assert f'&lt;b&gt;at <time datetime="{at}T14:20Z">{at} 14:20 UTC</time>' in answer.text
    until = re.search(r'ada keeps it until <time datetime="([^"]*)">([^<]*)</time>', answer.text)
    assert until is not None
    assert until[1].replace("T", " ").replace("Z", " UTC") == until[2]

    async def fulfill(route):
        headers = {name: answer.headers[name] for name in ("Content-Type", "Content-Security-Policy")}
        await route.fulfill(body=answer.text, headers=headers)

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.executable_path, args=list(chromium.args)
        )
        page = await browser.new_page(timezone_id="Asia/Kolkata", locale="de-DE")
        page.set_default_timeout(1000 * PATIENCE_S)
        await page.route("**/*", fulfill)
        await page.goto("http://page.test/")
        shown = page.locator(f'time[datetime="{at}T14:20Z"]').first
        assert await shown.text_content() == "6. Mai 2031, 19:50"
        assert await shown.get_attribute("title") == f"{at} 14:20 UTC"
        assert "UTC" not in await page.locator("body").inner_text()
        await browser.close()


async def test_decisions_are_a_table_for_spreadsheets(http):
    registry = http.broker.registry
    grant = await http.broker.admission.start(spawn("ada", "1/2"))
    await registry.record_notice(None, "watchdog", "notice.of", 'a "strange, long"\nthing')
    await registry.record_notice(registry.by_handle(grant.lease), "note", "notice.of", "is here")
    rows = list(
        csv.reader(io.StringIO((await http.ask("GET", f"{http.url}{PREFIX}decisions.csv", "root")).text))
    )
    assert rows[0][0] == "seq"
    assert [row[-1] for row in rows[1:]] == [
        "ada's session (1/2 GPU) is here.",
        'This machine: a "strange, long" thing.',
        rows[-1][-1],
    ]
    mine = (await http.ask("GET", f"{http.url}{PREFIX}decisions.csv", "ada")).text
    assert "is here" in mine
    assert "strange" not in mine
    assert "is here" not in (await http.ask("GET", f"{http.url}{PREFIX}decisions.csv", "bo")).text


async def test_a_csv_longer_than_one_piece_has_every_decision_once(http):
    for n in range(1_105):
        http.broker.registry.store._write(
            (http.broker.registry.decisions.add(None, "note", messages.text("verbatim", f"number {n}.")),)
        )
    text = (await http.ask("GET", f"{http.url}{PREFIX}decisions.csv", "root")).text
    numbers = [row[-1] for row in csv.reader(io.StringIO(text))][1:]
    assert numbers == [f"number {n}." for n in reversed(range(1_105))]
