"""Every setting and option that the chart writes exists, and says what the values say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.gpu.service import options
from jupyter_gpushare.kube.cluster.objects import seat_pod
from jupyter_gpushare.kube.node import seat
from jupyter_gpushare.kube.rules.seats import Demand, Request, SeatClass
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.kube.spawner import GPUShareKubeSpawner
from jupyter_gpushare.protocol.helper import WatchdogAction
from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER
from tests.helm.conftest import FOLDER, NS, Chart, Json
from tests.kube.kubelet import expanded

SCHEMA: Json = json.loads((FOLDER / "gpushare/values.schema.json").read_text())
DEMAND = Demand(lease="b1", project="vision", seat_class=SeatClass.SESSION, size=Size(500))


def broker_of(chart: Chart, folder: Path) -> GPUShareBroker:
    """The broker with the configuration and the arguments of the chart."""
    container = chart.one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "config"]
    for name, text in chart.one("ConfigMap", "gpushare-broker")["data"].items():
        (folder / name).write_text(text)
    verb, *words = [word.replace(mount["mountPath"], str(folder)) for word in container["args"]]
    assert verb == "broker"
    app = GPUShareBroker()
    app.initialize(words)
    return app


def helper_arguments(chart: Chart) -> list[str]:
    container = chart.one("DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    verb, *words = container["args"]
    assert verb == "helper"
    given = {"POD_IP": "10.1.2.3", "NODE_NAME": "gpu-7"}
    assert given.keys() <= {entry["name"] for entry in container["env"]}
    return [expanded(word, given) for word in words]


def test_the_broker_reads_the_configuration_as_the_values_say(chart: Chart, tmp_path: Path):
    app = broker_of(chart, tmp_path)
    assert (app.engine, app.tls_address) == ("kai", "0.0.0.0:8004")
    assert [p.name for p in app.policy().projects] == ["nlp", "vision"]
    kube = GPUShareKube(parent=app)
    assert (kube.namespace, kube.seat_image) == (NS, "registry.example.org/gpushare:0.1.0")
    assert app.db_url == "sqlite:////var/lib/gpushare/broker/broker.sqlite"
    assert app.spawner_token_file == "/var/lib/gpushare/broker/spawner-token"


def test_a_site_changes_settings_and_the_database(
    charts: dict[str, Chart], tmp_path: Path, rendered: Any, monkeypatch: pytest.MonkeyPatch
):
    config = {"GPUShareBroker": {"idle_timeout": 60, "guard": None}, "GPUShareKube": {"place_timeout": 20}}
    app = broker_of(rendered(broker={"config": config}), tmp_path)
    assert (app.idle_timeout, app.guard, GPUShareKube(parent=app).place_timeout) == (60, None, 20)
    (container,) = charts["all on"].one("Deployment")["spec"]["template"]["spec"]["containers"]
    (secret,) = [
        each
        for each in container["env"]
        if each.get("valueFrom", {}).get("secretKeyRef", {}).get("key") == "db-url"
    ]
    monkeypatch.setenv(secret["name"], "postgresql+psycopg://db/gpushare")
    app = broker_of(charts["all on"], tmp_path)
    assert app.db_url == "postgresql+psycopg://db/gpushare"
    assert "postgresql" not in str(container["args"])  # any process of the machine may read them


def test_every_setting_of_the_configuration_is_a_trait(charts: dict[str, Chart]):
    for chart in charts.values():
        config = chart.broker_config
        assert config.keys() == {"GPUShareBroker", "GPUShareKube"}
        for owner in (GPUShareBroker, GPUShareKube):
            assert config[owner.__name__].keys() <= set(owner.class_trait_names(config=True))


def test_the_schema_has_settings_of_the_broker_and_none_that_the_chart_decides(charts: dict[str, Chart]):
    config = SCHEMA["properties"]["broker"]["properties"]["config"]["properties"]
    for owner in (GPUShareBroker, GPUShareKube):
        changeable = config[owner.__name__]["properties"].keys()
        assert changeable
        assert changeable <= set(owner.class_trait_names(config=True))
        assert not changeable & charts["all on"].broker_config[owner.__name__].keys()


def test_the_helper_takes_the_arguments_of_the_chart(charts: dict[str, Chart]):
    given = options.parse(helper_arguments(charts["default"]))
    assert given.endpoint is not None
    assert (given.endpoint.host, given.endpoint.port, given.endpoint.node) == ("10.1.2.3", 7710, "gpu-7")
    assert (str(given.seat_socket), str(given.lease_dir)) == (
        "/run/gpushare/seat.sock",
        "/run/gpushare/leases",
    )
    assert (str(given.state_dir), str(given.library_dir)) == (
        "/var/lib/gpushare/helper",
        "/var/lib/gpushare/lib",
    )
    assert options.parse(helper_arguments(charts["all on"])).park_before_kill


def test_the_schema_has_the_watchdogs_actions():
    helper = SCHEMA["properties"]["helper"]["properties"]
    assert set(helper["watchdog"]["enum"]) == set(WatchdogAction)


def test_broker_helper_seats_and_spawner_name_the_same_port_folder_and_label(
    rendered: Callable[..., Chart], tmp_path: Path
):
    made = rendered(helper={"port": 7777, "runDir": "/run/other"})
    kube = GPUShareKube(parent=broker_of(made, tmp_path))
    template = made.one("DaemonSet")["spec"]["template"]
    given = options.parse(helper_arguments(made))
    assert given.endpoint is not None
    assert kube.helper_port == given.endpoint.port == 7777
    labels = template["metadata"]["labels"]
    assert kube.helper_selector in {f"{key}={value}" for key, value in labels.items()}
    pod = seat_pod("seat-1", DEMAND, Request(fraction_milli=500), kube.seat(), 1)
    (volume,) = pod["spec"]["volumes"]
    _, sits = seat.parse(pod["spec"]["containers"][0]["args"][1:])
    assert str(given.seat_socket) == str(sits) == f"{volume['hostPath']['path']}/seat.sock"
    assert pod["spec"]["tolerations"] == template["spec"]["tolerations"]
    assert pod["spec"]["runtimeClassName"] == template["spec"]["runtimeClassName"]


@pytest.mark.parametrize(("values", "secret"), [("default", "gpushare-helper-tls"), ("all on", "helper-tls")])
def test_broker_and_helper_read_each_file_of_their_own_certificate(
    charts: dict[str, Chart], tmp_path: Path, values: str, secret: str
):
    chart = charts[values]
    kube = GPUShareKube(parent=broker_of(chart, tmp_path))
    endpoint = options.parse(helper_arguments(chart)).endpoint
    assert endpoint is not None
    read = {
        "Deployment": (kube.helper_certificate_file, kube.helper_key_file, kube.helper_ca_file),
        "DaemonSet": (endpoint.tls.certificate, endpoint.tls.key, endpoint.tls.authority),
    }
    for kind, name in (("Deployment", "gpushare-broker-tls"), ("DaemonSet", secret)):
        spec = chart.one(kind)["spec"]["template"]["spec"]
        (volume,) = [v["secret"] for v in spec["volumes"] if v["name"] == "tls"]
        assert volume == {"secretName": name, "defaultMode": 0o400}
        (folder,) = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "tls"]
        assert [*map(str, read[kind])] == [f"{folder}/{key}" for key in ("tls.crt", "tls.key", "ca.crt")]


def test_cert_manager_makes_the_certificates_that_both_sides_accept(charts: dict[str, Chart]):
    made = charts["all on"]
    authority = made.one("Issuer", "gpushare-ca")["spec"]["ca"]["secretName"]
    assert made.one("Certificate", "gpushare-ca")["spec"]["secretName"] == authority
    for name, usage, secret in (
        (BROKER, "client auth", "gpushare-broker-tls"),
        (HELPER, "server auth", "helper-tls"),
    ):
        spec = made.one("Certificate", name)["spec"]
        assert (spec["dnsNames"], spec["secretName"]) == ([name], secret)
        assert spec["usages"] == ["digital signature", usage]
        assert spec["issuerRef"] == {"name": "gpushare-ca", "kind": "Issuer"}
    assert not charts["default"].all("Certificate", "Issuer")


def test_the_spawner_mounts_what_the_helper_writes(chart: Chart):
    given = options.parse(helper_arguments(chart))
    folders = GPUShareKubeSpawner.class_traits()["host_dirs"].default()
    assert folders
    for path in (given.lease_dir, given.library_dir):
        assert any(Path(folder) in Path(str(path)).parents for folder in folders)
    # The preload library is mapped to be executed, which a file system mounted noexec refuses.
    assert not str(given.library_dir).startswith("/run")


def test_without_a_taint_nothing_is_tolerated(charts: dict[str, Chart], tmp_path: Path):
    made = charts["all off"]
    assert made.one("DaemonSet")["spec"]["template"]["spec"]["tolerations"] == []
    assert GPUShareKube(parent=broker_of(made, tmp_path)).seat().tolerations == ()


PULL_SECRETS = [{"name": "one"}, {"name": "two"}]


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_pods_pull_with_the_secrets_of_the_values(charts: dict[str, Chart], kind: str):
    spec = charts["all on"].one(kind)["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == PULL_SECRETS


def test_seats_pull_with_the_secrets_of_the_values(charts: dict[str, Chart], tmp_path: Path):
    kube = GPUShareKube(parent=broker_of(charts["all on"], tmp_path))
    pod = seat_pod("seat-1", DEMAND, Request(fraction_milli=500), kube.seat(), 1)
    assert pod["spec"]["imagePullSecrets"] == PULL_SECRETS
