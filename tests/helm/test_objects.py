"""Every object of the chart is one that Kubernetes, KAI-Scheduler or the Prometheus operator accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jupyter_gpushare.broker.state.policy import parse_project
from jupyter_gpushare.kube.cluster.objects import MANAGED_BY, SELECTOR
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.command_line import main
from tests.helm.conftest import FOLDER, NS, PROJECTS, VALUES, Chart, Json, answers
from tests.kube.store import matches

CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "PriorityClass", "Queue", "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}  # fmt: skip


def closed(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_SHARE = closed(quota=_NUMBER, limit=_NUMBER, overQuotaWeight=_NUMBER)
_DURATION = {"type": "string", "pattern": r"^\d+[hs]$"}
# The fields that the chart uses, of custom resources: their schemas are none of Kubernetes.
CUSTOM: dict[str, Json] = {
    # deployments/kai-scheduler/crds/scheduling.run.ai_queues.yaml, v0.16.8
    "Queue": closed(
        parentQueue=_TEXT,
        priority={"type": "integer"},
        preemptMinRuntime=_DURATION,
        reclaimMinRuntime=_DURATION,
        resources=closed(cpu=_SHARE, gpu=_SHARE, memory=_SHARE),
    ),
    # https://cert-manager.io/docs/reference/api-docs/
    "Issuer": closed(selfSigned={"const": {}}, ca=closed(secretName=_TEXT)),
    "Certificate": closed(
        isCA={"type": "boolean"},
        commonName=_TEXT,
        dnsNames={"type": "array", "items": _TEXT},
        usages={"type": "array", "items": {"enum": ["digital signature", "client auth", "server auth"]}},
        secretName=_TEXT,
        duration=_DURATION,
        privateKey=closed(
            algorithm={"const": "ECDSA"}, size={"const": 256}, rotationPolicy={"enum": ["Never", "Always"]}
        ),
        issuerRef=closed(name=_TEXT, kind={"const": "Issuer"}),
    ),
    # https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.ServiceMonitorSpec
    "ServiceMonitor": closed(
        selector=closed(matchLabels={"type": "object"}),
        endpoints={
            "type": "array",
            "items": closed(
                port=_TEXT,
                path=_TEXT,
                interval=_DURATION,
                authorization=closed(type=_TEXT, credentials=closed(name=_TEXT, key=_TEXT)),
            ),
        },
    ),
}


def check(found: Json, version: str) -> None:
    if found["kind"] in CUSTOM:
        jsonschema.validate(found["spec"], CUSTOM[found["kind"]])
    else:
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize(
    "version",
    ["1.35", *(pytest.param(each, marks=pytest.mark.long) for each in ("1.32", "1.36", "1.37"))],
)
def test_every_object_fits_the_strict_schema_of_its_kind(charts: dict[str, Chart], version: str):
    different = {
        json.dumps(found, sort_keys=True): found for made in charts.values() for found in made.objects
    }
    for found in different.values():
        try:
            check(found, version)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            pytest.fail(f"{found['kind']} {found['metadata']['name']}: {error.message}")


def test_the_schemas_find_a_field_that_does_not_exist(chart: Chart):
    broker = json.loads(json.dumps(chart.one("Deployment")))
    broker["spec"]["template"]["spec"]["containers"][0]["resourcs"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resourcs"):
        check(broker, "1.35")


# A new key or certificate at each upgrade would part broker and helpers.
_MADE_ANEW = re.compile(r"\b(?:gen(?:CA|SelfSigned|Signed|PrivateKey)\w*|rand\w+|uuidv4|now)\b")


def test_an_upgrade_renders_the_same_objects(charts: dict[str, Chart]):
    for made, again in zip(charts.values(), answers(*VALUES.values()), strict=True):
        assert made.objects == again["objects"]
    for template in FOLDER.rglob("templates/*"):
        # No test has a cluster in which `lookup` would find the last one.
        text = template.read_text()
        assert "lookup" in text or not _MADE_ANEW.search(text), template
    assert _MADE_ANEW.search('{{ $ca := genCA "gpushare" 365 }}')


def test_no_object_is_rendered_twice_and_each_is_in_the_namespace_of_the_release(charts: dict[str, Chart]):
    for chart in charts.values():
        named = [(o["kind"], o["metadata"]["name"]) for o in chart.objects]
        assert len(named) == len(set(named))
        for found in chart.objects:
            expected = None if found["kind"] in CLUSTER_WIDE else NS
            assert found["metadata"].get("namespace") == expected, found["metadata"]


def test_no_pod_of_the_chart_is_taken_for_a_seat(chart: Chart):
    for found in chart.all("Deployment", "DaemonSet"):
        assert not matches(SELECTOR, found["spec"]["template"])
        assert MANAGED_BY not in found["spec"]["template"]["metadata"]["labels"]


def test_an_upgrade_never_runs_two_brokers_and_keeps_the_volume(chart: Chart):
    spec = chart.one("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    claim = chart.one("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    # Kubernetes opens every file to the group otherwise, and the broker then refuses its own secrets.
    assert spec["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_a_change_of_the_configuration_restarts_the_broker_and_nothing_else_does(
    chart: Chart, rendered: Callable[..., Chart]
):
    def mark(made: Chart) -> str:
        template = made.one("Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    changed = {"config": {"GPUShareBroker": {"idle_timeout": 60}}}
    assert mark(rendered(broker=changed)) != mark(chart) == mark(rendered(policy={"enabled": False}))


def test_grafana_gets_the_dashboard_of_the_documentation(charts: dict[str, Chart]):
    made = charts["all on"].one("ConfigMap", "gpushare-dashboard")["data"]["gpushare.json"]
    assert json.loads(made) == json.loads((FOLDER.parent / "docs/monitoring/dashboard.json").read_text())


# ---- queues ------------------------------------------------------------------


def of_queues(chart: Chart) -> list[Json]:
    found = chart.all("Queue", "PriorityClass")
    return sorted(found, key=lambda o: (o["kind"], o["metadata"]["name"]))


def test_queues_and_priority_classes_are_those_that_the_command_prints(
    charts: dict[str, Chart],
    rendered: Callable[..., Chart],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    settings_ = {"min_run": 1_000_000, "las_thresholds": [60, 600, 6000]}
    other = rendered(broker={"config": {"GPUShareBroker": settings_}})
    for chart in (charts["default"], charts["all on"], other):
        file = tmp_path / "broker_config.json"
        file.write_text(chart.one("ConfigMap", "gpushare-broker")["data"]["broker_config.json"])
        assert main(["queues", "--config", str(file)]) == 0
        expected = Chart(json.loads(capsys.readouterr().out)["items"])
        assert of_queues(chart) == of_queues(expected)


_GPUS = st.integers(0, 64_000).map(lambda milli: milli / 1000)
_PROJECT = st.fixed_dictionaries(
    {"quota": _GPUS},
    optional={
        "limit": _GPUS,
        "weight": st.integers(0, 1000),
        "priority": st.integers(-50, 50),
        "priority_max": st.integers(0, 100),
    },
)
_SETS = st.dictionaries(
    st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True).filter(
        lambda name: not name.startswith("gpushare")
    ),
    _PROJECT,
    min_size=1,
    max_size=6,
)


@settings(max_examples=4, deadline=None)
@given(sets=st.lists(_SETS, min_size=8, max_size=8))
@example(sets=[{"no": {"quota": 1.0}}])  # for YAML a boolean
def test_the_queues_of_random_projects_are_those_of_the_command(sets: list[dict[str, Json]]):
    for projects, answer in zip(sets, answers(*({"projects": each} for each in sets)), strict=True):
        parsed = [parse_project(name, config).project(0, None) for name, config in projects.items()]
        expected = Chart([*queues(parsed, 600), *priority_classes(3)])
        assert of_queues(Chart(answer["objects"])) == of_queues(expected)


# ---- values ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "at '/projects': minProperties"),
        ({"projects": {"Bad Name": {"quota": 1}}}, "'Bad Name' does not match"),
        ({"projects": {"gpushare-x": {"quota": 1}}}, "invalid propertyName 'gpushare-x'"),
        ({"projects": {"a": {"weight": 1}}}, "at '/projects/a': missing property 'quota'"),
        ({"projects": {"a": {"quota": "50%"}}}, "at '/projects/a/quota': got string, want number"),
        ({"projects": {"a": {"quota": 1, "qouta": 1}}}, "additional properties 'qouta' not allowed"),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
        ({"broker": {"replicas": 2}}, "at '/broker': additional properties 'replicas'"),
        ({"broker": {"config": {"GPUShareBroker": {"idle_time": 5}}}}, "'idle_time' not allowed"),
        ({"broker": {"config": {"GPUShareBroker": {"engine": "planner"}}}}, "'engine' not allowed"),
        ({"broker": {"config": {"GPUShareBroker": {"order": "lifo"}}}}, "one of 'progress'"),
        ({"helper": {"watchdog": "kill"}}, "one of 'warn', 'stop', 'off'"),
        ({"helper": {"hostBudgetPercent": 99}}, "maximum: got 99"),
        ({"helper": {"runDir": "run/gpushare"}}, "at '/helper/runDir'"),
        ({"seat": {"graceSeconds": 5}}, "minimum: got 5, want 30"),
        ({"nodes": {"taint": {"effect": "Never"}}}, "one of 'NoSchedule'"),
        ({"policy": {"action": "deny"}}, "one of 'Deny', 'Warn', 'Audit'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_and_named(refusals: dict[str, str], values: Json, said: str):
    assert said in refusals[json.dumps(values)]


@pytest.fixture(scope="module")
def refusals(request: pytest.FixtureRequest) -> dict[str, str]:
    """Helm's answer to each wrong value, all in one render."""
    (mark,) = test_a_wrong_value_is_refused_and_named.pytestmark  # type: ignore[attr-defined]
    wrong = [values for values, _ in mark.args[1]]
    made = answers(*({"projects": PROJECTS} | each if each else each for each in wrong))
    return {
        json.dumps(each): answer.get("error", "it was rendered")
        for each, answer in zip(wrong, made, strict=True)
    }
