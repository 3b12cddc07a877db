"""A site with settings of its own: they go on working beside ours."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.conftest import ADMIN_TOKEN, SIMPLE, Hub, running_hub, wait_for
from tests.hub.fake_broker import GRANT, SPAWNER_TOKEN
from tests.hub.test_refusals_of_the_hub import refused_by

SITE = """
c.Spawner.options_form = '<input name="image" value="plain">'
c.Spawner.options_from_form = lambda form: {"image": form.get("image", [""])[0]}
async def applied(spawner, user_options):
    spawner.environment = {**spawner.environment, "SITE_IMAGE": str(user_options.get("image"))}
c.Spawner.apply_user_options = applied
c.Spawner.environment = {
    **c.Spawner.environment,
    "LD_PRELOAD": "/site/lib.so",
    "GPUSHARE_LEASE": "forgotten",
    "CUDA_VISIBLE_DEVICES": "0",
}
c.Spawner.args = ["--site-argument"]
c.Spawner.notebook_dir = "/site"
c.Spawner.default_url = "/lab"
async def ended(spawner):
    with open("{folder}/post-stop", "a") as file:
        file.write(spawner.user.name + "\\n")
c.Spawner.post_stop_hook = ended
c.JupyterHub.allow_named_servers = False
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Hub]:
    with tempfile.TemporaryDirectory(prefix="gpushare-site-") as folder:
        extra = SITE.replace("{folder}", folder)
        with running_hub(SIMPLE, Path(folder), extra=extra) as hub:
            yield hub


@pytest.fixture
def hub(shared: Hub) -> Iterator[Hub]:
    shared.broker.reset()
    yield shared
    shared.stop_servers()


def test_our_library_stands_before_the_sites(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    env = hub.environment("ada")
    assert env["LD_PRELOAD"] == f"{GRANT['env']['LD_PRELOAD']}:/site/lib.so"
    assert (env["GPUSHARE_LEASE"], env["CUDA_VISIBLE_DEVICES"]) == ("abc-1", "GPU-1")


def test_a_server_without_gpu_has_the_sites_library_only(hub: Hub) -> None:
    hub.start_server("ada")
    env = hub.environment("ada")
    assert env["LD_PRELOAD"] == "/site/lib.so"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "GPUSHARE_LEASE" not in env


def test_the_form_of_the_site_and_ours_are_one(hub: Hub) -> None:
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada").text
        assert page.index('name="image"') < page.index('name="gpushare_size:vision"')
        answer = hub.submit_form(
            browser,
            "ada",
            {"image": "big", "gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "1/2"}'},
        )
        assert answer.status_code == 302
    hub.wait_ready("ada")
    env = hub.environment("ada")
    assert (env["SITE_IMAGE"], env["GPUSHARE_LEASE"]) == ("big", "abc-1")


def test_query_arguments_choose_a_size_too(hub: Hub) -> None:
    with hub.browser("ada") as browser:
        query = {
            "image": "small",
            "gpushare_project": "vision",
            "gpushare_size:vision": '{"fraction": "1/2"}',
        }
        browser.get("/hub/spawn/ada", params=query, follow_redirects=False)
    hub.wait_ready("ada")
    assert hub.broker.of("spawner/start")[0].body["options"]["fraction"] == "1/2"
    assert hub.environment("ada")["SITE_IMAGE"] == "small"


def test_nonsense_in_a_form_is_said_on_the_page(hub: Hub) -> None:
    with hub.browser("ada") as browser:
        fields = {"gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "<lots>"}'}
        page = hub.submit_form(browser, "ada", fields)
    assert page.status_code == 400
    assert "&lt;lots&gt;" in page.text
    assert "is not a GPU fraction" in page.text


def test_the_hook_of_the_site_runs_after_the_lease_was_given_back(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.stop_server("ada")
    wait_for(lambda: (hub.folder / "post-stop").exists(), "the hook of the site ran")
    assert hub.broker.of("spawner/stop")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the runner of a job hides its environment")
def test_a_job_gets_neither_arguments_nor_folders_of_the_notebook_server(hub: Hub) -> None:
    hub.broker.grant_job(grace_s=1.0)
    hub.start_server("ada")
    hub.wait_ready("ada")
    pid = hub.state("ada")["pid"]
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert b"jupyter_gpushare.job" in arguments
    assert b"--site-argument" not in arguments
    assert not {"JUPYTERHUB_ROOT_DIR", "JUPYTERHUB_DEFAULT_URL"} & set(hub.environment("ada"))
    hub.stop_server("ada")
    hub.broker.grant = None
    hub.start_server("ada")
    pid = hub.state("ada")["pid"]
    assert b"--site-argument" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_token_file_that_others_can_read_gives_no_gpu_and_tells_the_admin(hub: Hub) -> None:
    token = hub.folder / "spawner-token"
    token.chmod(0o644)
    try:
        refused = hub.start_server("ada", {"fraction": "1/2"})
        assert refused.status_code == 503
        assert str(token) not in refused.text
        assert f"chmod 600 {token}" in hub.log()
        wait_for(lambda: hub.broker.of("spawner/fault"), "the broker is told")
        told = hub.broker.of("spawner/fault")[0]
        assert f"chmod 600 {token}" in told.body["message"]
        assert SPAWNER_TOKEN not in (told.token, *told.body.values())
        assert hub.start_server("ada").status_code == 201
    finally:
        token.chmod(0o600)


def test_a_token_that_the_broker_refuses_gives_no_gpu_and_tells_the_admin(hub: Hub) -> None:
    hub.broker.token = "a-newer-token"
    refused = hub.start_server("ada", {"fraction": "1/2"})
    assert refused.status_code == 503
    assert "only the Hub's spawner" not in refused.text
    wait_for(lambda: hub.broker.of("spawner/fault"), "the broker is told")
    said = hub.broker.of("spawner/fault")[0].body["message"]
    assert said == f"the broker refuses the token in {hub.folder}/spawner-token: only the Hub's spawner"
    assert said in hub.log()
    assert hub.start_server("ada").status_code == 201


def test_a_release_that_the_broker_refuses_is_no_failed_start_in_the_log(hub: Hub) -> None:
    hub.start_server("ada", {"fraction": "1/2"})
    hub.wait_ready("ada")
    before = len(hub.log())
    hub.broker.token = "a-newer-token"
    hub.stop_server("ada")
    wait_for(lambda: "the broker refuses the token in" in hub.log()[before:], "the refusal is in the log")
    assert "cannot start" not in hub.log()[before:]


def test_a_token_that_the_broker_refuses_leaves_the_page_without_sizes_and_tells_the_admin(hub: Hub) -> None:
    hub.broker.token = "a-newer-token"
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada")
    assert "only the Hub's spawner" not in page.text
    wait_for(lambda: hub.broker.of("spawner/fault"), "the broker is told")


async def test_named_servers_that_are_off_are_a_refusal_with_its_remedy(hub: Hub) -> None:
    hub.ensure_user("ada")
    refused = await refused_by(hub, ADMIN_TOKEN, "start")
    assert "c.JupyterHub.allow_named_servers = True" in refused.remedy
    assert refused.not_now
