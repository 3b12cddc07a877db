"""The service account of the broker has every right that broker and checks need, and no other."""

from __future__ import annotations

from pathlib import Path

from traitlets.config import Config

from jupyter_gpushare.core.model import State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.checks.cluster import examine, find_missing
from jupyter_gpushare.kube.cluster.objects import POD_GROUPS, PODS, SeatPod, pod_group, seat_pod
from jupyter_gpushare.kube.rules.seats import Demand, Request, SeatClass
from jupyter_gpushare.kube.settings import GPUShareKube
from tests.helm.conftest import NS, Chart
from tests.kube.bed import Bed, kube_bed
from tests.kube.rbac import Ask, Rights
from tests.kube.test_kai_engine import NLP, VISION, Broker

_RBAC = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def granted(chart: Chart) -> set[Ask]:
    """Each right of the chart's roles by itself."""
    return {
        Ask(verb, group, resource, role["metadata"].get("namespace", ""))
        for role in chart.all("Role", "ClusterRole")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def works(bed: Bed) -> None:
    """What a broker does in its life: sessions, a loan to a job, another broker, the return."""
    broker = Broker(bed)
    await broker.session("owner")
    await broker.session("other")
    broker.set("owner", idle_since_at=broker.now - 10_000)
    broker.job("j")
    await broker.until(lambda: broker.state("j") is State.RUNNING)
    await bed.quiet()
    await bed.restart_engine()
    broker.set("owner", wanted=True)
    await broker.until(lambda: broker.state("owner") is State.RUNNING)
    broker.leases.clear()
    await broker.until(lambda: not list(bed.store.all("podgroups", NS)))


async def creates_again(bed: Bed) -> None:
    """Create the objects of a seat, with a lost answer each: the client then reads the object."""
    await bed.stop_engine()  # its requests would lose their answers instead
    demand = Demand(lease="b1", project="vision", seat_class=SeatClass.SESSION, size=Size(500))
    requested = Request(fraction_milli=500)
    bed.server.faults.lose_answers = 1
    await bed.client.create(POD_GROUPS, NS, pod_group("seat-1", demand, 1))
    bed.server.faults.lose_answers = 1
    await bed.client.create(PODS, NS, seat_pod("seat-1", demand, requested, SeatPod(image="i"), 1))


async def test_the_broker_needs_each_of_its_rights_and_lacks_none(chart: Chart, tmp_path: Path):
    rights = Rights.of(chart.all(*_RBAC), {"t": (NS, "gpushare-broker"), "h": (NS, "gpushare-helper")})
    async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP), rights=rights) as bed:
        await works(bed)
        await creates_again(bed)
        kube = GPUShareKube(namespace=NS, helper_selector="app=x")
        await find_missing(bed.client, kube, [VISION, NLP])
        (tmp_path / "token").write_text("t")
        given = {"api_server": bed.server.url, "token_file": str(tmp_path / "token"), "seat_image": "i"}
        checks = await examine(GPUShareKube(config=Config(GPUShareKube=given)), [VISION, NLP], 3)
    assert {check.name: check.result for check in checks}["rights"] == "ok"
    assert rights.refused == []
    assert rights.asked == granted(chart)
    assert not any(rights.would_allow("h", right) for right in granted(chart))


def test_it_has_none_in_the_namespace_of_the_hub_and_reads_no_secret(chart: Chart):
    rights = Rights.of(chart.all(*_RBAC), {"t": (NS, "gpushare-broker")})
    assert not rights.would_allow("t", Ask("list", "", "pods", "jhub"))
    for resource in ("secrets", "pods/exec", "configmaps"):
        assert not rights.would_allow("t", Ask("get", "", resource, NS))
