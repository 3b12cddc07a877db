"""Objects of the Hub's namespace, as kubectl prints them, and the rules of its network policies."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.objects import OtherObject, Struct


class Expression(Struct, frozen=True):
    """One requirement of a label selector."""

    key: str
    operator: str
    values: list[str] = []

    def matches(self, labels: dict[str, str]) -> bool:
        """Return whether labels meet this requirement."""
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
        """Return whether labels meet all requirements."""
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
    """A port of a rule, by number or name; None is every port.  ``end_port`` is the last of a range."""

    port: int | str | None = None
    end_port: int | None = None
    protocol: str = "TCP"

    def allows(self, ports: set[int | str]) -> bool:
        """Return whether the rule allows TCP to one of these ports."""
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
    """One rule; an empty list of peers or ports means all."""

    to: list[Peer] = []
    from_: list[Peer] = msgspec.field(default_factory=list, name="from")
    ports: list[PolicyPort] = []


class NetworkPolicySpec(Struct, frozen=True):
    """The traffic that the selected pods may receive and send."""

    pod_selector: Selector = Selector()
    policy_types: tuple[str, ...] = ("Ingress",)
    ingress: list[PolicyRule] = []
    egress: list[PolicyRule] = []


class _PrintedList(msgspec.Struct):
    items: list[OtherObject]


def parse_list(content: bytes) -> list[OtherObject]:
    """Return the objects in a list that ``kubectl get -o json`` printed.

    Raises:
        KubeError: the content is not such a list.
    """
    try:
        return msgspec.json.decode(content, type=_PrintedList).items
    except msgspec.MsgspecError as error:
        raise _malformed(error) from None


def network_policies(objects: Iterable[OtherObject]) -> list[NetworkPolicySpec]:
    """Return the network policies among these objects.

    Raises:
        KubeError: a network policy is malformed.
    """
    try:
        return [msgspec.convert(x.spec, NetworkPolicySpec) for x in objects if x.kind == "NetworkPolicy"]
    except msgspec.MsgspecError as error:
        raise _malformed(error) from None


def _malformed(error: msgspec.MsgspecError) -> KubeError:
    return KubeError(f"this is not what kubectl get -o json prints: {error}")
