"""The engine and the devices of a Kubernetes cluster, built from `GPUShareKube`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from traitlets.config import Configurable

from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError, InvalidRequest
from jupyter_gpushare.kube.checks.cluster import find_missing
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.helpers import Helpers
from jupyter_gpushare.kube.cluster.nodes import ForeignPods, NodeDevices
from jupyter_gpushare.kube.cluster.seats import KubeSeats, followed_nodes
from jupyter_gpushare.kube.engine.kai import KaiEngine
from jupyter_gpushare.kube.settings import GPUShareKube

log = logging.getLogger("gpushare.broker")

# A broker starts even if the API server does not answer within this time: running work needs no API server.
_CHECK_S = 10.0


async def connect(broker: Configurable, policy: Policy, epoch: Callable[[], int]) -> KubeCluster:
    """Return the cluster that a broker's configuration names, after examining it.

    Raises:
        GpuShareError: a setting or a part of the cluster is missing; the text names it.
    """
    projects = queue_projects(policy)
    cluster = KubeCluster(GPUShareKube(parent=broker), epoch)
    try:
        await cluster.check(projects)
    except BaseException:
        await cluster.close()
        raise
    return cluster


class KubeCluster:
    """The engine, devices and connections of a broker with ``engine = "kai"``."""

    def __init__(self, kube: GPUShareKube, epoch: Callable[[], int]) -> None:
        """Raise `GpuShareError` if a setting is missing."""
        if not kube.seat_image:
            raise GpuShareError("c.GPUShareKube.seat_image is not set: it is the image of the device helper")
        self._client = ApiClient(kube.address())
        self._kube = kube
        nodes = followed_nodes(self._client, lambda: seats.notify())
        self._helpers = Helpers(self._client, kube.helpers(), nodes)
        self.devices = NodeDevices(self._helpers.addresses, epoch, pools=lambda: seats.units)
        seats = KubeSeats(self._client, kube.seat(), self.devices.seat_devices, epoch, nodes)
        foreign = ForeignPods(kube.namespace, kube.reservation_namespace, self.devices.samples)
        self.engine = KaiEngine(
            seats,
            self.devices.sleepable,
            time.monotonic,
            place_s=kube.place_timeout,
            seat_s=kube.seat_timeout,
            foreign=foreign.by_node,
        )

    async def check(self, projects: Sequence[Project]) -> None:
        """Check that the cluster has what sessions need; only log it if the API server does not answer.

        Raises:
            GpuShareError: a file with credentials cannot be used, or something is missing; the text names it.
        """
        await self._client.connect()
        try:
            async with asyncio.timeout(_CHECK_S):
                missing = await find_missing(self._client, self._kube, projects)
        except (KubeError, TimeoutError) as error:
            log.warning("the cluster cannot be examined: %s", str(error) or "no answer in time")
            return
        if missing:
            raise GpuShareError("; ".join(missing))

    async def run(self) -> None:
        """Follow the device helpers until cancelled."""
        await self._helpers.run()

    async def close(self) -> None:
        """Close all connections."""
        await self.devices.close()
        await self._client.close()


def queue_projects(policy: Policy) -> list[Project]:
    """Return the configured projects with quotas in GPUs, as Queues need them.

    Raises:
        InvalidRequest: a quota is a percentage.
    """
    for project in policy.projects:
        if project.quota_milli is None:
            raise InvalidRequest(
                "project %1: its quota is a percentage, and a Queue has a number of GPUs: write quota = 4",
                project.name,
            )
    return [project.project(0, None) for project in policy.projects]
