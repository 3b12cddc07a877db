"""Traits of the engine for Kubernetes: the API server, seats, and the timeouts of a start."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

from traitlets import Dict, Float, Integer, List, TraitError, Unicode, validate
from traitlets.config import Configurable

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.kube.cluster.api_server import ApiServer
from jupyter_gpushare.kube.cluster.helpers import HelperPods
from jupyter_gpushare.kube.cluster.objects import SeatPod
from jupyter_gpushare.kube.engine.kai import PLACE_S, SEAT_S
from jupyter_gpushare.protocol.helper_tls import BROKER, TlsFiles

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SITE = SeatPod()


class GPUShareKube(Configurable):
    """The broker on a Kubernetes cluster with KAI-Scheduler."""

    namespace = Unicode(
        _SITE.namespace, help="Namespace of seats and of the broker; users must not create anything in it."
    ).tag(config=True)
    reservation_namespace = Unicode(
        "kai-resource-reservation",
        help="Namespace of the pods with which KAI reserves GPUs that it gives out in parts.",
    ).tag(config=True)
    kubeconfig = Unicode(
        "",
        help="Kubeconfig file whose current context is the cluster; by default the service account of the "
        "pod that the broker runs in.",
    ).tag(config=True)
    api_server = Unicode(
        "", help="URL of the API server, with token_file and ca_file instead of a kubeconfig file."
    ).tag(config=True)
    token_file = Unicode(
        "", help="With api_server: file with a token, which is read before each request."
    ).tag(config=True)
    ca_file = Unicode(
        "",
        help="With api_server: file with the certificate authority of the API server; by default those of "
        "the system.",
    ).tag(config=True)
    scheduler_name = Unicode(_SITE.scheduler_name, help="Name of KAI's scheduler in pods.").tag(config=True)
    seat_image = Unicode("", help="Image of seats: one with this package, as that of the device helper.").tag(
        config=True
    )
    seat_runtime_class = Unicode(_SITE.runtime_class, help="Runtime class of seats.").tag(config=True)
    seat_grace_s = Integer(
        _SITE.grace_s,
        min=30,
        max=3600,
        help="Seconds that a seat may take to end once KAI evicts it: the maximum time to suspend its lease. "
        "10 s before the end, the processes of a lease that could not be suspended are ended.",
    ).tag(config=True)
    seat_resources = Dict(
        {kind: dict(values) for kind, values in _SITE.resources.items()},
        help="Requests and limits of a seat's container for CPU and memory.",
    ).tag(config=True)
    seat_tolerations = List(Dict(), [], help="Tolerations of seats, such as for nvidia.com/gpu.").tag(
        config=True
    )
    seat_pull_secrets = List(
        Unicode(), [], help="Names of the Secrets with which seats pull their image, in their namespace."
    ).tag(config=True)
    host_dir = Unicode(
        _SITE.host_dir, help="Folder of the device helper on each node: its sockets and lease directories."
    ).tag(config=True)
    helper_selector = Unicode(
        "app.kubernetes.io/component=gpushare-helper",
        help="Labels of the pods of the device helpers, one on each node with GPUs, in the same namespace.",
    ).tag(config=True)
    helper_port = Integer(
        7710, min=1, max=65_535, help="TCP port of the device helpers (their option --listen)."
    ).tag(config=True)
    helper_certificate_file = Unicode(
        "",
        help=f"File with the certificate that the broker shows to device helpers, for the name {BROKER}. "
        "It is read again when it changes, like helper_key_file and helper_ca_file.",
    ).tag(config=True)
    helper_key_file = Unicode(
        "", help="File with the key of helper_certificate_file, which no other user may read."
    ).tag(config=True)
    helper_ca_file = Unicode(
        "",
        help="File with the certificate of the authority that signs the certificates of the device helpers "
        "and the broker. This authority must sign these names for nobody else.",
    ).tag(config=True)
    place_timeout = Float(
        PLACE_S,
        help="Seconds in which KAI must decide about the seat of a session that starts: choose a node, evict "
        "others, or refuse it. A refusal by KAI refuses the start 2 s later; without a decision the start is "
        "refused after this time. If this is less than a cycle of KAI, KAI may evict others for a start that "
        "is already refused. A longer time blocks one of the Hub's starts for longer while KAI is away.",
    ).tag(config=True)
    seat_timeout = Float(
        SEAT_S,
        help="Seconds from KAI's decision in which a seat must start. In this time evicted work ends, KAI "
        "starts its reservation pod if a GPU is shared for the first time, and a node pulls the image of its "
        "first seat. A longer time suits work that takes long to end. Together with place_timeout it must be "
        "at least 2 s less than half of the spawner's start_timeout, after which the Hub gives up a start.",
    ).tag(config=True)

    @validate("namespace")
    def _dns_label(self, proposal: Any) -> str:
        if not _LABEL.fullmatch(proposal.value):
            raise TraitError(f"GPUShareKube.namespace is the name of a namespace, not {proposal.value!r}")
        return str(proposal.value)

    @validate("place_timeout", "seat_timeout")
    def _above_0(self, proposal: Any) -> float:
        if not 0 < proposal.value <= 3600:
            raise TraitError(f"GPUShareKube.{proposal.trait.name} is more than 0 and at most 3600 seconds")
        return float(proposal.value)

    @validate("api_server")
    def _url(self, proposal: Any) -> str:
        if proposal.value and not re.match(r"https?://[^/]+/?$", proposal.value):
            raise TraitError(f"GPUShareKube.api_server is like https://10.0.0.1:6443, not {proposal.value!r}")
        return str(proposal.value).rstrip("/")

    def address(self) -> ApiServer:
        """Return the configured API server.

        Raises:
            KubeError: none is configured; the text says what to change.
        """
        if self.api_server:
            return ApiServer(
                url=self.api_server,
                token_file=Path(self.token_file) if self.token_file else None,
                ca_file=Path(self.ca_file) if self.ca_file else None,
            )
        return ApiServer(kubeconfig=Path(self.kubeconfig)) if self.kubeconfig else ApiServer.of_pod()

    def helpers(self) -> HelperPods:
        """Return how to find the device helpers, and the broker's certificates for them.

        Raises:
            GpuShareError: a certificate or the key is not configured or not usable.
        """
        files = {}
        for name in ("certificate", "key", "ca"):
            if not (path := getattr(self, f"helper_{name}_file")):
                raise GpuShareError("c.GPUShareKube.helper_%1_file is not set", name)
            files[name] = Path(path)
        tls = TlsFiles(certificate=files["certificate"], key=files["key"], authority=files["ca"])
        tls.context(ssl.Purpose.SERVER_AUTH)
        return HelperPods(
            namespace=self.namespace,
            selector=self.helper_selector,
            port=self.helper_port,
            tls=tls,
        )

    def seat(self) -> SeatPod:
        """Return the settings that all seats have in common."""
        return SeatPod(
            namespace=self.namespace,
            scheduler_name=self.scheduler_name,
            image=self.seat_image,
            runtime_class=self.seat_runtime_class,
            grace_s=self.seat_grace_s,
            host_dir=self.host_dir,
            resources=self.seat_resources,
            tolerations=tuple(self.seat_tolerations),
            pull_secrets=tuple(self.seat_pull_secrets),
        )
