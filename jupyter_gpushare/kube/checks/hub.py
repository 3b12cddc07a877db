"""Checks of the Hub's namespace, from the output of ``kubectl get -o json``.

The broker has no right to read that namespace and needs none: an administrator pipes the objects in.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_gpushare.cli.checks import Check, fail, named, ok, warn
from jupyter_gpushare.kube.checks.surroundings import NetworkPolicySpec, Peer, PolicyRule, network_policies
from jupyter_gpushare.kube.cluster.objects import OtherObject

COMMAND = "kubectl -n HUB get deployments,persistentvolumeclaims,networkpolicies -o json"
# Labels of pods and claims in JupyterHub's chart, and of the broker in ours.
_COMPONENT = "component"
BROKER = {"app.kubernetes.io/name": "gpushare-broker"}
_USER = "hub.jupyter.org/username"
_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class BrokerPod:
    """The broker as network policies refer to it; ``address`` is empty if unknown."""

    namespace: str
    address: str
    http_port: int
    tls_port: int


def hub_checks(objects: Sequence[OtherObject], broker: BrokerPod) -> list[Check]:
    """Return one check for each part of the Hub's namespace that can be wrong.

    Raises:
        KubeError: a network policy is malformed.
    """
    return named(
        {
            "hub-scheduler": _scheduler([each for each in objects if each.kind == "Deployment"]),
            "hub-homes": _homes([each for each in objects if each.kind == "PersistentVolumeClaim"]),
            "hub-network": _network(network_policies(objects), broker),
        }
    )


def not_examined() -> list[Check]:
    """Return a check that says that the Hub's namespace was not examined, and how to examine it."""
    advice = f"{COMMAND} | gpushare kube check --hub -"
    return named({"hub": warn("The Hub's namespace was not examined.", advice)})


def _scheduler(deployments: list[OtherObject]) -> Check:
    for each in deployments:
        if each.metadata.labels.get(_COMPONENT) == "user-scheduler" and each.field("replicas") != 0:
            return fail(
                f"JupyterHub's own scheduler ({each.metadata.name}) places servers.",
                "set scheduling.userScheduler.enabled to false in the values of JupyterHub's chart",
            )
    return ok("Servers are placed by the cluster's own scheduler.")


def _homes(claims: list[OtherObject]) -> Check:
    homes = [each for each in claims if each.metadata.labels.get(_COMPONENT) == "singleuser-storage"]
    of_one_node = (each for each in homes if "ReadWriteMany" not in (each.field("accessModes") or ()))
    if single := [each.metadata.name for each in of_one_node]:
        return fail(
            f"Homes that one node at a time can mount: {_some(single)}. A job runs on another one.",
            "make them ReadWriteMany (singleuser.storage.dynamic.storageAccessModes)",
        )
    of_user: dict[str, set[str]] = defaultdict(set)
    for each in homes:
        of_user[each.metadata.annotations.get(_USER, each.metadata.name)].add(each.metadata.name)
    if several := [user for user, names in of_user.items() if len(names) > 1]:
        return fail(
            f"A home for each server, of {_some(several)}: a second server begins with an empty one.",
            "set singleuser.storage.dynamic.pvcNameTemplate to claim-{username}",
        )
    return ok(f"{len(homes)} homes, one for each user." if homes else "There is no home yet.")


def _network(policies: list[NetworkPolicySpec], broker: BrokerPod) -> Check:
    blocked = [
        f"{component} to the broker's port {port}"
        for component, port in (
            ("singleuser-server", broker.tls_port),
            ("hub", broker.tls_port),
            ("proxy", broker.http_port),
        )
        if not _is_allowed(policies, component, "Egress", broker, {port})
    ]
    if not _is_allowed(policies, "hub", "Ingress", broker, {8081, "http"}):
        blocked.append("the broker to the Hub's port 8081")
    if blocked:
        return fail(
            f"Network policies of the Hub's namespace cut: {', '.join(blocked)}.",
            "add the rules of helm-values/z2jh.yaml (networkPolicy)",
        )
    return ok("Its network policies let the Hub, its proxy and servers reach the broker.")


def _is_allowed(
    policies: list[NetworkPolicySpec],
    component: str,
    direction: str,
    broker: BrokerPod,
    ports: set[int | str],
) -> bool:
    matching = [
        each
        for each in policies
        if each.pod_selector.matches({_COMPONENT: component, "app": "jupyterhub"} | _release(each))
        and direction in each.policy_types
    ]
    rules = [rule for spec in matching for rule in (spec.egress if direction == "Egress" else spec.ingress)]
    return not matching or any(_allows(rule, direction, broker, ports) for rule in rules)


def _release(policy: NetworkPolicySpec) -> dict[str, str]:
    """Return the labels of a policy's release: those that it selects besides the component."""
    labels = policy.pod_selector.match_labels
    return {key: value for key, value in labels.items() if key != _COMPONENT}


def _allows(rule: PolicyRule, direction: str, broker: BrokerPod, ports: set[int | str]) -> bool:
    peers = rule.to if direction == "Egress" else rule.from_
    allows_port = not rule.ports or any(each.allows(ports) for each in rule.ports)
    return allows_port and (not peers or any(_is_broker(peer, broker) for peer in peers))


def _is_broker(peer: Peer, broker: BrokerPod) -> bool:
    if peer.ip_block is not None:
        return (
            bool(broker.address)
            and _in(peer.ip_block.cidr, broker.address)
            and not any(_in(each, broker.address) for each in peer.ip_block.except_)
        )
    if peer.namespace_selector is None or not peer.namespace_selector.matches({_NAMESPACE: broker.namespace}):
        return False
    return peer.pod_selector is None or peer.pod_selector.matches(BROKER)


def _in(network: str, address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5])
