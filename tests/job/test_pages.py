"""The runner's pages: the holder of a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from jupyterhub.services.auth import HubOAuth
from tornado.netutil import bind_sockets

from jupyter_gpushare import listener
from jupyter_gpushare.job import pages
from jupyter_gpushare.listener import HUB
from jupyter_gpushare.protocol.jobfiles import AttemptRecord, Disk

SCOPE = "access:servers!server=ada/j1-1"


@pytest.mark.parametrize(("scopes", "status"), [([SCOPE], 200), ([], 403)])
async def test_a_user_is_counted_as_one_once_it_may_read_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scopes: list[str], status: int
) -> None:
    async def known(*_: Any, **__: Any) -> dict[str, Any]:
        return {"kind": "user", "name": HUB, "scopes": scopes}

    for name, value in {
        "JUPYTERHUB_API_TOKEN": "x",
        "JUPYTERHUB_API_URL": "http://127.0.0.1:1/hub/api",
        "JUPYTERHUB_OAUTH_ACCESS_SCOPES": f'["{SCOPE}"]',
        "JUPYTERHUB_CLIENT_ID": "x",
        "JUPYTERHUB_OAUTH_CALLBACK_URL": "/user/ada/oauth_callback",
        "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(listener, "source_of", lambda _: "203.0.113.7")
    monkeypatch.setattr(HubOAuth, "user_for_token", known)
    # Without JupyterHub's thread for this: its event loop is never closed.
    monkeypatch.setattr(HubOAuth, "_synchronize", lambda _, __, handler: handler._cached_hub_user)
    (tmp_path / "log").write_bytes(b"printed before")
    log = str(tmp_path / "log")
    record = AttemptRecord(id="j1", attempt=1, name="x", command=[], state="running", log=log)
    server = pages.server(
        "/user/ada/", None, now=lambda: (record, {}), log=lambda: None, disk=Disk(), seen=lambda: None
    )
    (listening,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(listening)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/user/ada/status"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url, headers={"Authorization": "token x"})).status_code == status
            for page in ("", "log"):  # of a runner that found a result, and starts nothing
                shown = await client.get(url.replace("status", page), headers={"Authorization": "token x"})
                assert ("printed before" in shown.text) is (status == 200)
            proven = [server.gate.connections.count(each, is_proven=True) for each in (f"user {HUB}", HUB)]
            assert proven == [int(status == 200), 0]
    finally:
        await server.end()
