"""Pods of this node that have GPUs, as the kubelet's pod resources API lists them.

The API is gRPC on a unix socket of the node, with the messages of `pod_resources.proto`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol.seats import GpuPod

log = logging.getLogger(__name__)

REFRESH_S = 5.0
# When the kubelet has not answered for this long, the last list of pods no longer counts.
STALE_S = 30.0
ANSWER_S = 5.0
MAX_BYTES = 4 << 20
MAX_PODS = 256
RESOURCES = "nvidia.com/"


class Unreadable(Exception):
    """The kubelet gave no valid answer."""


class KubeletPods:
    """The pods with GPUs as of the kubelet's last answer; `run` keeps the list up to date."""

    def __init__(self, path: Path) -> None:
        """``path`` is the socket of the kubelet.

        Raises:
            GpuShareError: grpcio or protobuf is not installed.
        """
        self._path = path
        self._response = _response_class()
        self._known: tuple[GpuPod, ...] = ()
        self._at = float("-inf")
        self._failure = ""

    def pods(self) -> tuple[GpuPod, ...] | None:
        """Return the pods that have GPUs, or None if the kubelet has not answered for `STALE_S`."""
        return self._known if time.monotonic() - self._at < STALE_S else None

    def run(self) -> None:
        """Refresh the list every `REFRESH_S`, for ever."""
        while True:
            self.refresh()
            time.sleep(REFRESH_S)

    def refresh(self) -> None:
        """Query the kubelet once; log a failure unless it is the same as before."""
        try:
            self._known, self._at, self._failure = self.ask(), time.monotonic(), ""
        except Unreadable as error:
            if str(error) != self._failure:
                log.warning("%s does not list the pods with GPUs: %s", self._path, error)
            self._failure = str(error)

    def ask(self) -> tuple[GpuPod, ...]:
        """Query the kubelet for the pods with GPUs and return them.

        Raises:
            Unreadable: no valid answer came within `ANSWER_S`, or it has more than `MAX_PODS` pods.
        """
        import grpc

        options = [("grpc.max_receive_message_length", MAX_BYTES)]
        with grpc.insecure_channel(f"unix:{self._path}", options=options) as kubelet:
            call = kubelet.unary_unary("/v1.PodResourcesLister/List", bytes, self._response.FromString)
            try:
                answer = call(b"", timeout=ANSWER_S)
            except grpc.RpcError as error:
                raise Unreadable(error.details()) from None
        return _gpu_pods(answer)


def _response_class() -> Any:
    """Return the class of ``ListPodResourcesResponse``, compiled from `pod_resources.proto` at build time.

    Raises:
        GpuShareError: grpcio or protobuf is not installed.
    """
    try:
        import grpc  # noqa: F401
        from google.protobuf.descriptor_pb2 import FileDescriptorSet
        from google.protobuf.message_factory import GetMessages
    except ImportError as error:
        raise GpuShareError(
            '--pod-resources needs packages that are missing here (%1): pip install "jupyter-gpushare[node]"',
            error,
        ) from error
    compiled = FileDescriptorSet.FromString(Path(__file__).with_suffix(".binpb").read_bytes())
    return GetMessages(compiled.file)["v1.ListPodResourcesResponse"]


def _gpu_pods(answer: Any) -> tuple[GpuPod, ...]:
    found = []
    for pod in answer.pod_resources:
        ids = tuple(
            each
            for container in pod.containers
            for devices in container.devices
            if devices.resource_name.startswith(RESOURCES)
            for each in devices.device_ids
        )
        if ids:
            found.append(GpuPod(namespace=pod.namespace, name=pod.name, devices=ids))
    if len(found) > MAX_PODS:
        raise Unreadable(f"more than {MAX_PODS} pods have GPUs")
    return tuple(found)
