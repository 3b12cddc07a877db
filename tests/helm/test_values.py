"""The values for other charts and the images: they fit ours, the versions, and the traits of the package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jupyterhub.app import JupyterHub
from kubespawner import clients
from traitlets.config import Config

from jupyter_gpushare import __version__
from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.control.sessions import ANSWER_S
from jupyter_gpushare.hub import compat, distinct
from jupyter_gpushare.hub.spawner import GPUShareMixin
from jupyter_gpushare.kube.engine.kai import PLACE_S, SEAT_S
from jupyter_gpushare.kube.spawner import GPUShareKubeSpawner
from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER, TlsFiles
from tests.gpu.test_tcp import Echo, said
from tests.helm.conftest import FOLDER, NS, ROOT, Chart, Json
from tests.kube.kubeconfig import write_kubeconfig

VERSIONS: Json = yaml.safe_load((FOLDER / "versions.yaml").read_text())
# Packages of the Hub's image and their versions.
HUB_IMAGE = dict(line.split("==", 1) for line in (ROOT / "tests/helm/hub_image.txt").read_text().splitlines())
Z2JH: Json = yaml.safe_load((FOLDER / "z2jh.yaml").read_text())
KAI: Json = yaml.safe_load((FOLDER / "kai.yaml").read_text())
OPERATOR: Json = yaml.safe_load((FOLDER / "gpu-operator.yaml").read_text())
# Pods of JupyterHub's chart: labels as in its _helpers.tpl.
HUB_POD, PROXY_POD, SERVER_POD = ({"component": name} for name in ("hub", "proxy", "singleuser-server"))


def texts() -> list[Path]:
    found = [p for p in FOLDER.rglob("*") if p.is_file() and p.suffix != ".json"]
    return sorted([*found, ROOT / "docs/kubernetes.md"])


@pytest.mark.parametrize("file", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_names_another_version(file: Path):
    known = {str(each) for each in VERSIONS.values() if not isinstance(each, list)} | {__version__}
    known |= {HUB_IMAGE["jupyterhub"], HUB_IMAGE["jupyterhub-kubespawner"]}  # what the pinned chart brings
    for found in re.findall(r"(?<![\w.])v?\d+\.\d+\.\d+(?![\w.]*\d\.\d)", file.read_text()):
        if found not in {"0.0.0", "1.32.0"}:  # of hosts; of schemas
            assert found in known, f"{found} is none of versions.yaml"


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((FOLDER / "gpushare/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert chart["kubeVersion"] == f">={VERSIONS['kubernetes'][0]}.0-0"
    tags = [Z2JH["hub"]["image"]["tag"], Z2JH["singleuser"]["image"]["tag"]]
    assert {*tags, yaml.safe_load((FOLDER / "gpushare/values.yaml").read_text())["image"]["tag"]} == {
        __version__
    }


def test_the_waits_of_a_start_are_within_half_of_the_time_that_the_hub_gives_it():
    needed_s = 2 * (PLACE_S + SEAT_S + ANSWER_S)
    assert Z2JH["singleuser"]["startTimeout"] >= needed_s
    assert GPUShareKubeSpawner._default_start_timeout(None) >= needed_s


def test_kai_says_in_an_evicted_pod_for_which_seat():
    assert KAI["scheduler"]["args"]["update-pod-eviction-condition"] == "true"


async def test_every_setting_for_the_hub_is_a_trait_that_takes_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write_kubeconfig(tmp_path, "http://127.0.0.1:1")  # of a cluster that is asked nothing
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    clients.load_config.cache_clear()
    config = Z2JH["hub"]["config"]
    owners = {
        "JupyterHub": JupyterHub,
        "GPUShareMixin": GPUShareMixin,
        "GPUShareKubeSpawner": GPUShareKubeSpawner,
    }
    assert config.keys() == owners.keys()
    for name, owner in owners.items():
        assert config[name].keys() <= set(owner.class_trait_names(config=True))
    hub = JupyterHub(config=Config(config))
    assert hub.spawner_class is GPUShareKubeSpawner
    spawners = {key: value for key, value in config.items() if key != "JupyterHub"}
    made = distinct.sample(GPUShareKubeSpawner, Config(spawners), "")
    clients.load_config.cache_clear()
    for name, value in (config["GPUShareMixin"] | config["GPUShareKubeSpawner"]).items():
        assert getattr(made, name) == value


def test_the_service_and_the_roles_are_those_that_the_package_asks_for():
    (service,), roles = Z2JH["hub"]["services"].values(), Z2JH["hub"]["loadRoles"]
    scopes = set(Z2JH["hub"]["config"]["JupyterHub"]["custom_scopes"])
    assert set(service["oauth_client_allowed_scopes"]) == scopes
    assert roles["gpushare-broker"]["scopes"] == list(compat.BROKER_SCOPES)
    assert roles["gpushare-broker"]["services"] == ["gpushare"]
    assert "custom:gpushare:jobs" in roles["user"]["scopes"]
    assert "self" in roles["user"]["scopes"]


def test_hub_and_chart_mean_the_same_broker(chart: Chart):
    service = chart.one("Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    host = f"{service['metadata']['name']}.{NS}.svc"
    mixin = Z2JH["hub"]["config"]["GPUShareMixin"]
    assert mixin["broker_url"] == f"https://{host}:{ports['tls']}"
    assert Z2JH["hub"]["services"]["gpushare"]["url"] == f"http://{host}:{ports['http']}"
    (env,) = [c["env"] for c in chart.one("Deployment")["spec"]["template"]["spec"]["containers"]]
    named = {entry["name"]: entry.get("value") for entry in env}
    assert named["JUPYTERHUB_SERVICE_URL"].endswith(f":{ports['http']}")
    assert chart.broker_config["GPUShareBroker"]["tls_address"].endswith(f":{ports['tls']}")


def test_hub_and_chart_mean_the_same_nodes(chart: Chart):
    spawner = Z2JH["hub"]["config"]["GPUShareKubeSpawner"]
    template = chart.one("DaemonSet")["spec"]["template"]["spec"]
    assert spawner["gpu_runtime_class"] == template["runtimeClassName"]
    assert spawner["gpu_tolerations"] == template["tolerations"] == Z2JH["prePuller"]["extraTolerations"]
    assert template["tolerations"] == OPERATOR["daemonsets"]["tolerations"]
    folders = {volume["hostPath"]["path"] for volume in template["volumes"] if "hostPath" in volume}
    assert set(spawner["host_dirs"]) == folders - {"/var/lib/kubelet/pod-resources"}
    assert "extraTolerations" not in Z2JH["singleuser"]


def test_what_would_break_leases_is_switched_off():
    assert not Z2JH["scheduling"]["userScheduler"]["enabled"]
    dynamic = Z2JH["singleuser"]["storage"]["dynamic"]
    assert dynamic["storageAccessModes"] == ["ReadWriteMany"]
    assert dynamic["pvcNameTemplate"] == "claim-{username}"
    assert KAI["global"] == {"gpuSharing": True, "blockNvidiaVisibleDevices": False}
    assert KAI["scheduler"]["actions"]["consolidation"] == {"enabled": False}
    assert OPERATOR["cdi"] == {"enabled": True, "nriPluginEnabled": False}
    (variable,) = OPERATOR["toolkit"]["env"]
    assert variable == {"name": "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED", "value": "true"}


# ---- what may reach what -----------------------------------------------------


def selects(selector: Json, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    for each in selector.get("matchExpressions", ()):
        has = each["key"] in labels
        wanted &= has if each["operator"] == "Exists" else labels.get(each["key"]) in each["values"]
    return bool(wanted)


def lets(rules: list[Json], side: str, peer: dict[str, str], namespace: str, ports: set[Any]) -> bool:
    """Whether a rule of a NetworkPolicy lets this peer through at a port, known by its name and number."""
    return any(
        selects(each.get("podSelector", {}), peer)
        and selects(each.get("namespaceSelector", {}), {"kubernetes.io/metadata.name": namespace})
        and ("namespaceSelector" in each or namespace == NS)
        and any(port["port"] in ports for port in rule["ports"])
        for rule in rules
        for each in rule[side]
    )


def labels_of(chart: Chart, kind: str) -> dict[str, str]:
    labels: dict[str, str] = chart.one(kind)["spec"]["template"]["metadata"]["labels"]
    return labels


def ports_of(chart: Chart, kind: str) -> dict[str, set[Any]]:
    (container,) = chart.one(kind)["spec"]["template"]["spec"]["containers"]
    return {port["name"]: {port["name"], port["containerPort"]} for port in container["ports"]}


def test_hub_proxy_and_servers_reach_the_broker_and_no_other_pod_does(chart: Chart):
    broker, ports = labels_of(chart, "Deployment"), ports_of(chart, "Deployment")
    policy = chart.one("NetworkPolicy", "gpushare-broker")["spec"]
    assert selects(policy["podSelector"], broker)

    def comes_in(peer: dict[str, str], port: str, namespace: str = "jhub") -> bool:
        return lets(policy["ingress"], "from", peer, namespace, ports[port])

    assert comes_in(PROXY_POD, "http")
    assert comes_in(HUB_POD, "http")
    assert comes_in(HUB_POD, "tls")
    assert comes_in(SERVER_POD, "tls")
    # Plain HTTP is for proxy and Hub alone.
    assert not comes_in(SERVER_POD, "http")
    assert not comes_in(HUB_POD, "tls", namespace="team")
    assert not comes_in({}, "http", namespace="monitoring")
    out = {
        "http": Z2JH["proxy"]["chp"]["networkPolicy"]["egress"] + Z2JH["hub"]["networkPolicy"]["egress"],
        "tls": Z2JH["hub"]["networkPolicy"]["egress"] + Z2JH["singleuser"]["networkPolicy"]["egress"],
    }
    for port, rules in out.items():
        assert all(lets([rule], "to", broker, NS, ports[port]) for rule in rules)
    assert lets(Z2JH["hub"]["networkPolicy"]["ingress"], "from", broker, NS, {"http"})


def test_prometheus_reaches_the_broker_where_it_is_to(charts: dict[str, Chart]):
    policy = charts["all on"].one("NetworkPolicy", "gpushare-broker")["spec"]
    assert lets(policy["ingress"], "from", {}, "monitoring", ports_of(charts["all on"], "Deployment")["http"])


def test_only_the_broker_reaches_helpers_and_nothing_reaches_seats(chart: Chart):
    helper, ports = labels_of(chart, "DaemonSet"), ports_of(chart, "DaemonSet")
    policy = chart.one("NetworkPolicy", "gpushare-helper")["spec"]
    assert selects(policy["podSelector"], helper)
    assert lets(policy["ingress"], "from", labels_of(chart, "Deployment"), NS, ports["helper"])
    assert not lets(policy["ingress"], "from", {"gpushare.jupyter.org/lease": "b1"}, NS, ports["helper"])
    seats = chart.one("NetworkPolicy", "gpushare-seats")["spec"]
    assert selects(seats["podSelector"], {"gpushare.jupyter.org/lease": "b1"})
    assert not selects(seats["podSelector"], helper)
    assert (seats.get("ingress"), seats.get("egress")) == (None, None)
    assert seats["policyTypes"] == ["Ingress", "Egress"]


# ---- README.md ----------------------------------------------------


def test_the_readme_has_six_steps_and_names_every_file():
    text = (FOLDER / "README.md").read_text()
    assert re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) == list("123456")
    for path in FOLDER.iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name == "README.md" or f"`{name}`" in text, name


def test_the_readme_copies_the_files_that_the_broker_makes(chart: Chart):
    app = GPUShareBroker(config=Config(chart.broker_config))
    text = (FOLDER / "README.md").read_text()
    assert f"cat {app.state_dir}/$file" in text
    assert Path(app.spawner_token_file) == Path(app.state_dir) / "spawner-token"
    mixin = Z2JH["hub"]["config"]["GPUShareMixin"]
    (mount,) = Z2JH["hub"]["extraVolumeMounts"]
    for file in (mixin["broker_token_file"], mixin["broker_certificate_file"]):
        assert Path(file).parent == Path(mount["mountPath"])
        assert f"--from-file={Path(file).name}" in text
    assert "--from-file=api-token" in text
    # A line end would be part of the token in a variable, and of a header then.
    assert re.search(r'printf %s "\$\(openssl rand -hex 32\)" > api-token\b', text)


async def test_the_certificates_of_the_readme_are_accepted_by_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = (FOLDER / "README.md").read_text()
    (block,) = [each for each in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "-newkey" in each]
    stub = """
    kubectl() {
      [ "$3 $4 $5" = "create secret generic" ] || { cat > /dev/null; return; }
      mkdir "$6"
      for each; do case $each in --from-file=*) cp "${each#*=}" "$6" ;; esac; done
    }
    """
    subprocess.run(["bash", "-ec", f"umask 077\n{stub}\n{block}"], cwd=tmp_path, check=True)
    of_broker, of_helper = (
        TlsFiles(certificate=made / "tls.crt", key=made / "tls.key", authority=made / "ca.crt")
        for made in (tmp_path / f"{name}-tls" for name in (BROKER, HELPER))
    )
    helper = Echo(of_helper)
    try:
        assert await said(helper.address(of_broker), b"one\n") == [b"one\n"]
    finally:
        helper.close()
