"""The ValidatingAdmissionPolicy: pods that it lets onto nodes with shared GPUs, and pods that it refuses."""

from __future__ import annotations

from typing import Any

import celpy
import pytest

from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.cluster.objects import SeatPod, seat_pod
from jupyter_gpushare.kube.rules.seats import Demand, Request, SeatClass
from tests.helm.conftest import Chart, Json

_CEL = celpy.Environment()


def holds(expression: str, **given: Json) -> bool:
    program = _CEL.program(_CEL.compile(expression))
    return bool(program.evaluate({name: celpy.json_to_cel(value) for name, value in given.items()}))


def refusals(
    chart: Chart, pod: Json, *, namespace: str = "team", old: Json | None = None, user: str = "ada"
) -> list[str]:
    """The messages with which the API server refuses a pod; empty: it is admitted."""
    spec = chart.one("ValidatingAdmissionPolicy")["spec"]
    (rule,) = spec["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert (rule["key"], rule["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
    if namespace in rule["values"]:
        return []
    groups = ["system:nodes"] if user.startswith("system:node:") else ["system:authenticated"]
    request = {"operation": "UPDATE" if old else "CREATE", "userInfo": {"username": user, "groups": groups}}
    given = {"object": pod, "oldObject": old or {}, "request": request}
    if not all(holds(each["expression"], **given) for each in spec["matchConditions"]):
        return []
    return [each["message"] for each in spec["validations"] if not holds(each["expression"], **given)]


def pod(
    *tolerations: Json, annotations: dict[str, str] | None = None, container: Json | None = None, **spec: Any
) -> Json:
    made: Json = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"} | (container or {})]} | spec,
    }
    if tolerations:
        made["spec"]["tolerations"] = list(tolerations)
    if annotations:
        made["metadata"]["annotations"] = annotations
    return made


TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
NOT_READY = {
    "key": "node.kubernetes.io/not-ready",
    "operator": "Exists",
    "effect": "NoExecute",
    "tolerationSeconds": 300,
}
ALL = {"operator": "Exists"}
VISIBLE = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
VOID = {"env": [{"name": "PATH", "value": "/bin"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}
GPU = {"resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "1"}}}


FOREIGN = pod(TAINT, nodeName="gpu-7")
EXEMPT = ("gpushare", "jhub", "kube-system", "gpu-operator", "kai-scheduler", "kai-resource-reservation")


@pytest.mark.parametrize(
    ("made", "more"),
    [
        (pod(), {}),
        (pod(NOT_READY), {}),
        (pod({"key": "other", "operator": "Exists"}, container=VISIBLE, runtimeClassName="nvidia"), {}),
        (pod(nodeSelector={"kubernetes.io/hostname": "gpu-7"}), {}),
        # Static pods are those of their node.
        (pod(ALL, nodeName="gpu-7"), {"user": "system:node:gpu-7"}),
        # One from before the policy can be labelled and deleted, one that was bound can be changed.
        (FOREIGN | {"metadata": {"name": "p", "labels": {"a": "b"}}}, {"old": FOREIGN}),
        (pod(nodeName="c", activeDeadlineSeconds=30), {"old": pod(nodeName="c", activeDeadlineSeconds=60)}),
        # Namespaces in which users create no pods.
        *((pod(ALL, nodeName="gpu-7"), {"namespace": name}) for name in EXEMPT),
    ],
    ids=str,
)
def test_pods_that_cannot_get_on_the_nodes_or_are_no_users_are_admitted(
    chart: Chart, made: Json, more: dict[str, Any]
):
    assert refusals(chart, made, **more) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (pod(TAINT), "tolerates the taint nvidia.com/gpu"),
        (pod(NOT_READY, TAINT), "tolerates the taint"),
        (pod({"key": "nvidia.com/gpu", "value": "x", "effect": "NoExecute"}), "tolerates the taint"),
        (pod(ALL), "name the keys that it has to tolerate"),
        (pod({"key": "", "operator": "Exists", "effect": "NoSchedule"}), "tolerates the taint"),
        (pod(nodeName="gpu-7"), "names its node"),
    ],
    ids=str,
)
def test_pods_that_could_get_on_the_nodes_are_refused(chart: Chart, made: Json, said: str):
    (message,) = refusals(chart, made)
    assert said in message
    assert "policy.exemptNamespaces" in message


def test_a_foreign_pod_that_waits_may_not_be_given_a_toleration_later(chart: Chart):
    assert "taint" in refusals(chart, pod(TAINT), old=pod())[0]


@pytest.mark.parametrize("name", ["all on", "default"])
def test_our_own_pods_are_admitted_in_their_namespace_only(charts: dict[str, Chart], name: str):
    chart = charts[name]
    demand = Demand(lease="b1", project="vision", seat_class=SeatClass.SESSION, size=Size(500))
    site = SeatPod(tolerations=(TAINT,))
    seat = seat_pod("seat-1", demand, Request(fraction_milli=500), site, 1)
    helper = chart.one("DaemonSet")["spec"]["template"]
    for made in (seat, helper):
        assert refusals(chart, made, namespace="gpushare") == []
        assert refusals(chart, made, namespace="team") != []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (pod(runtimeClassName="nvidia"), "runtime class"),
        (pod(runtimeClassName="nvidia-legacy"), "runtime class"),
        (pod(annotations={"nvidia.cdi.k8s.io/container.c": "nvidia.com/gpu=all"}), "CDI"),
        (pod(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all"}), "CDI"),
        (pod(container=VISIBLE), "NVIDIA_VISIBLE_DEVICES"),
        (
            pod(
                container={"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {}}}]}
            ),
            "to void",
        ),
        (pod(initContainers=[{"name": "i"} | VISIBLE]), "NVIDIA_VISIBLE_DEVICES"),
        (pod(ephemeralContainers=[{"name": "e"} | VISIBLE]), "NVIDIA_VISIBLE_DEVICES"),
        (pod(container=GPU), "requests a GPU"),
        (pod(initContainers=[{"name": "i"} | GPU]), "requests a GPU"),
        (pod(resourceClaims=[{"name": "g", "resourceClaimTemplateName": "gpu"}]), "resourceClaims"),
        (pod(TAINT), "tolerates"),
    ],
    ids=str,
)
def test_where_nodes_have_no_taint_no_foreign_pod_asks_for_a_gpu(
    charts: dict[str, Chart], made: Json, said: str
):
    (message,) = refusals(charts["all on"], made)
    assert said in message


@pytest.mark.parametrize(
    "made",
    [
        pod(),
        pod(container=VOID),
        pod(container={"env": [{"name": "NVIDIA_VISIBLE_DEVICES"}]}),
        pod(container={"resources": {"limits": {"cpu": "1"}}}, runtimeClassName="gvisor"),
        pod(annotations={"team": "a"}, initContainers=[{"name": "i"}]),
    ],
    ids=str,
)
def test_there_pods_without_gpus_are_admitted(charts: dict[str, Chart], made: Json):
    assert refusals(charts["all on"], made) == []


def test_it_can_only_warn_and_be_left_out(charts: dict[str, Chart], rendered: Any):
    assert chart_action(charts["default"]) == ["Warn"]
    assert chart_action(rendered(policy={"action": "Deny"})) == ["Deny"]
    assert charts["all off"].all("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding") == []


def chart_action(chart: Chart) -> list[str]:
    binding = chart.one("ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == chart.one("ValidatingAdmissionPolicy")["metadata"]["name"]
    actions: list[str] = binding["validationActions"]
    return actions
