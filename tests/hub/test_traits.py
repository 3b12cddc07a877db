from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpushare import native
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.core.model import Kind
from jupyter_gpushare.errors import BrokerUnavailable
from jupyter_gpushare.hub import GPUShareSimpleSpawner, distinct
from jupyter_gpushare.hub import spawner as module
from jupyter_gpushare.hub.docker import GPUShareDockerSpawner
from jupyter_gpushare.hub.local import GPUShareLocalSpawner
from jupyter_gpushare.hub.systemd import GPUShareSystemdSpawner
from jupyter_gpushare.protocol.wire import TICKET_OPTION, JobSpec, SpawnGrant, decode


def configured(**traits: Any) -> GPUShareSimpleSpawner:
    return GPUShareSimpleSpawner(config=Config({"GPUShareMixin": traits}))


def asking(client: Any, monkeypatch: pytest.MonkeyPatch) -> GPUShareSimpleSpawner:
    """A spawner of ada's default server, with this connection to the broker."""
    spawner = configured()
    spawner.log = logging.getLogger("spawner")
    spawner.user = SimpleNamespace(created=None)
    monkeypatch.setattr(spawner, "_broker_client", lambda: client)
    monkeypatch.setattr(spawner, "_identity", lambda: ("ada", "", []))
    monkeypatch.setattr(spawner, "server_uid", lambda: 1000)
    return spawner


def client_of(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> BrokerClient:
    """A connection to a broker that is this function."""
    client = BrokerClient("http://broker/api/v1", "token", **options)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return client


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broker_url", "127.0.0.1:8003"),
        ("broker_url", "ftp://x/services/gpushare"),
        ("broker_url", "http:///services/gpushare"),
        ("broker_url", "http://127.0.0.1:8003/services/gpushare"),
        ("broker_url", "http+unix://api.sock/services/gpushare"),
        ("server_broker_url", "http://127.0.0.1:8003/services/gpushare"),
        ("broker_timeout_s", 0),
        ("broker_timeout_s", -1),
        ("broker_timeout_s", float("nan")),
        ("offers_timeout_s", 1e9),
        ("offers_timeout_s", "soon"),
    ],
)
def test_nonsense_in_the_configuration_is_refused_at_start(name: str, value: Any) -> None:
    with pytest.raises(TraitError, match=name):
        configured(**{name: value})


def test_the_address_may_end_with_a_slash() -> None:
    assert (
        configured(broker_url="https://h:1/services/gpushare/").broker_url == "https://h:1/services/gpushare"
    )


def test_jobs_run_with_the_hubs_python_by_default() -> None:
    assert configured().job_cmd == [sys.executable, "-X", "utf8", "-P", "-m", "jupyter_gpushare.job"]


def test_a_server_asks_for_the_right_to_submit_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.scope_definitions, module.JOBS_SCOPE, {"description": "x"})
    assert configured().server_token_scopes == [
        "users:activity!user",
        "access:servers!server",
        "access:services!service=gpushare",
        "custom:gpushare:jobs",
    ]


@pytest.mark.parametrize("hook", [None, {"image": "image"}])
def test_the_hub_warns_of_options_that_are_not_ours(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    spawner = configured()
    spawner.log, spawner.apply_user_options = logging.getLogger("spawner"), hook
    spawner.user = SimpleNamespace(name="ada")
    asyncio.run(spawner._run_apply_user_options({"gpushare": {"gpus": "1"}, TICKET_OPTION: "x"}))
    assert not caplog.records
    asyncio.run(spawner._run_apply_user_options({"gpushare": {"gpus": "1"}, "other": 1}))
    assert ["gpushare" in each.message.split("for")[0] for each in caplog.records] == [False]


def test_a_job_of_any_text_reaches_its_runner_in_ascii() -> None:
    spawner = distinct.sample(GPUShareSimpleSpawner, Config(), "")
    text = 'héllo "\N{ROCKET}" \x7f\n\\u00e9'
    job = JobSpec(id="a", attempt=1, name=text, command=[text], cwd=text, env={text: text}, grace_s=1.0)
    spawner.take_grant(SpawnGrant(lease="ja-1", kind=Kind.TRAIN, env={}, job=job))
    sent = spawner.get_env()["GPUSHARE_JOB"]
    assert sent.isascii()
    assert decode(sent.encode(), JobSpec) == job


def test_a_hub_without_that_scope_still_starts_servers() -> None:
    # The Hub fails a start that asks for a scope it does not know.
    assert module.JOBS_SCOPE not in configured().server_token_scopes


def test_a_server_without_a_gpu_names_the_lease_that_it_may_get_and_shows_no_device() -> None:
    spawner = distinct.sample(GPUShareSimpleSpawner, Config(), "")
    spawner.environment = {"LD_PRELOAD": "/opt/site.so", "CUDA_VISIBLE_DEVICES": "0"}
    assert spawner.may_gain()
    library = str(native.preload_path())
    named = {"GPUSHARE_LEASE": "b0123456789-1", "GPUSHARE_LEASE_DIR": "/run/x", "LD_PRELOAD": library}
    spawner.take_grant(SpawnGrant(lease=None, kind=Kind.BUILD, env=named))
    env = spawner.get_env()
    assert {name: env[name] for name in named} == named | {"LD_PRELOAD": f"{library}:/opt/site.so"}
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    spawner.take_grant(SpawnGrant(lease=None, kind=Kind.BUILD, env={}))
    env = spawner.get_env()
    assert (env["LD_PRELOAD"], env["CUDA_VISIBLE_DEVICES"]) == ("/opt/site.so", "")
    assert "GPUSHARE_LEASE" not in env


async def test_no_token_is_sent_over_https_without_the_brokers_own_certificate(tmp_path) -> None:
    token, pinned = tmp_path / "token", tmp_path / "api-certificate.pem"
    token.write_text("secret")
    token.chmod(0o600)
    url = "https://127.0.0.1:1/services/gpushare"
    traits = {"broker_url": url, "broker_token_file": str(token)}
    for said, certificate in [
        ("set c.GPUShareMixin.broker_certificate_file", ""),
        ("holds no certificate", str(pinned)),
    ]:
        pinned.write_text("")
        spawner = configured(**traits, broker_certificate_file=certificate)
        told: list[str] = []
        spawner._tell_administrator = told.append  # type: ignore[method-assign]
        with pytest.raises(BrokerUnavailable):
            spawner._broker_client()
        assert said in told[0]


def test_the_scopes_of_the_site_stand() -> None:
    spawner = GPUShareSimpleSpawner(config=Config({"Spawner": {"server_token_scopes": ["inherit"]}}))
    assert spawner.server_token_scopes == ["inherit"]


async def test_a_release_reaches_a_broker_that_restarts_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) == 1:
            raise httpx.ReadError("the broker ended")
        return httpx.Response(204)

    spawner = asking(client_of(answer), monkeypatch)
    monkeypatch.setattr(module, "_RELEASE_TIMEOUT_S", 30.0)
    await spawner._release()
    assert asked == ["/api/v1/spawner/stop"] * 2
    assert not spawner._lease_possible


@pytest.mark.parametrize(
    ("status", "reason", "state"),
    [
        (409, "devices_unknown", "unknown"),
        (429, "too_many", "unknown"),
        (507, "disk_full", "unknown"),
        (500, "error", "unknown"),
        (429, "queue_full", "refused"),
        (400, "invalid", "refused"),
        (403, "not_allowed", "refused"),
        (404, "unknown_project", "refused"),
    ],
)
async def test_only_a_refusal_that_lasts_ends_the_wait_of_a_page(monkeypatch, status, reason, state) -> None:
    answer = httpx.Response(status, json={"status": status, "reason": reason, "message": "no"})
    spawner = asking(client_of(lambda _: answer, timeout_s=0.2), monkeypatch)
    place = await spawner._place_in_queue(quote('{"gpus": 1}'))
    assert place.state == state
    assert (place.sentence == "no") == (state == "refused")


async def test_the_log_says_that_a_broker_did_not_answer_in_time(monkeypatch, caplog) -> None:
    class Silent:
        async def post(self, *_: object, **__: object) -> None:
            await asyncio.sleep(60)

    spawner = asking(Silent(), monkeypatch)
    monkeypatch.setattr(module, "_RELEASE_TIMEOUT_S", 0.01)
    await spawner._release()
    assert caplog.messages == ["user=ada server= release not delivered: no answer in time"]


def test_options_of_a_form_are_a_value_as_in_any_spawner() -> None:
    # JupyterHub's own tests compare the result without awaiting it.
    assert configured().run_options_from_form({"x": ["1"]}) == {"x": ["1"]}
    form = {"x": ["1"], "gpushare_project": ["vision"], "gpushare_size:vision": ['{"gpus": 1}']}
    assert configured().run_options_from_form(form) == {
        "x": ["1"],
        "gpushare": {"gpus": 1, "project": "vision"},
    }
    assert configured().options_from_query({"x": ["1"]}) == {"x": ["1"]}


async def test_options_of_a_form_are_awaitable_where_the_sites_function_is() -> None:
    async def from_form(form: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"image": form["image"][0]}

    spawner = GPUShareSimpleSpawner(options_from_form=from_form)
    form = {"image": ["big"], "gpushare_project": [""], "gpushare_size:": ['{"gpus": 1}']}
    assert await spawner.run_options_from_form(form) == {"image": "big", "gpushare": {"gpus": 1}}


@pytest.mark.parametrize(
    ("spawner", "settings", "expected"),
    [
        (GPUShareLocalSpawner, {}, True),
        (GPUShareSimpleSpawner, {}, True),
        (GPUShareSystemdSpawner, {}, True),
        (GPUShareSystemdSpawner, {"unit_extra_properties": {"CPUWeight": "50"}}, True),
        (GPUShareSystemdSpawner, {"isolate_devices": True}, False),
        (GPUShareSystemdSpawner, {"unit_extra_properties": {"DeviceAllow": "/dev/nvidia0 rw"}}, False),
        (GPUShareSystemdSpawner, {"unit_extra_properties": {"DevicePolicy": "closed"}}, False),
        (GPUShareDockerSpawner, {}, False),
    ],
)
def test_a_server_moves_only_where_it_can_open_every_gpu(spawner, settings, expected) -> None:
    assert distinct.sample(spawner, Config({"SystemdSpawner": settings}), "").sees_all_gpus() is expected
