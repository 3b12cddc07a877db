"""The service's own page: what each identity sees, quotas that are changed, decisions as CSV."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.protocol.helper import ComputeShare, UnleasedProcess
from tests.broker import pages
from tests.broker.http_site import PREFIX
from tests.broker.pages import HUB_STATIC, WIDTHS
from tests.broker.site import spawn
from tests.ui.pages import accessible, picture
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")  # that of `browser`

# Names of projects that a narrow column breaks within a word.
CUT = """all => all.flatMap(td => [...td.querySelectorAll('.soft')])
    .filter(one => one.textContent.length < 10 && one.getClientRects().length > 1)
    .map(one => one.textContent)"""
browser, http = pages.module_browser, pages.module_http


async def submit_many(http, names):
    for name in names:
        await http.broker.loop.observer.measure()  # devices count as known for a few seconds
        await http.submit("bo", name=name, gpus="2")


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
        ({"project": "vision", "quota": "many"}, 400, "numbers of GPUs"),
        ({"project": "vision", "quota": "-1"}, 400, "quota"),
        ({"project": "<b>", "quota": "1"}, 404, "&lt;b&gt;"),
        ({"lease": "bnone", "act": "lend"}, 404, "no such lease"),
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
    auth, host = http.service.access.hub_auth, "hub.example.org"
    monkeypatch.setattr(auth, "hub_host", f"https://{host}")  # with c.JupyterHub.public_url too
    assert await advised("root")
    apart = f"https://gpushare--service.{host}{PREFIX}oauth_callback"
    monkeypatch.setattr(auth, "oauth_redirect_uri", apart)
    assert not await advised("root")


async def test_only_admins_change_anything_on_the_page(http):
    for identity in ("ada", "prometheus"):
        refused = await http.ask(
            "POST", f"{http.url}{PREFIX}", identity, data={"project": "vision", "quota": "1"}
        )
        assert refused.status_code == 403
    page = (await http.ask("GET", f"{http.url}{PREFIX}?edit=vision", "ada")).text
    assert 'method="post"' not in page
    assert "Needs a look" not in page


async def test_the_table_of_sessions_has_shares_of_time_where_there_are_any(http):
    record = await http.session()
    held = http.site.held[record.handle]

    async def cells(column: str = "Share of time", **found: Any) -> list[str]:
        for name, value in found.items():
            setattr(held, name, value)
        await http.broker.loop.observer.measure()
        page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
        assert page.count("<th>Share of time</th>") == page.count('<td data-label="Share of time">')
        found = re.findall(rf'<td data-label="{column}">(.*?)</td>', page)
        return [" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in found]

    assert await cells() == []
    fair, strict = (replace(held.asked, compute_share=ComputeShare(mode)) for mode in ("fair", "strict"))
    assert await cells(asked=fair) == ["50 % granted"]
    assert await cells(measured_share=0.462) == ["50 % granted 46 % measured"]
    assert await cells(asked=strict) == ["at most 50 % 46 % measured"]
    assert await cells(share_reason="its device has no library that could hold calls") == ["not in force"]
    (now,) = await cells("Now")
    assert now.endswith("not in force: its device has no library that could hold calls.")


async def test_the_devices_tell_guests_from_those_that_hold_them(http):
    ada, bo = await http.session(), await http.session("bo")
    on = {"devices": ada.lease.devices, "host": ada.id}
    await http.broker.registry.edit(bo, lambda record: replace(record, lease=replace(record.lease, **on)))
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    cells = [
        " ".join(re.sub("<[^>]*>", " ", each).split())
        for each in re.findall(r'<td data-label="Held">(.*?)</td>', page)
    ]
    assert "0.5 of 1 GPU ada, 1/2 GPU guest: bo, 1/2 GPU" in cells


async def test_an_administrator_acts_on_sessions_from_the_page_with_a_line_in_the_log(http):
    ada, registry = await http.session(), http.broker.registry

    async def send(**form: str):
        return await http.ask("POST", f"{http.url}{PREFIX}?act={ada.id}", "root", data=form)

    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    assert f'href="?period=24h&amp;act={ada.id}&amp;back=sessions-{ada.id}#act"' in page
    panel = (await http.ask("GET", f"{http.url}{PREFIX}?act={ada.id}", "root")).text
    assert "Lend it now" in panel
    assert "Wake it" not in panel
    lent = await send(lease=ada.id, act="lend")
    assert (lent.status_code, lent.headers["Location"]) == (303, f"{PREFIX}?period=24h")
    assert registry.leases[ada.id].lease.lend_now
    unsure = await send(lease=ada.id, act="stop")
    assert unsure.status_code == 400
    assert "tick the box" in unsure.text
    for form, status in [({"act": "resume"}, 409), ({"act": "keep"}, 400), ({"act": "priority"}, 400)]:
        refused = await send(lease=ada.id, **form)
        assert (refused.status_code, "Nothing was changed" in refused.text) == (status, True)
    assert (await send(lease="bnone", act="lend")).status_code == 404
    said = [entry.sentence for entry in registry.decisions.latest if entry.action == "admin"]
    assert said == [
        "root asked to lend the GPU of ada's session (1/2 GPU).",
        "root asked to wake ada's session (1/2 GPU).",  # which was refused
    ]
    assert "has ended" in (await http.ask("GET", f"{http.url}{PREFIX}?act=bnone", "root")).text
    assert 'id="act"' not in (await http.ask("GET", f"{http.url}{PREFIX}?act={ada.id}", "ada")).text


async def test_an_administrator_orders_and_ends_jobs_from_the_page(http):
    await http.broker.loop.observer.measure()
    job = await http.submit("bo", name="whole")
    panel = (await http.ask("GET", f"{http.url}{PREFIX}?act=j{job.id}", "root")).text
    assert 'name="priority"' in panel
    for form, status in [
        ({"act": "priority", "priority": "20"}, 303),
        ({"act": "priority", "priority": "much"}, 400),
        ({"act": "priority", "priority": "101"}, 400),
        ({"act": "stop", "sure": "1"}, 303),
    ]:
        answer = await http.ask("POST", f"{http.url}{PREFIX}", "root", data={"lease": f"j{job.id}", **form})
        assert answer.status_code == status, answer.text
    registry = http.broker.registry
    assert registry.jobs[job.id].result == "cancelled"
    said = [entry.sentence for entry in registry.decisions.latest if entry.action == "admin"]
    assert said == [
        "bo's job whole (1 GPU) got priority 20 from root, was 0.",
        "root asked to stop bo's job whole (1 GPU).",
    ]


async def test_a_gpu_and_the_machine_are_emptied_from_the_page(http):
    registry = http.broker.registry
    uuid = registry.devices.listed[0].uuid

    async def send(**form: str) -> str:
        answer = await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)
        assert answer.status_code == 303, answer.text
        return (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text

    page = await send(drain=uuid, hours="2")
    assert "Takes nothing new (owners are asked to finish by <time" in page
    assert re.search(r"empties .* until <time [^>]*>[^<]*</time>: it takes nothing new", page)
    assert f'name="undrain" value="{uuid}"' in page
    assert "Takes nothing new" not in await send(undrain=uuid)
    page = await send(drain="machine", hours="")
    assert page.count("Takes nothing new") == 2
    assert page.count("all GPUs are being emptied") == 2
    await send(undrain="machine")
    assert not registry.devices.drains.of
    hers = (await http.ask("GET", f"{http.url}{PREFIX}", "ada")).text
    assert "Empty it" not in hers


async def test_the_highest_priority_of_a_project_is_set_in_the_form_and_taken_back(http):
    registry = http.broker.registry
    form = {"project": "nlp", "priority_max": "30", "limit": "1.5"}
    assert (await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)).status_code == 303
    page = (await http.ask("GET", f"{http.url}{PREFIX}?edit=nlp", "root")).text
    assert 'name="priority_max" inputmode="numeric" value="30"' in page
    assert registry.decisions.latest[-1].sentence == (
        "root set project nlp to quota 1, weight 1, limit 1.5, priority at most 30, was quota 1, weight 1."
    )
    assert http.broker.request_policy.max_priority("nlp") == 30
    form["priority_max"] = "101"
    assert (await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)).status_code == 400
    assert (await http.ask("POST", f"{http.url}{PREFIX}", "root", data={"reset": "nlp"})).status_code == 303
    assert http.broker.request_policy.max_priority("nlp") == 0
    assert not registry.overrides


async def test_a_period_that_does_not_exist_is_a_day(http):
    page = (await http.ask("GET", f"{http.url}{PREFIX}?period=<x>", "root")).text
    assert '<a href="?period=24h" aria-current="true">' in page


@pytest.mark.browser
async def test_times_are_in_utc_until_the_only_script_writes_them_in_the_readers_zone(http, browser):
    await http.broker.own_sessions.keep(await http.session(), 30)
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

    async with await browser.new_page(timezone_id="Asia/Kolkata", locale="de-DE") as page:
        page.set_default_timeout(1000 * PATIENCE_S)
        await page.route("**/*", fulfill)
        await page.goto("http://page.test/")
        shown = page.locator(f'time[datetime="{at}T14:20Z"]').first
        assert await shown.text_content() == "6. Mai 2031, 19:50"
        assert await shown.get_attribute("title") == f"{at} 14:20 UTC"
        assert "UTC" not in await page.locator("body").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize(
    "judged", [(360,), pytest.param(WIDTHS, marks=pytest.mark.long)], ids=["narrow", "every_width"]
)
@pytest.mark.parametrize("forced", ["none", "active"])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_looks_like_the_hubs_and_fits_a_telephone(http, browser, theme, forced, judged):
    """The layout is looked at in every width, and axe-core judges the widths of ``judged``."""
    held = http.site.held[(await http.session()).handle]
    held.asked, held.measured_share = replace(held.asked, compute_share=ComputeShare.FAIR), 0.462
    await submit_many(http, [f"train-{n}-with-a-name-that-no-line-of-a-telephone-holds" for n in range(30)])
    answer = await http.ask("GET", f"{http.url}{PREFIX}?edit=vision", "root")
    other = "light" if theme == "dark" else "dark"

    async def fulfill(route):
        path = route.request.url.partition("page.test")[2].partition("?")[0]
        if path.startswith("/hub/static/"):
            await route.fulfill(path=HUB_STATIC / path.removeprefix("/hub/static/"))
        elif path == "/hub/logo":
            await route.fulfill(path=HUB_STATIC / "images/jupyterhub-80.png")
        else:
            headers = {name: answer.headers[name] for name in ("Content-Type", "Content-Security-Policy")}
            await route.fulfill(body=answer.text, headers=headers)

    async with await browser.new_page(color_scheme=theme, forced_colors=forced) as page:
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.set_default_timeout(1000 * PATIENCE_S)
        await page.route("**/*", fulfill)
        await page.goto("http://page.test/services/gpushare/")
        shown = page.locator("html")
        assert await shown.get_attribute("data-bs-theme") == theme
        links = await page.locator("nav.navbar a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert {"/hub/home", "/hub/token", "/hub/admin", "/hub/logout", PREFIX} <= set(links)
        family = await page.evaluate(
            "getComputedStyle(document.documentElement).getPropertyValue('--bs-blue')"
        )
        assert family, "the Hub's stylesheet is in force"
        assert not said
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            now = page.locator('#sessions ~ table td[data-label="Now"]').first
            await now.evaluate("td => { td.textContent = 'A sentence is long. '.repeat(40); }")
            assert await page.locator("#sessions ~ table td").evaluate_all(CUT) == []
            if width in judged:
                await accessible(page, "main")
            await picture(page, f"admin-{theme}-{forced}-{width}")
        parts = await page.locator(".legend i").evaluate_all(
            "all => all.map(one => getComputedStyle(one).background)"
        )
        assert len(set(parts)) == len(parts) > 3, "parts of the bar are told apart"
        # As the Hub's pages remember it, and read it from there.
        await page.get_by_role("button", name="Toggle dark mode").click()
        assert await page.evaluate("localStorage.getItem('jupyterhub-bs-theme')") == other
        await page.reload()
        assert await shown.get_attribute("data-bs-theme") == other


async def test_tables_are_searched_and_cut_into_pages(http):
    await submit_many(http, [f"train-{n}-" for n in range(27)])
    await http.submit("ada", name="hers")

    async def shown(query: str, identity: str = "root") -> list[str]:
        page = (await http.ask("GET", f"{http.url}{PREFIX}{query}", identity)).text
        return re.findall(r'data-label="Job" class="long">([^<]*)<', page)

    assert len(await shown("")) == 25
    assert len(await shown("?jobs=2")) == 3
    assert sorted(await shown("") + await shown("?jobs=2")) == sorted(
        [f"train-{n}-" for n in range(27)] + ["hers"]
    )
    assert await shown("?jobs=999") == await shown("?jobs=2"), "beyond the last page is the last"
    assert await shown("?jobs=-1") == await shown("?jobs=x") == await shown("")
    assert await shown("?q=HERS") == await shown("?q=ada") == ["hers"]
    assert await shown("?q=ada", "bo") == [], "a search finds nothing of others"
    assert len(await shown("?q=train-1")) == 11
    page = (await http.ask("GET", f"{http.url}{PREFIX}?period=7d&q=bo", "root")).text
    assert "1 to 25 of 27" in page
    assert '<a href="?period=7d&amp;q=bo&amp;jobs=2#jobs" rel="next">' in page
    nothing = (await http.ask("GET", f"{http.url}{PREFIX}?q=<i>none", "root")).text
    assert nothing.count("Nothing matches &ldquo;&lt;i&gt;none&rdquo;.") == 3


async def test_a_search_finds_an_id_as_a_whole_only(http, monkeypatch):
    ids = iter(["xxboxxxxx1", "xxboxxxxx2"])
    monkeypatch.setattr("jupyter_gpushare.broker.control.requests.random_id", lambda: next(ids))
    await http.submit("ada", name="first")
    await http.submit("ada", name="second")

    async def shown(find: str) -> list[str]:
        page = (await http.ask("GET", f"{http.url}{PREFIX}?q={find}", "root")).text
        return re.findall(r'data-label="Job" class="long">([^<]*)<', page)

    assert await shown("bo") == []
    assert await shown("xxboxxxxx2") == ["second"]


async def test_the_administrator_sees_what_each_user_holds_and_the_oldest_wait(http):
    await http.session()
    await http.broker.loop.observer.measure()
    job = await http.submit("bo", gpus="2", name="whole")
    waits = http.broker.registry.leases[f"j{job.id}"].lease.waits_since_at
    http.broker.registry.clock = lambda: waits + 7_300.0
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    rows = re.findall(r'<td data-label="User" class="long"><a href="[^"]*">(\w+)</a></td>(.*?)</tr>', page)
    cells = {name: re.findall(r">([^<]*)</td>", row) for name, row in rows}
    assert list(cells) == ["ada", "bo"]
    assert cells["ada"][1:6] == ["0.5", "1", "0", "0", "-"]
    assert cells["bo"][1:6] == ["0", "0", "0", "1", "2 h"]
    assert "Waits for the longest time: whole of bo, for 2 h." in page
    mine = (await http.ask("GET", f"{http.url}{PREFIX}", "ada")).text
    assert 'id="users"' not in mine
    assert "whole" not in mine


async def test_decisions_are_a_table_for_spreadsheets(http):
    registry = http.broker.registry
    grant = await http.broker.start(spawn("ada", "1/2"))
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


async def test_a_process_without_a_lease_is_ended_from_the_page_after_a_tick(http):
    process = UnleasedProcess(process="7-9", pid=7, uid=1003, name="<b>x", used_bytes=2**30, kept="")
    kept = replace(process, process="8-9", pid=8, kept="it belongs to a system user")
    http.site.unleased["GPU-0"] = [process, kept]
    await http.broker.loop.observer.measure()
    page = (await http.ask("GET", f"{http.url}{PREFIX}", "root")).text
    assert "Processes without a lease" in page
    assert "&lt;b&gt;x" in page
    assert "It is left alone: it belongs to a system user." in page
    assert page.count('name="end"') == 1
    assert "Processes without a lease" not in (await http.ask("GET", f"{http.url}{PREFIX}", "bo")).text
    form = {"device": "GPU-0", "end": "7-9"}
    unsure = await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form)
    assert (unsure.status_code, "tick the box" in unsure.text) == (400, True)
    assert (
        await http.ask("POST", f"{http.url}{PREFIX}", "root", data=form | {"sure": "1"})
    ).status_code == 303
    assert http.site.unleased["GPU-0"] == [kept]
    (line,) = [x.sentence for x in http.broker.registry.decisions.latest if x.action == "admin"]
    assert line == "root asked to end process 7 (<b>x) of uid 1003 on GPU GPU-0: it has no lease."
