"""Two Hubs on one machine (docs/operations.md): each with a broker, a helper and GPUs of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.site import CLI, Site, running
from tests.ports import free_ports
from tests.waiting import until

pytestmark = pytest.mark.long


@pytest.fixture
def sites() -> Iterator[tuple[Site, Site]]:
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            site = stack.enter_context(running(Site))
            site.hub.start_server("ada", {"fraction": "1"})
            site.hub.wait_ready("ada")
            made.append(site)
        yield made[0], made[1]


def lease_of(site: Site) -> str:
    (lease,) = site.answer("GET", "status", "ada")["leases"]
    return f"{lease['id']} {lease['state']}"


def devices_of(site: Site) -> set[str]:
    return {device["uuid"] for device in site.answer("GET", "devices", "ada")["devices"]}


def test_each_hub_gives_its_own_gpus_and_outlives_the_other(sites: tuple[Site, Site]) -> None:
    one, two = sites
    assert len(devices_of(one)) == len(devices_of(two)) == 2
    held = lease_of(one), lease_of(two)
    assert held[0] != held[1]
    processes = one.processes_of(held[0].split()[0] + "-1")
    assert processes
    for service in two.services.values():
        service.kill()
    two.hub.stop()
    assert one.is_healthy()
    assert lease_of(one) == held[0]
    assert one.processes_of(held[0].split()[0] + "-1") == processes


def test_a_second_broker_on_the_same_helper_takes_it_and_the_first_ends_for_good(
    sites: tuple[Site, Site],
) -> None:
    one, two = sites
    before = lease_of(one)
    # Of the second site: another database and socket, the same helper.
    second = subprocess.Popen(
        [
            *CLI,
            *("broker", "--config", str(two.folder / "broker.py")),
            *("--state-dir", str(two.folder / "third")),
            f"--GPUShareBroker.api_socket={two.folder / 'third.sock'}",
            f"--GPUShareBroker.helper_socket={one.folder / 'broker/helper.sock'}",
        ],
        env=two.services["broker"].env | {"JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{free_ports()}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = one.services["broker"].process
        assert first is not None
        until(lambda: first.poll() is not None or second.poll() is not None, "one of the two ends")
        assert (first.poll(), second.poll()) == (3, None)
        assert one.processes_of(before.split()[0] + "-1"), "the session runs on"
    finally:
        second.kill()
        print(second.communicate()[1], one.services["broker"].tail())
