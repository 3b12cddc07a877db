"""The Hub of `jupyterhub_config.py` at other addresses: below a path, with IPv6, with subdomains.

People reach both Hubs through a proxy in front, where TLS ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import running
from tests.e2e.demo import DemoHub, until
from tests.ports import free_ports
from tests.waiting import PATIENCE_S

BELOW_A_PATH = """
c.JupyterHub.bind_url = "http://[::1]:{0}/jupyter/"
c.JupyterHub.hub_bind_url = "http://[::1]:{1}"
c.ConfigurableHTTPProxy.api_url = "http://[::1]:{2}"
c.JupyterHub.services[0]["url"] = "http://[::1]:{3}"
c.JupyterHub.public_url = "https://hub.test/jupyter/"
"""
SUBDOMAINS = """
c.JupyterHub.subdomain_host = "https://hub.test"
"""


class InFront(httpx.HTTPTransport):
    """A proxy that ends TLS for `hub.test` and all hosts below it: the Hub's own proxy is behind it."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._behind = {"scheme": "http", "host": host, "port": port}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.scheme == "https"
        assert f".{request.url.host}".endswith(".hub.test"), f"{request.url} leads elsewhere"
        headers = {**request.headers, "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.7"}
        url = request.url.copy_with(**self._behind)
        return super().handle_request(
            httpx.Request(request.method, url, headers=headers, stream=request.stream)
        )


@dataclass
class BehindProxy(DemoHub):
    """A demo hub that people know as `url`, with its broker's page at `page`."""

    host: str = "127.0.0.1"
    hub_url: str = "https://hub.test"
    page: str = ""

    @property
    def url(self) -> str:
        return self.hub_url

    @property
    def service_url(self) -> str:
        return self.page

    def client(self, **options: Any) -> httpx.Client:
        front = InFront(self.host, self.port)
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, transport=front, **options)


@pytest.fixture
def below(tmp_path: Path) -> Iterator[BehindProxy]:
    port = free_ports(4)
    hub_url = "https://hub.test/jupyter"
    demo = BehindProxy(
        tmp_path,
        port=port,
        site=BELOW_A_PATH.format(*range(port, port + 4)),
        host="::1",
        hub_url=hub_url,
        page=f"{hub_url}/services/gpushare",
    )
    with running(demo) as hub:
        yield hub


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[BehindProxy]:
    page = "https://gpushare--service.hub.test/services/gpushare"
    with running(BehindProxy(tmp_path, site=SUBDOMAINS, page=page)) as hub:
        yield hub


def see_the_pages(hub: BehindProxy, server_url: str) -> str:
    """Start a session and a job, read the job's page and the administrator's; return the latter."""
    ada = hub.person("ada")
    ada.start_server(fraction="1/2")
    assert ada.state() == "running"
    job = ada.ask("jobs", "POST", json={"command": ["sh", "-c", "echo here; sleep 600"], "gpus": "1/2"})
    until("the job runs", lambda: ada.job(job["id"])["state"] == "running")
    server = ada.job(job["id"])["server"]
    # Before, the Hub may redirect to and fro between the page and that of a pending start.
    until("the Hub has its server", lambda: ada.server_ready(server))
    with hub.browser("ada") as (browser, _):
        until("its page has its log", lambda: "here" in browser.get(f"{server_url}{server}/").text)
    with hub.browser("admin") as (browser, _):
        page = browser.get(f"{hub.page}/")
        assert page.url == f"{hub.page}/"
        assert f'href="{hub.url}/hub/home"' in page.text
        assert browser.get(f"{hub.url}/hub/static/css/style.min.css").status_code == 200
        assert [each.secure for each in browser.cookies.jar if each.name == "service-gpushare"] == [True]
        xsrf = re.search(r'name="_xsrf" value="([^"]+)"', page.text)
        assert xsrf
        done = browser.post(f"{hub.page}/", data={"_xsrf": xsrf[1], "lending": "watch"})
        assert done.status_code == 200, done.text
        assert ada.ask("lending")["mode"] == "watch"
    assert not re.search(r"\] 404 .*(?:services|spawner)", hub.log.read_text())
    return page.text


def test_a_hub_below_a_path_with_ipv6_behind_a_proxy(below: BehindProxy) -> None:
    page = see_the_pages(below, f"{below.url}/user/ada/")
    assert "same address as all users" in page


@pytest.mark.long
def test_a_hub_with_subdomains_behind_a_proxy(apart: BehindProxy) -> None:
    page = see_the_pages(apart, "https://ada.hub.test/user/ada/")
    assert "same address as all users" not in page
