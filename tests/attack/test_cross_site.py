"""What a page of another site, or of another user on the same origin, can make a browser do."""

from __future__ import annotations

import re

import pytest

from tests.broker.http_site import PREFIX, Http

PATHS = ["", "decisions.csv", "metrics", "api/v1/status", "api/v1/health", "api/v1/nosuch", "nosuch"]
PATHS.append("usage.csv")
NAVIGATES = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document", "Sec-Fetch-Site": "same-origin"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("identity", ["root", None])
@pytest.mark.parametrize("path", PATHS)
async def test_no_answer_can_be_framed_or_guessed_to_be_a_script(unchanged: Http, path, identity):
    answer = await unchanged.ask("GET", f"{unchanged.url}{PREFIX}{path}", identity)
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("place", ["iframe", "frame", "embed", "object", "fencedframe"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_browser_that_loads_it_into_a_frame_is_refused(unchanged: Http, path, place):
    headers = {"Sec-Fetch-Dest": place, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "same-origin"}
    answer = await unchanged.ask("GET", f"{unchanged.url}{PREFIX}{path}", "root", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["reason"] == "framed"


class Administrator:
    """A browser in which an administrator has logged in at the broker's page."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.cookies = {"service-gpushare": http.login("root")}

    async def _send(self, method, url, headers, **options):
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = await self.http.client.request(method, url, headers=headers | {"Cookie": cookie}, **options)
        for name, value in answer.cookies.items():
            self.cookies[name] = value
        self.http.client.cookies.clear()
        return answer

    async def open(self) -> str:
        """Show the page, and return the XSRF token in its forms."""
        page = await self._send("GET", f"{self.http.url}{PREFIX}?edit=nlp", NAVIGATES)
        found = re.search(r'name="_xsrf" value="([^"]+)"', page.text)
        assert found, page.text
        return found[1]

    async def send(self, fields, query="", **headers):
        url = f"{self.http.url}{PREFIX}{query}"
        return await self._send("POST", url, NAVIGATES | headers, data=fields)


async def test_a_form_of_our_page_changes_a_quota_with_the_login_cookie(http: Http):
    browser = Administrator(http)
    token = await browser.open()
    answer = await browser.send({"project": "nlp", "quota": "0.5", "weight": "", "_xsrf": token})
    assert answer.status_code == 303, answer.text
    assert "nlp" in http.broker.registry.overrides


async def test_a_change_needs_the_token_in_the_body_whatever_the_address_and_the_headers_say(http: Http):
    browser = Administrator(http)
    token = await browser.open()
    change = {"project": "nlp", "quota": "0.5"}
    for query, fields, headers in [
        ("", {}, {}),
        ("", {"_xsrf": "wrong"}, {}),
        (f"?_xsrf={token}", {}, {}),
        ("", {}, {"X-XSRFToken": token}),
        ("", {"_xsrf": ""}, {"X-XSRFToken": token}),
        (f"?_xsrf={token}", {"_xsrf": "wrong"}, {"X-XSRFToken": token}),
    ]:
        answer = await browser.send(change | fields, query, **headers)
        assert answer.status_code in (401, 403), (query, fields, headers)
    assert not http.broker.registry.overrides


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x"])
async def test_the_api_takes_no_cookie_for_a_change(http: Http, kind):
    browser = Administrator(http)
    token = await browser.open()
    answer = await browser._send(
        "PUT",
        f"{http.api}/projects/nlp?_xsrf={token}",
        {"Content-Type": kind, "X-XSRFToken": token},
        content=b'{"quota": 0.5}',
    )
    assert answer.status_code == 401
    assert not http.broker.registry.overrides
