"""The client of the Kubernetes API against an API server of the tests' own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import PAGE, ApiClient, Expired, WatchEvent, backoff_s
from jupyter_gpushare.kube.cluster.objects import POD_GROUPS, PODS, QUEUES, Pod
from jupyter_gpushare.kube.cluster.reflector import Reflector
from jupyter_gpushare.kube.cluster.seats import followed_nodes
from jupyter_gpushare.kube.rules.pools import LABEL
from jupyter_gpushare.kube.rules.seats import Request
from tests.json_server import Answer, JsonServer
from tests.json_server import Request as Received
from tests.kube.apiserver import ApiServer, api_server
from tests.kube.rbac import Ask, Rights
from tests.ports import free_ports
from tests.waiting import becomes

NS = "gpushare"


def pod(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": more}, "spec": {"terminationGracePeriodSeconds": 180}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as found:
        yield found


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[ApiClient]:
    found = ApiClient(Address(url=server.url))
    yield found
    await found.close()


SEAT = f"seat-{'0a' * 16}"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (f"Pod gpushare/j was preempted by workload gpushare/{SEAT}.\nnlp uses <1 GPU>", SEAT),
        (f"Pod gpushare/j was preempted by higher priority workload gpushare/{SEAT}", SEAT),
        ("Pod gpushare/j was preempted and rescheduled due to bin packing", ""),
        (f"Pod ml/{SEAT} was preempted by workload ml/train.", ""),
        ("", ""),
    ],
)
def test_an_eviction_names_the_seat_that_it_is_for(said: str, name: str):
    """As KAI-Scheduler v0.16.8 writes it, ``pkg/scheduler/api/unschedule_info.go:117-135``."""
    other = {"type": "PodScheduled", "status": "True"}
    for status, found in (("True", name), ("False", "")):
        condition = {"type": "DisruptionTarget", "status": status, "message": said}
        body = pod("j") | {"status": {"phase": "Running", "conditions": [other, condition]}}
        assert msgspec.convert(body, Pod).evicted_for == found


@pytest.mark.parametrize(
    ("annotations", "limits", "requested"),
    [
        ({"gpu-fraction": "0.333"}, {"memory": "64Mi"}, Request(fraction_milli=333)),
        ({"gpu-memory": "20480"}, {}, Request(memory_mib=20480)),
        ({}, {"nvidia.com/gpu": "2"}, Request(gpus=2)),
        ({}, {"memory": "64Mi"}, None),
        ({"gpu-fraction": "half"}, {}, None),
        ({"gpu-fraction": "nan"}, {}, None),
        ({"gpu-fraction": "1e999"}, {}, None),
        ({}, {"nvidia.com/gpu": "2k"}, None),
    ],
)
def test_what_a_seat_asks_for_is_read_from_its_pod(
    annotations: dict[str, str], limits: dict[str, str], requested: Request | None
):
    spec = {"containers": [{"name": "seat", "resources": {"limits": limits}}]}
    found = msgspec.convert({"metadata": {"name": "s", "annotations": annotations}, "spec": spec}, Pod)
    assert found.requested == requested


class TestObjects:
    async def test_objects_are_created_listed_patched_and_deleted(self, server: ApiServer, client: ApiClient):
        created = await client.create(PODS, NS, pod("one", app="x"))
        assert (created.metadata.name, created.status.phase) == ("one", "Pending")
        await client.create(PODS, NS, pod("two"))
        assert [p.metadata.name for p in (await client.list(PODS, NS)).items] == ["one", "two"]
        assert [p.metadata.name for p in (await client.list(PODS, NS, "app=x")).items] == ["one"]
        patched = await client.patch(PODS, NS, "one", {"metadata": {"labels": {"app": None, "b": "c"}}})
        assert patched.metadata.labels == {"b": "c"}
        assert await client.delete(PODS, NS, "one")
        assert not await client.delete(PODS, NS, "one")

    async def test_a_bound_pod_is_deleted_with_its_grace(self, server: ApiServer, client: ApiClient):
        await client.create(PODS, NS, pod("one"))
        server.store.bind(NS, "one", "n0")
        assert await client.delete(PODS, NS, "one")
        (leaving,) = (await client.list(PODS, NS)).items
        assert leaving.metadata.deletion_timestamp
        server.store.delete("pods", NS, "one", grace_s=0)
        assert (await client.list(PODS, NS)).items == []

    async def test_a_later_version_is_not_deleted(self, client: ApiClient):
        first = await client.create(PODS, NS, pod("one"))
        second = await client.patch(PODS, NS, "one", {"spec": {"nodeName": "n0"}})
        with pytest.raises(KubeError) as found:
            await client.delete(PODS, NS, "one", version=first.metadata.resource_version)
        assert found.value.status == 409
        assert await client.delete(PODS, NS, "one", version=second.metadata.resource_version)

    async def test_a_long_list_comes_in_pages(self, server: ApiServer, client: ApiClient):
        for n in range(PAGE + 3):
            server.store.create("pods", NS, pod(f"p{n}"))
        listing = await client.list(PODS, NS)
        assert (len(listing.items), listing.version) == (PAGE + 3, str(server.store.version))

    async def test_a_list_that_expires_between_pages_begins_again(self, server: ApiServer, client: ApiClient):
        for n in range(PAGE + 1):
            server.store.create("pods", NS, pod(f"p{n}"))
        list_page = client._send
        pages = 0

        async def compacting(*args: Any, **options: Any) -> Any:
            nonlocal pages
            pages += 1
            answer = await list_page(*args, **options)
            if pages == 1:
                server.store.create("pods", NS, pod("late"))
                server.store.compact()
            return answer

        client._send = compacting  # type: ignore[method-assign]
        assert len((await client.list(PODS, NS)).items) == PAGE + 2
        assert pages == 4

    async def test_refusals_say_what_the_api_server_said(self, client: ApiClient):
        await client.create(PODS, NS, pod("one"))
        with pytest.raises(KubeError, match="already exists") as found:
            await client.create(PODS, NS, pod("one"))
        assert found.value.status == 409
        with pytest.raises(KubeError, match='"two" not found') as found:
            await client.patch(PODS, NS, "two", {})
        assert found.value.status == 404

    async def test_a_patch_of_an_older_version_is_refused(self, client: ApiClient):
        old = await client.create(PODS, NS, pod("one"))
        await client.patch(PODS, NS, "one", {"spec": {"nodeName": "n0"}})
        version = {"resourceVersion": old.metadata.resource_version}
        with pytest.raises(KubeError, match="has been modified") as found:
            await client.patch(PODS, NS, "one", {"metadata": version, "spec": {"nodeName": "n1"}})
        assert found.value.status == 409


class TestFaults:
    @pytest.mark.parametrize("status", [429, 500, 503])
    async def test_a_busy_api_server_is_asked_again(self, server: ApiServer, client: ApiClient, status: int):
        server.faults.answers = [(status, {})] * 3
        await client.create(PODS, NS, pod("one"))
        assert [method for method, _ in server.requests] == ["POST"] * 4

    async def test_retry_after_is_obeyed(self, server: ApiServer):
        waited: list[float] = []

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        client = ApiClient(Address(url=server.url), sleep=sleep)
        server.faults.answers = [(429, {"Retry-After": "7"}), (429, {"Retry-After": "soon"})]
        await client.list(PODS, NS)
        await client.close()
        assert waited[0] == 7
        assert 0 < waited[1] < 1

    async def test_a_request_ends_at_its_deadline(self, server: ApiServer):
        now = 0.0

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        client = ApiClient(Address(url=server.url), sleep=sleep, clock=lambda: now)
        server.faults.answers = [(429, {})] * 1000
        with pytest.raises(KubeError) as found:
            await client.list(PODS, NS)
        assert found.value.status == 429
        assert 5 < now <= 10
        server.faults.answers = [(429, {"Retry-After": "60"})]
        with pytest.raises(KubeError):
            await client.list(PODS, NS)
        assert now <= 10
        await client.close()

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_no_request_goes_where_an_answer_sends_it(self, status: int):
        port, other = free_ports(), free_ports()
        seen: list[str] = []

        def answer(request: Received) -> Answer:
            seen.append(request.path)
            return status, None, {"Location": f"http://127.0.0.1:{other}/elsewhere"}

        servers = [JsonServer(each, answer) for each in (port, other)]
        client = ApiClient(Address(url=f"http://127.0.0.1:{port}", token="secret"))
        with pytest.raises(KubeError, match=f"status {status}"):
            await client.delete(PODS, NS, "one")
        await client.close()
        for each in servers:
            each.close()
        assert seen == ["/api/v1/namespaces/gpushare/pods/one"]

    async def test_proxies_and_passwords_of_the_environment_are_not_used(
        self, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "netrc").write_text("default login ada password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        client = ApiClient(Address(url=server.url, token="token"))
        assert (await client.list(PODS, NS)).items == []
        await client.close()

    async def test_no_answer_has_no_status(self):
        client = ApiClient(Address(url="http://127.0.0.1:1"), deadline_s=0.3)
        with pytest.raises(KubeError, match="does not answer") as found:
            await client.list(PODS, NS)
        assert found.value.status == 0
        await client.close()

    async def test_a_lost_answer_is_no_second_object(self, server: ApiServer, client: ApiClient):
        server.faults.lose_answers = 1
        created = await client.create(PODS, NS, pod("one"))
        assert created.metadata.uid == server.store.get("pods", NS, "one")["metadata"]["uid"]
        assert len(list(server.store.all("pods"))) == 1

    async def test_answers_that_are_no_objects(self, server: ApiServer, client: ApiClient):
        server.faults.answers = [(200, {})]
        with pytest.raises(KubeError, match="not understood"):
            await client.list(PODS, NS)
        with pytest.raises(KubeError, match="could not find"):
            await client.list(type(PODS)("", "v9", "pods", Pod), NS)

    def test_delays_double_and_are_bounded(self):
        for tries in range(30):
            whole = min(5.0, 0.1 * 2.0**tries)
            assert whole / 2 <= backoff_s(tries) <= whole
        assert len({backoff_s(5) for _ in range(20)}) > 10


class TestRights:
    @pytest.fixture
    async def server(self) -> AsyncIterator[ApiServer]:
        here = [(verb, "", "pods") for verb in ("get", "list", "watch", "create")]
        everywhere = [("list", "scheduling.run.ai", "queues")]
        async with api_server(Rights.granting(here, everywhere, NS)) as found:
            yield found

    @pytest.fixture
    def token(self, tmp_path: Path) -> Path:
        path = tmp_path / "token"
        path.write_text("t\n")
        return path

    @pytest.fixture
    async def client(self, server: ApiServer, token: Path) -> AsyncIterator[ApiClient]:
        found = ApiClient(Address(url=server.url, token_file=token))
        yield found
        await found.close()

    async def test_only_what_a_manifest_allows(self, server: ApiServer, client: ApiClient):
        await client.create(PODS, NS, pod("one"))
        assert (await client.list(QUEUES)).items == []
        for refused in (
            client.delete(PODS, NS, "one"),
            client.list(PODS, "other"),
            client.list(POD_GROUPS, NS),
        ):
            with pytest.raises(KubeError, match="cannot") as found:
                await refused
            assert found.value.status == 403
        assert server.rights is not None
        assert server.rights.asked == {
            Ask("create", "", "pods", NS),
            Ask("list", "scheduling.run.ai", "queues", ""),
        }

    async def test_a_token_that_rotates_is_read_again(
        self, server: ApiServer, client: ApiClient, token: Path
    ):
        await client.list(PODS, NS)
        assert server.rights is not None
        server.rights.tokens = {"second": (NS, "broker")}
        token.write_text("second")
        await client.list(PODS, NS)
        server.rights.tokens = {"third": (NS, "broker")}
        with pytest.raises(KubeError) as found:
            await client.list(PODS, NS)
        assert found.value.status == 401
        with pytest.raises(KubeError):
            await anext(client.watch(PODS, "0", namespace=NS))
        token.write_text("third")
        assert await anext(client.watch(PODS, "0", namespace=NS)) is None

    async def test_a_token_that_cannot_be_read(self, client: ApiClient, token: Path):
        token.unlink()
        with pytest.raises(KubeError, match=r"the token file .* cannot be read: No such file"):
            await client.list(PODS, NS)

    def test_where_the_api_server_is(self, tmp_path: Path):
        environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
        with pytest.raises(KubeError, match="no pod"):
            Address.of_pod(environ, tmp_path)
        (tmp_path / "token").touch()
        found = Address.of_pod(environ, tmp_path)
        assert (found.url, found.ca_file) == ("https://[fd00::1]:443", tmp_path / "ca.crt")
        with pytest.raises(KubeError):
            Address.of_pod({}, tmp_path)


class TestWatch:
    async def test_changes_since_a_version_are_yielded(self, server: ApiServer, client: ApiClient):
        await client.create(PODS, NS, pod("before"))
        version = (await client.list(PODS, NS)).version
        await client.create(PODS, NS, pod("one"))
        watch = client.watch(PODS, version, namespace=NS, duration_s=60)
        assert await anext(watch) is None

        async def next_event() -> tuple[str, str]:
            event = await anext(watch)
            assert isinstance(event, WatchEvent)
            assert event.object is not None
            return event.type, event.object.metadata.name

        assert await next_event() == ("ADDED", "one")
        await client.patch(PODS, NS, "one", {"spec": {"nodeName": "n0"}})
        assert await next_event() == ("MODIFIED", "one")
        server.store.create("pods", "elsewhere", pod("other"))
        await client.delete(PODS, NS, "before")
        assert await next_event() == ("DELETED", "before")

    async def test_all_events_come_before_the_bookmark(self, server: ApiServer, client: ApiClient):
        server.store.create("pods", NS, pod("one"))
        server.store.create("queues", "", {"metadata": {"name": "q"}})
        begun, added, bookmark = [e async for e in client.watch(PODS, "0", namespace=NS, duration_s=0)]
        assert (begun, bookmark) == (None, WatchEvent("BOOKMARK", "2", None))
        assert added is not None
        assert added.type == "ADDED"

    async def test_a_compacted_version_is_expired(self, server: ApiServer, client: ApiClient):
        await client.create(PODS, NS, pod("one"))
        server.store.compact()
        with pytest.raises(Expired):
            await anext(client.watch(PODS, "0", namespace=NS))

    async def test_a_cut_watch_is_an_error(self, server: ApiServer, client: ApiClient):
        watch = client.watch(PODS, "0", namespace=NS, duration_s=60)
        assert await anext(watch) is None
        server.cut_watches()
        with pytest.raises(KubeError, match="cut"):
            await anext(watch)

    async def test_an_event_that_is_too_long_is_an_error(self, server: ApiServer, client: ApiClient):
        watch = client.watch(PODS, "0", namespace=NS, duration_s=60)
        assert await anext(watch) is None
        long = {"name": "one", "annotations": {"a": "x" * (5 << 20)}}
        server.store.create("pods", NS, {"metadata": long, "spec": {}})
        with pytest.raises(KubeError, match="cut"):
            await anext(watch)


class TestReflector:
    @pytest.fixture
    async def copy(self, client: ApiClient) -> AsyncIterator[Reflector[Pod]]:
        found = Reflector(client, PODS, namespace=NS, selector="app=x")
        task = asyncio.create_task(found.run())
        yield found
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_a_copy_follows_the_collection(self, server: ApiServer, copy: Reflector[Pod]):
        server.store.create("pods", NS, pod("one", app="x"))
        server.store.create("pods", NS, pod("not ours"))
        await becomes(lambda: set(copy.objects) == {"one"})
        server.store.bind(NS, "one", "n0")
        await becomes(lambda: copy.objects["one"].spec.node_name == "n0")
        server.store.delete("pods", NS, "one", grace_s=0)
        await becomes(lambda: not copy.objects)

    async def test_a_copy_survives_cut_watches_and_compaction(self, server: ApiServer, copy: Reflector[Pod]):
        for n in range(5):
            server.store.create("pods", NS, pod(f"p{n}", app="x"))
            await becomes(lambda n=n: f"p{n}" in copy.objects)
            server.store.create("pods", NS, pod(f"q{n}"))
            server.cut_watches()
            server.store.delete("pods", NS, f"p{n}")
            server.store.compact()
            await becomes(lambda: not copy.objects)

    async def test_an_event_that_cannot_be_read_does_not_stop_a_copy(
        self, server: ApiServer, copy: Reflector[Pod]
    ):
        server.store.create("pods", NS, pod("one", app="x"))
        await becomes(lambda: "one" in copy.objects)
        long = {"name": "two", "labels": {"app": "x"}, "annotations": {"a": "x" * (5 << 20)}}
        server.store.create("pods", NS, {"metadata": long, "spec": {}})
        await becomes(lambda: "two" in copy.objects)

    async def test_news_grow_old_only_while_the_api_server_is_silent(
        self, server: ApiServer, copy: Reflector[Pod]
    ):
        await becomes(lambda: copy.age_s(time.monotonic()) < 10)
        server.faults.frozen.clear()
        silent_since = time.monotonic()
        await becomes(lambda: copy.age_s(time.monotonic()) > 6)
        assert copy.confirmed_at < silent_since + 5
        server.faults.frozen.set()
        await becomes(lambda: copy.age_s(time.monotonic()) < 1)

    async def test_an_own_answer_counts_before_the_watch_tells_it(self, client: ApiClient):
        calls: list[int] = []
        copy = Reflector(client, PODS, namespace=NS, changed=lambda: calls.append(1))
        await client.create(PODS, NS, pod("one"))
        old = (await client.list(PODS, NS)).items[0]
        new = await client.patch(PODS, NS, "one", {"spec": {"nodeName": "n0"}})
        copy.put(new)
        copy.put(old)
        assert copy.objects == {"one": new}
        assert calls == [1]

    async def test_what_we_do_not_use_of_a_node_is_no_news(self, server: ApiServer, client: ApiClient):
        calls: list[str] = []
        nodes = followed_nodes(client, lambda: calls.append("n0"))
        server.store.create("nodes", "", {"metadata": {"name": "n0"}})
        task = asyncio.create_task(nodes.run())
        await becomes(lambda: calls == ["n0"])
        heartbeat = {"status": {"nodeInfo": {"bootID": "1"}}}
        version = server.store.patch("nodes", "", "n0", heartbeat, part="status")["metadata"][
            "resourceVersion"
        ]
        await becomes(lambda: nodes.objects["n0"].metadata.resource_version == version)
        assert calls == ["n0"]
        server.store.patch("nodes", "", "n0", {"metadata": {"labels": {LABEL: "2"}}})
        await becomes(lambda: calls == ["n0", "n0"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
