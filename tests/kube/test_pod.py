"""Pods of servers: what a lease changes in the pod that the real KubeSpawner makes of a site's settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubespawner import clients
from traitlets.config import Config

from jupyter_gpushare.core.model import Kind
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub import distinct
from jupyter_gpushare.hub.compat import SpawnException
from jupyter_gpushare.hub.spawner import GPUShareMixin
from jupyter_gpushare.kube import spawner as spawning
from jupyter_gpushare.kube.pod import escape, is_outside
from jupyter_gpushare.kube.spawner import GPUShareKubeSpawner
from jupyter_gpushare.protocol.wire import HostMount, JobSpec, SpawnGrant, SpawnProgress
from tests.certificates import make_certificate
from tests.kube.kubeconfig import write_kubeconfig

GIB = 1 << 30
ENV = {
    "GPUSHARE_LEASE": "abc-1",
    "GPUSHARE_LEASE_DIR": "/run/gpushare/leases/abc-1",
    "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
    "LD_PRELOAD": "/var/lib/gpushare/lib/libgpushare_preload.so",
}
GRANT = SpawnGrant(
    lease="abc-1",
    kind=Kind.BUILD,
    env=ENV,
    devices=["GPU-1", "GPU-2"],
    memory_limit_bytes=40 * GIB,
    node="node-1",
    mounts=[
        HostMount(path=ENV["GPUSHARE_LEASE_DIR"]),
        HostMount(path=ENV["GPUSHARE_LEASE_DIR"] + "/account", read_only=False),
        HostMount(path=ENV["LD_PRELOAD"]),
    ],
)
NO_LEASE = SpawnGrant(lease=None, kind=Kind.BUILD, env={})
JOB = JobSpec(
    id="0123456789",
    attempt=1,
    name="n",
    command=["sh", "-c", "echo $$ $(HOME)"],
    cwd=None,
    env={},
    grace_s=60,
)
CDI = "k8s.device-plugin.nvidia.com/gpu="


@pytest.fixture(autouse=True)
def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kubeconfig file: the spawner reads one, and asks nothing here."""
    file = write_kubeconfig(tmp_path, "http://127.0.0.1:1")
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    clients.load_config.cache_clear()
    yield
    clients.load_config.cache_clear()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GPUShareKubeSpawner]:
    certificate = tmp_path / "api.crt"
    make_certificate(certificate, tmp_path / "api.key")
    broker = {"broker_url": "https://b/services/gpushare", "broker_certificate_file": str(certificate)}

    def make(server: str = "", **settings: Any) -> GPUShareKubeSpawner:
        config = Config({"KubeSpawner": settings, "GPUShareMixin": broker})
        spawner: GPUShareKubeSpawner = distinct.sample(GPUShareKubeSpawner, config, server)
        spawner.cmd = ["jupyterhub-singleuser"]
        spawner._tell_administrator = lambda said: spawner.said.append(said)  # type: ignore[attr-defined]
        spawner.said = []  # type: ignore[attr-defined]
        return spawner

    return make


async def pod_of(spawner: GPUShareKubeSpawner, grant: SpawnGrant, hook: Any = None) -> dict[str, Any]:
    spawner.take_grant(grant)
    with spawner.memory_for_sleep(grant):
        pod = await spawner._checked(hook, await spawner.get_pod_manifest())
    return json.loads(json.dumps(spawner.api.api_client.sanitize_for_serialization(pod)))


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


async def test_a_pod_with_a_lease_runs_on_its_node_with_its_files_and_its_gpus_alone(make):
    site = {"key": "zone", "operator": "Exists"}
    spawner = make(node_selector={"pool": "gpu"}, node_affinity_required=[{"matchExpressions": [site]}])
    pod = await pod_of(spawner, GRANT)
    spec, (server,) = pod["spec"], pod["spec"]["containers"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    node = {"key": "metadata.name", "operator": "In", "values": ["node-1"]}
    assert required["nodeSelectorTerms"] == [{"matchExpressions": [site], "matchFields": [node]}]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert variables(server)["NVIDIA_VISIBLE_DEVICES"] == f"{CDI}GPU-1,{CDI}GPU-2"
    assert variables(server)["LD_PRELOAD"] == ENV["LD_PRELOAD"]
    folders = {v["name"]: v["hostPath"] for v in spec["volumes"]}
    mounts = {folders[m["name"]]["path"]: (m["mountPath"], m.get("readOnly")) for m in server["volumeMounts"]}
    assert mounts == {
        "/run/gpushare/leases/abc-1": ("/run/gpushare/leases/abc-1", True),
        "/run/gpushare/leases/abc-1/account": ("/run/gpushare/leases/abc-1/account", False),
        ENV["LD_PRELOAD"]: (ENV["LD_PRELOAD"], True),
    }
    assert "nvidia.com/gpu" not in json.dumps(server.get("resources", {}))
    assert server["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("name", ["hostPID", "hostIPC", "hostNetwork", "privileged"])
@pytest.mark.parametrize("by_hook", [False, True], ids=["setting", "hook"])
async def test_a_pod_that_is_not_apart_from_its_node_is_refused(make, name, by_hook):
    setting = {"privileged": True} if name == "privileged" else {"extra_pod_config": {name: True}}
    spawner = make(**({} if by_hook else setting))

    def hook(_: Any, pod: Any) -> Any:
        if name == "privileged":
            pod.spec.containers[0].security_context = {"privileged": True}
        else:
            setattr(pod.spec, {"hostPID": "host_pid", "hostIPC": "host_ipc"}.get(name, "host_network"), True)
        return pod

    with pytest.raises(Exception, match="settings do not fit") as refused:
        await pod_of(spawner, GRANT, hook if by_hook else None)
    assert refused.value.status_code == 503
    assert name in spawner.said[0]


async def test_gpus_are_named_in_the_form_of_the_site(make):
    def spawner(form: str) -> GPUShareKubeSpawner:
        made = make()
        made.gpu_names = form
        return made

    pod = await pod_of(spawner("uuid"), GRANT)
    assert variables(pod["spec"]["containers"][0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    pod = await pod_of(spawner("annotation"), GRANT)
    assert variables(pod["spec"]["containers"][0])["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert pod["metadata"]["annotations"]["nvidia.cdi.k8s.io/container.notebook"] == f"{CDI}GPU-1,{CDI}GPU-2"


async def test_a_pod_without_a_lease_gets_void_in_every_container_and_no_class_for_gpus(make):
    own = {"name": "own", "image": "i", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    settings = {
        "extra_pod_config": {"runtimeClassName": "nvidia-cdi"},
        "extra_containers": [own],
        "init_containers": [own | {"name": "init"}],
    }
    pod = await pod_of(make(**settings), NO_LEASE)
    spec = pod["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert variables(container)["NVIDIA_VISIBLE_DEVICES"] == "void", container["name"]
    assert variables(spec["containers"][0])["CUDA_VISIBLE_DEVICES"] == ""
    assert "runtimeClassName" not in spec
    assert "affinity" not in spec
    pod = await pod_of(make(**settings), GRANT)
    server, beside = pod["spec"]["containers"]
    assert variables(server)["NVIDIA_VISIBLE_DEVICES"].startswith(CDI)
    assert variables(beside)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (
        "gVisor"
        in (await pod_of(make(extra_pod_config={"runtimeClassName": "gVisor"}), NO_LEASE))["spec"].values()
    )


@pytest.mark.parametrize("grant", [GRANT, NO_LEASE], ids=["with a lease", "without"])
@pytest.mark.parametrize(
    "settings",
    [
        {"extra_resource_limits": {"nvidia.com/gpu": "1"}},
        {"extra_resource_guarantees": {"nvidia.com/mig-1g.10gb": "1"}},
        {"extra_containers": [{"name": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
        {"extra_containers": [{"name": "x", "resources": {"claims": [{"name": "gpu"}]}}]},
        {"extra_pod_config": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}},
        {"extra_annotations": {"gpu-fraction": "0.5"}},
        {"extra_annotations": {"gpu-memory": "2000"}},
    ],
    ids=str,
)
async def test_a_profile_that_asks_for_a_gpu_is_refused(make, settings, grant):
    spawner = make(**settings)
    with pytest.raises(SpawnException) as refused:
        await pod_of(spawner, grant)
    assert "GPU of its own" in refused.value.jupyterhub_message
    assert "modify_pod_hook" in spawner.said[0]


async def test_the_sites_hook_changes_the_pod_and_what_it_must_not_change_is_refused(make):
    def label(spawner: Any, pod: Any) -> Any:
        pod.metadata.labels["site"] = "yes"
        return pod

    assert (await pod_of(make(), GRANT, label))["metadata"]["labels"]["site"] == "yes"

    async def away(spawner: Any, pod: Any) -> Any:
        pod.spec.affinity = {"podAffinity": {}}
        return pod

    affinity = (await pod_of(make(), GRANT, away))["spec"]["affinity"]
    assert affinity.keys() == {"podAffinity", "nodeAffinity"}

    def shown(spawner: Any, pod: Any) -> Any:
        pod.spec.containers[0].env = [
            e for e in pod.spec.containers[0].env if e.name != "NVIDIA_VISIBLE_DEVICES"
        ]
        return pod

    def classed(spawner: Any, pod: Any) -> Any:
        pod.spec.runtime_class_name = "nvidia"
        return pod

    def unclassed(spawner: Any, pod: Any) -> Any:
        pod.spec.runtime_class_name = None
        return pod

    def unmounted(spawner: Any, pod: Any) -> Any:
        pod.spec.containers[0].volume_mounts = []
        return pod

    def writable(spawner: Any, pod: Any) -> Any:
        pod.spec.containers[0].volume_mounts[-1].read_only = False
        return pod

    def elsewhere(spawner: Any, pod: Any) -> Any:
        pod.spec.volumes[-1].host_path.path = "/tmp/other.so"
        return pod

    for grant, hook, named in (
        (GRANT, unclassed, "lost what its lease needs: the runtime class nvidia"),
        (GRANT, unmounted, "lost what its lease needs: the read-only mount of /run/gpushare/leases/abc-1"),
        (GRANT, writable, "lost what its lease needs: the read-only mount of " + ENV["LD_PRELOAD"]),
        (GRANT, elsewhere, "lost what its lease needs: the read-only mount of " + ENV["LD_PRELOAD"]),
        (GRANT, shown, "NVIDIA_VISIBLE_DEVICES"),
        (NO_LEASE, shown, "NVIDIA_VISIBLE_DEVICES"),
        (NO_LEASE, classed, "its runtime class is nvidia"),
    ):
        spawner = make()
        with pytest.raises(SpawnException):
            await pod_of(spawner, grant, hook)
        assert named in spawner.said[0]


async def test_the_memory_limit_of_the_profile_holds_the_gpu_memory_while_it_sleeps(make):
    spawner = make()
    spawner.mem_limit = "2G"
    (server,) = (await pod_of(spawner, GRANT))["spec"]["containers"]
    assert int(server["resources"]["limits"]["memory"]) == (2 + 42) * GIB
    (server,) = (await pod_of(spawner, NO_LEASE))["spec"]["containers"]
    assert int(server["resources"]["limits"]["memory"]) == 2 * GIB


async def test_the_broker_waits_as_long_as_the_hub_does_whatever_a_profile_sets(make):
    """The Hub begins to wait before a profile is applied."""

    async def applied() -> None:
        spawner.start_timeout, spawner.uid = 600, 1001

    spawner = make(start_timeout=60)
    spawner.load_user_options = applied
    await spawner.prepare_start()
    assert (spawner.patience_s(), spawner.server_uid()) == (30.0, 1001)


async def test_a_jobs_command_reaches_it_with_its_dollars_and_its_grace_is_the_pods(make):
    spawner = make("j0123456789-1")
    spawner.cmd = spawner.job_cmd
    grant = SpawnGrant(lease="abc-1", kind=Kind.TRAIN, env=ENV, devices=["GPU-1"], node="node-1", job=JOB)
    pod = await pod_of(spawner, grant)
    (server,) = pod["spec"]["containers"]
    given = variables(server)["GPUSHARE_JOB"]
    assert json.loads(given.replace("$$", "$"))["command"] == JOB.command
    assert given == escape(given.replace("$$", "$"))
    assert pod["spec"]["terminationGracePeriodSeconds"] >= 60
    assert server["args"] == [*spawner.job_cmd, "GPUSHARE_LEASE=abc-1"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"node": ""}, "the node ''"),
        ({"node": "a/../b"}, "the node 'a/../b'"),
        ({"mounts": [HostMount(path="/etc/kubernetes")]}, "host_dirs"),
        ({"mounts": [*GRANT.mounts, HostMount(path="/run/gpushare-x/a", read_only=False)]}, "host_dirs"),
    ],
    ids=str,
)
async def test_a_grant_that_names_no_node_or_a_foreign_folder_starts_nothing(make, change, named):
    names = ("lease", "kind", "env", "devices", "node", "mounts")
    given = {name: getattr(GRANT, name) for name in names} | change
    spawner = make()
    with pytest.raises(SpawnException):
        spawner.take_grant(SpawnGrant(**given))
    assert named in spawner.said[0]


@pytest.mark.parametrize("grant", [GRANT, NO_LEASE], ids=["with a lease", "without"])
async def test_only_a_pod_with_a_lease_has_to_be_placed_soon(make, monkeypatch, grant):
    async def slow(spawner: GPUShareKubeSpawner) -> str:
        assert spawner.modify_pod_hook is not hook, "the pod is checked after the site's hook"
        await asyncio.sleep(0.3)
        return "http://started"

    async def never(spawner: GPUShareKubeSpawner) -> bool:
        return False

    def hook(spawner: Any, pod: Any) -> Any:
        return pod

    monkeypatch.setattr(GPUShareMixin, "_start_server", slow)
    monkeypatch.setattr(GPUShareKubeSpawner, "_wait_until_placed", never)
    monkeypatch.setattr(GPUShareKubeSpawner, "_avoided", {})
    spawner = make()
    spawner.modify_pod_hook = hook
    spawner.take_grant(grant)
    if grant is NO_LEASE:
        assert await spawner._start_server() == "http://started"
        assert spawner.excluded_nodes() == []
    else:
        with pytest.raises(SpawnException):
            await spawner._start_server()
        assert spawner.excluded_nodes() == ["node-1"]
    assert spawner.modify_pod_hook is hook


async def test_the_page_says_how_far_the_broker_is(make, monkeypatch):
    monkeypatch.setattr(spawning, "_PROGRESS_POLL_S", 0.0)
    spawner, answers = make(), asyncio.Event()
    says = ["", "It is placed.", GpuShareError("no answer"), "It is placed.", "Others leave."]

    class Broker:
        async def get(self, path: str, _form: type, params: dict[str, str]) -> SpawnProgress:
            assert (path, params) == ("spawner/start", {"user": "ada", "server": "a"})
            if not says:
                answers.set()
                return SpawnProgress(message="")
            if isinstance(said := says.pop(0), Exception):
                raise said
            return SpawnProgress(message=said)

    async def ask(_spawner: GPUShareKubeSpawner, _request: object) -> SpawnGrant:
        await answers.wait()
        return GRANT

    monkeypatch.setattr(GPUShareMixin, "_ask", ask)
    monkeypatch.setattr(spawner, "_broker_client", Broker)
    monkeypatch.setattr(spawner, "_identity", lambda: ("ada", "a", ""))
    assert await asyncio.wait_for(spawner._ask(None), 10) == GRANT
    assert [event["message"] for event in spawner._events] == ["It is placed.", "Others leave."]


async def test_a_broker_at_a_unix_socket_is_refused_because_pods_do_not_reach_it(make):
    spawner = make()
    spawner.broker_url = "http+unix://%2Frun%2Fx.sock/services/gpushare"
    with pytest.raises(SpawnException):
        spawner.take_grant(NO_LEASE)
    assert "https://" in spawner.said[0]


async def test_the_user_id_of_a_site_is_a_number_or_a_function_of_one(make):
    assert make().server_uid() == 1000
    assert make(uid=1234).server_uid() == 1234
    assert make(uid=lambda spawner: 4321).server_uid() == 4321

    for uid in (None, lambda spawner: "1000"):
        spawner = make(uid=uid)
        with pytest.raises(SpawnException):
            spawner.server_uid()
        assert "c.KubeSpawner.uid" in spawner.said[0]


def test_a_folder_is_outside_unless_it_lies_below_one_of_the_sites():
    assert not is_outside("/run/gpushare/leases/a", ["/run/gpushare"])
    for path in ("/run/gpushare", "/run/gpushare/../x/y", "/run/gpushare2/a", "/etc/passwd", "/"):
        assert is_outside(path, ["/run/gpushare"]), path
