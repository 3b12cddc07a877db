"""What a real Hub answers to a broker that it refuses, and the remedy that the administrator reads."""

from __future__ import annotations

import pytest

from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.backends.hub import HubClient
from tests.hub.conftest import ADMIN_TOKEN, Hub

JOB = ServerKey("ada", "j0123456789-1")


async def refused_by(hub: Hub, token: str, call: str, path: str = "/hub/api") -> HubError:
    client = HubClient(f"{hub.url}{path}", token)
    try:
        with pytest.raises(HubError) as refused:
            await (client.servers() if call == "servers" else client.start_server(JOB, "train", "7.mac"))
    finally:
        await client.close()
    return refused.value


@pytest.mark.parametrize("call", ["servers", "start"])
async def test_a_token_that_the_hub_does_not_know(hub: Hub, call):
    refused = await refused_by(hub, "unknown", call)
    assert "JUPYTERHUB_API_TOKEN" in refused.remedy


async def test_an_address_with_another_base_url_than_the_hubs(hub: Hub):
    refused = await refused_by(hub, ADMIN_TOKEN, "servers", "/jupyter/hub/api")
    assert "JUPYTERHUB_API_URL" in refused.remedy


async def test_a_role_that_lacks_a_scope(hub: Hub):
    refused = await refused_by(hub, hub.user_token("bo"), "servers")
    assert "c.JupyterHub.load_roles" in refused.remedy
