"""Objects of other installations that leases depend on: the fields that checks read.

NVIDIA's GPU operator; and of the Hub's namespace deployments, claims and network policies.
"""

from __future__ import annotations

import msgspec

from jupyter_gpushare.backends.kubernetes.api_server import KubeError
from jupyter_gpushare.backends.kubernetes.objects import Object, Struct

ENV_ACCEPTED = "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"


class Variable(Struct, frozen=True):
    """A variable of an environment."""

    name: str
    value: str = ""


class Toolkit(Struct, frozen=True):
    """NVIDIA's container toolkit."""

    env: list[Variable] = []


class Cdi(Struct, frozen=True):
    """How containers get devices."""

    nri_plugin_enabled: bool = msgspec.field(default=False, name="nriPluginEnabled")


class ClusterPolicySpec(Struct, frozen=True):
    """Settings of the GPU operator."""

    cdi: Cdi = Cdi()
    toolkit: Toolkit = Toolkit()


class ClusterPolicy(Object, frozen=True):
    """An installation of the GPU operator (``nvidia.com/v1``)."""

    spec: ClusterPolicySpec = ClusterPolicySpec()

    @property
    def takes_variable(self) -> bool:
        """Whether a container without a request for a GPU may name its GPUs in the environment."""
        said = {variable.name: variable.value for variable in self.spec.toolkit.env}
        return said.get(ENV_ACCEPTED, "true").lower() != "false"


class DeploymentSpec(Struct, frozen=True):
    """How many pods a deployment has."""

    replicas: int = 1


class Deployment(Object, frozen=True):
    """A deployment."""

    spec: DeploymentSpec = DeploymentSpec()


class ClaimSpec(Struct, frozen=True):
    """How a volume can be mounted."""

    access_modes: list[str] = []


class Claim(Object, frozen=True):
    """A claim of a volume."""

    spec: ClaimSpec = ClaimSpec()


class Expression(Struct, frozen=True):
    """One requirement of a label selector."""

    key: str
    operator: str
    values: list[str] = []

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether labels meet it."""
        match self.operator:
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case "In":
                return labels.get(self.key) in self.values
            case _:
                return labels.get(self.key) not in self.values


class Selector(Struct, frozen=True):
    """A label selector; an empty one matches everything."""

    match_labels: dict[str, str] = {}
    match_expressions: list[Expression] = []

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether labels meet all of it."""
        equal = self.match_labels.items() <= labels.items()
        return equal and all(each.matches(labels) for each in self.match_expressions)


class IpBlock(Struct, frozen=True):
    """A range of addresses."""

    cidr: str
    except_: list[str] = msgspec.field(default_factory=list, name="except")


class Peer(Struct, frozen=True):
    """The other side of a rule."""

    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None
    ip_block: IpBlock | None = None


class PolicyPort(Struct, frozen=True):
    """A port of a rule, by number or name; None: every port.  ``end_port``: the last of a range."""

    port: int | str | None = None
    end_port: int | None = None
    protocol: str = "TCP"

    def lets(self, ports: set[int | str]) -> bool:
        """Return whether TCP to one of these ports is let through."""
        if self.protocol != "TCP":
            return False
        if self.port is None or self.port in ports:
            return True
        first, last = self.port, self.end_port
        return (
            isinstance(first, int)
            and last is not None
            and any(isinstance(port, int) and first <= port <= last for port in ports)
        )


class PolicyRule(Struct, frozen=True):
    """One rule: peers and ports; a side that names none means all."""

    to: list[Peer] = []
    from_: list[Peer] = msgspec.field(default_factory=list, name="from")
    ports: list[PolicyPort] = []


class NetworkPolicySpec(Struct, frozen=True):
    """What may reach the selected pods, and what they may reach."""

    pod_selector: Selector = Selector()
    policy_types: tuple[str, ...] = ("Ingress",)
    ingress: list[PolicyRule] = []
    egress: list[PolicyRule] = []


class NetworkPolicy(Object, frozen=True):
    """A network policy."""

    spec: NetworkPolicySpec = NetworkPolicySpec()


_KINDS: dict[str, type[Object]] = {
    "Deployment": Deployment,
    "PersistentVolumeClaim": Claim,
    "NetworkPolicy": NetworkPolicy,
}


class _Kind(msgspec.Struct):
    kind: str = ""


class _PrintedList(msgspec.Struct):
    items: list[msgspec.Raw]


def parse_list(content: bytes) -> list[Object]:
    """Return the deployments, claims and network policies in a list that ``kubectl get -o json`` printed.

    Raises:
        KubeError: it is no such list.
    """
    found = []
    try:
        for raw in msgspec.json.decode(content, type=_PrintedList).items:
            if kind := _KINDS.get(msgspec.json.decode(raw, type=_Kind).kind):
                found.append(msgspec.json.decode(raw, type=kind))
    except msgspec.MsgspecError as error:
        raise KubeError(f"this is not what kubectl get -o json prints: {error}") from None
    return found
