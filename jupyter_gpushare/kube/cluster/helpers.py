"""Device helpers of a cluster: one pod on each node, found by label."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_gpushare.backends.helper_client import HelperAddress, NodeAddress
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.objects import PODS, Node, Pod
from jupyter_gpushare.kube.cluster.reflector import Reflector
from jupyter_gpushare.protocol.helper_tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperPods:
    """A site's settings of its helper pods; ``tls`` are the broker's files for connections to them."""

    namespace: str
    selector: str
    port: int
    tls: TlsFiles


class Helpers:
    """Addresses of the helpers by node, kept up to date.

    ``nodes`` is a copy of the cluster's nodes, which the caller keeps up to date.
    """

    def __init__(self, client: ApiClient, site: HelperPods, nodes: Reflector[Node]) -> None:
        self._site = site
        self._pods: Reflector[Pod] = Reflector(client, PODS, namespace=site.namespace, selector=site.selector)
        self._nodes = nodes
        self._known: dict[str, HelperAddress] = {}

    async def run(self) -> None:
        """Follow the helper pods until cancelled."""
        await self._pods.run()

    def addresses(self) -> dict[str, HelperAddress]:
        """Return the addresses of the helpers by node name.

        While a helper is being replaced, its last address stays as long as the cluster has the node.  The
        helper does not answer then, but the processes on the node continue.
        """
        kept = {node: address for node, address in self._known.items() if node in self._nodes.objects}
        self._known = kept | running_helpers(self._pods.objects.values(), self._site)
        return dict(self._known)


def running_helpers(pods: Iterable[Pod], site: HelperPods) -> dict[str, HelperAddress]:
    """Return the addresses of the helpers whose pods run, by node name."""
    return {
        pod.spec.node_name: NodeAddress(
            host=pod.status.pod_ip, port=site.port, node=pod.spec.node_name, tls=site.tls
        )
        for pod in pods
        if pod.status.phase == "Running" and pod.status.pod_ip and not pod.metadata.deletion_timestamp
    }
