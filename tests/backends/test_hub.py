"""`HubClient` against a Hub that answers what a test told it to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tornado import httpserver, web
from tornado.testing import bind_unused_port

from jupyter_gpushare.backends.base import HubError, HubServer, HubUser, ServerKey
from jupyter_gpushare.backends.hub import HubClient, _remedy

JOB = ServerKey("bo", "jabcdefghij-1")
TICKET = {"gpushare_start": "7.mac"}


class FakeHub:
    client: HubClient

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.status = 201
        self.body: Any = {}
        self.version = "6.1.1"
        self.users: list[dict[str, Any]] | None = None
        self.statuses: list[int] = []
        self.state = "active"  # of the users in the list
        self.page_max = 200  # its `api_page_max_limit`


class _Any(web.RequestHandler):
    def initialize(self, hub: FakeHub) -> None:
        self.hub = hub

    def on_finish(self) -> None:
        self.hub.statuses.append(self.get_status())

    def prepare(self) -> None:
        self.set_header("X-JupyterHub-Version", self.hub.version)
        assert self.request.headers["Authorization"] == "token secret"
        body = json.loads(self.request.body) if self.request.body else None
        self.hub.asked.append((self.request.method or "", self.request.path, body))
        if self.hub.users is not None:
            offset = int(self.get_argument("offset"))
            limit = min(int(self.get_argument("limit")), self.hub.page_max)
            assert self.get_argument("state") == self.hub.state
            assert self.request.headers["Accept"] == "application/jupyterhub-pagination+json"
            # As `paginated_model` of jupyterhub/apihandlers/base.py.
            end, total = offset + limit, len(self.hub.users)
            follows = {"offset": end, "limit": limit, "url": "http://hub/"} if end < total else None
            pagination = {"offset": offset, "limit": limit, "total": total, "next": follows}
            self.finish(json.dumps({"items": self.hub.users[offset:end], "_pagination": pagination}))
            return
        self.set_status(self.hub.status)
        body = self.hub.body
        if self.hub.status == 204:
            self.finish()
        else:
            self.finish(body if isinstance(body, (bytes, str)) else json.dumps(body))


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    fake = FakeHub()
    socket, port = bind_unused_port()
    application = web.Application([(".*", _Any, {"hub": fake})], log_function=lambda _: None)
    server = httpserver.HTTPServer(application)
    server.add_socket(socket)
    fake.client = HubClient(f"http://127.0.0.1:{port}/hub/api", "secret")
    yield fake
    await fake.client.close()
    server.stop()
    await server.close_all_connections()


@pytest.mark.parametrize("status", [201, 202])
async def test_a_server_is_started_by_its_name(hub, status):
    hub.status = status
    await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")
    assert hub.asked == [("POST", "/hub/api/users/bo/servers/jabcdefghij-1", {"gpushare_start": "7.mac"})]


@pytest.mark.parametrize(
    ("version", "body"),
    [
        ("6.1.1", {"display_name": "train.py (job abcdefghij)", "user_options": TICKET}),
        ("10.0", {"display_name": "train.py (job abcdefghij)", "user_options": TICKET}),
        ("5.5.0", TICKET),  # it would take the name for an option of the spawner
        ("", TICKET),
    ],
)
async def test_a_hub_gets_the_ticket_of_a_start_and_the_name_where_it_shows_it(hub, version, body):
    hub.version, hub.status = version, 202
    await hub.client.stop_server(JOB)
    await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")
    assert hub.asked[-1] == ("POST", "/hub/api/users/bo/servers/jabcdefghij-1", body)


async def test_starting_what_runs_already_is_done(hub):
    hub.status, hub.body = 400, {"status": 400, "message": "bo:jabcdefghij-1 is already running"}
    await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")


async def test_a_user_with_all_the_servers_that_the_hub_allows_waits(hub):
    said = "User bo already has the maximum of 3 named servers."
    hub.status, hub.body = 400, {"status": 400, "message": said}
    with pytest.raises(HubError, match="maximum of 3") as refused:
        await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")
    assert (refused.value.unknown_user, refused.value.not_now) == (False, True)


@pytest.mark.parametrize(
    ("status", "unknown_user", "not_now"),
    [
        (404, True, False),  # there is no such user
        (400, False, False),
        (500, False, False),  # this server did not come up
        (401, False, True),
        (403, False, True),
        (429, False, True),
        (503, False, True),
    ],
)
async def test_a_refused_start_says_why_and_whether_to_ask_again(hub, status, unknown_user, not_now):
    hub.status, hub.body = status, {"status": status, "message": "because"}
    with pytest.raises(HubError, match="because") as refused:
        await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")
    assert (refused.value.unknown_user, refused.value.not_now) == (unknown_user, not_now)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b"null"])
async def test_an_answer_that_says_nothing_is_told_by_its_status(hub, body):
    hub.status, hub.body = 500, body
    with pytest.raises(HubError, match="status 500"):
        await hub.client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")


@pytest.mark.parametrize("status", [202, 204, 404])
async def test_a_server_is_stopped_and_forgotten_however_often(hub, status):
    hub.status, hub.body = status, ""
    await hub.client.stop_server(JOB)
    assert hub.asked == [("DELETE", "/hub/api/users/bo/servers/jabcdefghij-1", {"remove": True})]


async def test_a_stop_that_the_hub_cannot_do_now_is_an_error(hub):
    hub.status, hub.body = 400, {"message": "is pending spawn"}
    with pytest.raises(HubError, match="pending spawn"):
        await hub.client.stop_server(JOB)


async def test_names_cannot_leave_their_place_in_the_path(hub):
    await hub.client.start_server(ServerKey("../admin?x=/é", "a/b"), "train.py (job abcdefghij)", "7.mac")
    assert hub.asked[0][1] == "/hub/api/users/..%2Fadmin%3Fx%3D%2F%C3%A9/servers/a%2Fb"


async def test_servers_are_read_page_by_page_without_the_stopped_ones(hub):
    def server(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "ready": True, "pending": None, "stopped": False} | more

    used = {"last_activity": "2031-05-06T07:08:09.100000Z", "started": "2031-05-06T01:00:00Z"}
    hub.users = [{"name": f"u{n}", "groups": [], "servers": {"": server("")}} for n in range(401)]
    hub.users[7]["servers"][""] |= used
    hub.users[400]["servers"] = {
        "": server("", stopped=True),
        "starting": server("starting", ready=False, pending="spawn"),
    }
    found = await hub.client.servers()
    assert len(hub.asked) == 3
    assert found.keys() == {ServerKey(f"u{n}", "") for n in range(400)} | {ServerKey("u400", "starting")}
    seven = found[ServerKey("u7", "")]
    assert seven == HubServer("2031-05-06T07:08:09.100000Z", "2031-05-06T01:00:00.000000Z")
    assert found[ServerKey("u400", "starting")] == HubServer()


async def test_a_list_that_did_not_change_is_answered_304_and_is_the_same(hub):
    hub.users = [{"name": "bo", "servers": {"": {"name": "", "ready": True}}}]
    before = await hub.client.servers()
    assert await hub.client.servers() == before
    assert hub.statuses == [200, 304]  # which the Hub logs for debugging only
    hub.users = []
    assert await hub.client.servers() == {}
    assert hub.statuses == [200, 304, 200]


async def test_one_server_is_asked_for_by_its_user(hub):
    servers = {"": {"name": ""}, "over": {"name": "over", "stopped": True}}
    hub.status, hub.body = 200, {"name": "bo", "groups": [], "servers": servers}
    assert await hub.client.has_server(ServerKey("bo", ""))
    assert not await hub.client.has_server(ServerKey("bo", "over"))
    assert not await hub.client.has_server(ServerKey("bo", "none"))
    hub.status = 500
    with pytest.raises(HubError):
        await hub.client.has_server(ServerKey("bo", ""))


async def test_a_list_that_cannot_be_read_is_an_error_not_an_empty_list(hub):
    hub.status, hub.body = 403, {"message": "no"}
    with pytest.raises(HubError, match="did not list"):
        await hub.client.servers()


async def test_a_list_that_makes_no_sense_is_an_error_of_the_hub(hub):
    hub.status, hub.body = 200, b"<html>a proxy's page</html>"
    with pytest.raises(HubError, match="not understood"):
        await hub.client.servers()
    with pytest.raises(HubError, match="not understood"):
        await hub.client.user("bo")


@pytest.mark.parametrize(
    ("said", "created"),
    [
        ("2026-11-22T03:05:09.123456Z", "2026-11-22T03:05:09.123456Z"),
        ("2026-11-22T03:05:09.120Z", "2026-11-22T03:05:09.120000Z"),
        ("2026-11-22T03:05:09", "2026-11-22T03:05:09.000000Z"),
        ("2026-11-22T04:05:09.123456+01:00", "2026-11-22T03:05:09.123456Z"),
        (None, ""),
    ],
)
async def test_a_user_has_groups_and_the_moment_at_which_the_hub_made_it(hub, said, created):
    hub.status, hub.body = 200, {"name": "bo", "created": said, "groups": ["nlp", "x"], "servers": {}}
    assert await hub.client.user("bo") == HubUser("bo", created, ("nlp", "x"))
    hub.status = 404
    assert await hub.client.user("bo") is None
    hub.status = 500
    with pytest.raises(HubError):
        await hub.client.user("bo")
    hub.status, hub.body = 200, {"name": "bo", "created": "last week"}
    with pytest.raises(HubError, match="not understood"):
        await hub.client.user("bo")


@pytest.mark.parametrize(("page_max", "pages"), [(200, 3), (50, 9)])
async def test_all_users_are_read_page_by_page(hub, page_max, pages):
    hub.state, hub.page_max = "", page_max
    hub.users = [{"name": f"u{n}", "created": "2026-11-22T03:05:09.123456Z"} for n in range(401)]
    users = await hub.client.users()
    assert [user.name for user in users] == [f"u{n}" for n in range(401)]
    assert [user.name for user in await hub.client.users()] == [user.name for user in users]
    assert hub.statuses == [*[200] * pages, *[304] * pages]


async def test_where_a_server_is_reached_is_what_the_hub_says(hub):
    here = {"name": "", "url": "/user/bo/", "full_url": None}
    there = {"name": "b", "url": "/user/bo/b/", "full_url": "https://bo.hub.test/user/bo/b/"}
    hub.status, hub.body = 200, {"name": "bo", "groups": [], "servers": {"": here, "b": there}}
    assert await hub.client.server_url(ServerKey("bo", "")) == "/user/bo/"
    assert await hub.client.server_url(ServerKey("bo", "b")) == "https://bo.hub.test/user/bo/b/"
    assert await hub.client.server_url(ServerKey("bo", "c")) == ""
    hub.status = 404
    assert await hub.client.server_url(ServerKey("bo", "")) == ""


async def test_a_hub_that_is_not_there_is_an_error_that_passes():
    client = HubClient("http://127.0.0.1:1/hub/api", "secret")
    with pytest.raises(HubError, match="does not answer") as failed:
        await client.start_server(JOB, "train.py (job abcdefghij)", "7.mac")
    assert not failed.value.unknown_user
    await client.close()


def test_only_a_refused_token_of_the_broker_is_told_to_be_exchanged():
    assert "JUPYTERHUB_API_TOKEN" in _remedy(403, "Missing or invalid credentials.")
    assert "JUPYTERHUB_API_TOKEN" in _remedy(401, "Unauthorized")
    assert _remedy(403, "only the Hub's spawner may ask this") == ""


async def test_services_are_named_with_the_commands_that_the_hub_runs(hub):
    hub.status = 200
    # As `service_model` of jupyterhub/apihandlers/base.py: an external service has an empty list.
    hub.body = {
        "cull": {"kind": "service", "name": "cull", "command": ["python3", "-m", "jupyterhub_idle_culler"]},
        "gpushare": {"kind": "service", "name": "gpushare", "command": [], "pid": 0},
        "named": {"kind": "service", "name": "named"},
    }
    found = await hub.client.services()
    assert found["cull"] == ["python3", "-m", "jupyterhub_idle_culler"]
    assert not found["gpushare"]
    assert "named" not in found
    hub.status, hub.body = 403, {"message": "Action is not authorized with current scopes"}
    with pytest.raises(HubError):
        await hub.client.services()
