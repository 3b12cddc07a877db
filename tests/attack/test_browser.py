"""A page of another user, in the browser of a logged-in administrator: a real browser tries.

All users' servers and this service are one origin to a browser, unless the Hub gives
each user a subdomain (`JupyterHub.subdomain_host`).  Another host name stands for one here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page
from tornado import web

from tests.broker import pages
from tests.broker.http_site import PREFIX, Http
from tests.waiting import PATIENCE_S, becomes

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

_ATTACKS = {
    "frame": """
        const frame = document.createElement('iframe');
        frame.onload = () => attack(() => frame.contentDocument);
        frame.src = target;
        document.body.append(frame);
    """,
    "embed": """
        const frame = document.createElement('object');
        frame.onload = () => attack(() => frame.contentDocument);
        frame.onerror = () => { document.title = 'refused'; };
        frame.data = target;
        document.body.append(frame);
    """,
    "fetch": """
        fetch(target, {credentials: 'include'}).then(answer => answer.text()).then(text => {
            document.title = text.includes('name="_xsrf"') ? 'read' : 'refused';
        }).catch(() => { document.title = 'refused'; });
    """,
    "window": """
        document.querySelector('button').onclick = () => {
            const opened = window.open(target);
            let looks = 0;
            const timer = setInterval(() => {
                try {
                    if (opened.document.getElementById('edit')) {
                        clearInterval(timer);
                        attack(() => opened.document);
                    }
                } catch (error) {
                    if (error.name !== 'SecurityError' || ++looks <= 30) return;
                    clearInterval(timer);
                    document.title = 'refused';
                }
            }, 100);
        };
    """,
}
_PAGE = """<!DOCTYPE html><title>trying</title><body><button>My plots</button><script>
const target = '%s';
function attack(documentOf) {
    try {
        const form = documentOf().getElementById('edit');
        form.elements.quota.value = '0.25';
        form.submit();
        document.title = 'changed';
    } catch (error) { document.title = 'refused'; }
}
%s</script></body>"""


class _Attack(web.RequestHandler):
    def get(self, kind: str) -> None:
        self.finish(_PAGE % (self.get_query_argument("target"), _ATTACKS[kind]))


browser, http = pages.module_browser, pages.module_http


@pytest_asyncio.fixture(loop_scope="module")
async def page(http: Http, browser: Browser) -> AsyncIterator[Page]:
    """A page of a profile in which the administrator has logged in at the service."""
    http.servers[-1].request_callback.add_handlers(".*", [(r"/user/eve/(\w+)", _Attack)])
    async with await browser.new_context() as context:
        login = {"name": "service-gpushare", "value": http.login("root"), "url": http.url + PREFIX}
        await context.add_cookies([login])
        yield await context.new_page()


async def attacked(http: Http, page: Page, kind: str, host: str) -> str:
    """Open the attacker's page; return what it reached."""
    port = http.port
    target = f"{http.url}{PREFIX}?edit=nlp"
    await page.goto(f"http://{host}:{port}/user/eve/{kind}?target={target}")
    if kind == "window":
        await page.get_by_role("button").click()
    await page.wait_for_function("document.title !== 'trying'", timeout=1000 * PATIENCE_S)
    await page.wait_for_timeout(500)
    return await page.title()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("localhost", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["frame", "embed", "fetch"])
async def test_a_page_of_another_user_gets_nothing_by_frames_and_requests(http, page, kind, host) -> None:
    assert await attacked(http, page, kind, host) == "refused"
    assert not http.broker.registry.overrides


async def test_a_window_that_a_page_of_the_same_origin_opens_can_be_scripted(http: Http, page: Page) -> None:
    """What a shared origin leaves open: docs/security.md says so, and how to close it."""
    assert await attacked(http, page, "window", "127.0.0.1") == "changed"
    await becomes(lambda: "nlp" in http.broker.registry.overrides)


async def test_with_a_host_per_user_the_opened_window_cannot_be_scripted(http: Http, page: Page) -> None:
    assert await attacked(http, page, "window", "localhost") == "refused"
    assert not http.broker.registry.overrides
