"""A broker that answers 404 to the Hub's spawner: a fault of the site, which its users cannot mend."""

from __future__ import annotations

from tests.hub.conftest import Hub, wait_for

ELSEWHERE = "/jupyter/services/gpushare/api/v1/"


def test_a_broker_with_other_paths_is_a_fault_that_the_administrator_reads(hub: Hub) -> None:
    hub.broker.prefix = ELSEWHERE
    refused = hub.start_server("ada", {"fraction": "1/2"})
    assert refused.status_code == 503
    assert "is not set up correctly" in refused.json()["message"]
    with hub.browser("ada") as browser:
        page = browser.get("/hub/spawn/ada").text
    assert "is not set up correctly" in page
    assert "openapi" not in refused.text + page
    for path in ("start", "offers"):
        said = f"no GPU broker of this version answers at {hub.broker.url}/services/gpushare/api/v1 (404 for "
        assert (
            f"{said}/services/gpushare/api/v1/spawner/{path}): write c.GPUShareMixin.broker_url" in hub.log()
        )
    assert hub.start_server("ada").status_code == 201


def test_a_hub_that_starts_says_that_its_broker_has_other_paths(hub: Hub) -> None:
    hub.broker.prefix = ELSEWHERE
    hub.stop()
    before = len(hub.log())
    hub.start()
    wait_for(
        lambda: "servers with GPUs cannot start: no GPU broker" in hub.log()[before:], "the Hub has asked"
    )
