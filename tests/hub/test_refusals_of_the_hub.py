"""What a real Hub answers to a broker that it refuses, and the remedy that the administrator reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.backends.hub import HubClient
from tests.hub.conftest import ADMIN_TOKEN, SIMPLE, Hub, running_hub

JOB = ServerKey("ada", "j0123456789-1")


async def _refused(hub: Hub, token: str, call: str) -> HubError:
    client = HubClient(f"{hub.url}/hub/api", token)
    try:
        with pytest.raises(HubError) as refused:
            await (client.servers() if call == "servers" else client.start_server(JOB, "train", "7.mac"))
    finally:
        await client.close()
    return refused.value


@pytest.mark.parametrize("call", ["servers", "start"])
async def test_a_token_that_the_hub_does_not_know(hub: Hub, call):
    refused = await _refused(hub, "unknown", call)
    assert "JUPYTERHUB_API_TOKEN" in refused.remedy


async def test_a_role_that_lacks_a_scope(hub: Hub):
    refused = await _refused(hub, hub.user_token("bo"), "servers")
    assert "c.JupyterHub.load_roles" in refused.remedy


@pytest.fixture(scope="module")
def hub_without_named_servers(tmp_path_factory) -> Iterator[Hub]:
    folder = Path(tmp_path_factory.mktemp("hub"))
    with running_hub(SIMPLE, folder, extra="\nc.JupyterHub.allow_named_servers = False\n") as hub:
        yield hub


async def test_named_servers_that_are_off(hub_without_named_servers: Hub):
    hub_without_named_servers.ensure_user("ada")
    refused = await _refused(hub_without_named_servers, ADMIN_TOKEN, "start")
    assert "c.JupyterHub.allow_named_servers = True" in refused.remedy
    assert refused.not_now
