"""The kubelet's list of pods with GPUs, from a gRPC server that is not ours."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.kube.node import pod_resources
from jupyter_gpushare.kube.node.pod_resources import KubeletPods, Unreadable
from jupyter_gpushare.protocol.seats import GpuPod


def pod(namespace: str, name: str, *ids: str, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    devices = {"resource_name": resource, "device_ids": ids}
    return {"namespace": namespace, "name": name, "containers": [{"devices": [devices]}]}


def answer(*pods: dict[str, Any]) -> bytes:
    return bytes(pod_resources._response_class()(pod_resources=pods).SerializeToString())


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Callable[[bytes], Path]]:
    """A gRPC server that answers ``List`` with these bytes."""
    servers = []

    def serve(answer: bytes, method: str = "List") -> Path:
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_send_message_length", -1)])
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1.PodResourcesLister", {method: handler})]
        )
        path = tmp_path / "kubelet.sock"
        server.add_insecure_port(f"unix:{path}")
        server.start()
        servers.append(server)
        return path

    yield serve
    for server in servers:
        server.stop(None).wait()


def test_pods_with_gpus_are_listed_and_others_are_not(kubelet):
    pods = (
        pod("gpushare", "seat-1", "GPU-1", "GPU-2"),
        pod("web", "nginx"),
        pod("net", "nic", "eth0", resource="vendor.com/nic"),
    )
    assert KubeletPods(kubelet(answer(*pods))).ask() == (
        GpuPod(namespace="gpushare", name="seat-1", devices=("GPU-1", "GPU-2")),
    )


def test_fields_of_a_newer_kubelet_are_passed_over(kubelet):
    field_9 = b"\x4a\x03new"  # of three bytes
    assert KubeletPods(kubelet(answer(pod("a", "b", "GPU-1")) + field_9)).ask()


def test_a_long_answer_is_read_whole_and_a_longer_one_is_refused(kubelet, monkeypatch):
    many = answer(*(pod("web", f"nginx-{n}" + "x" * 200) for n in range(4000)), pod("a", "b", "GPU-1"))
    assert len(many) > 900_000
    known = KubeletPods(kubelet(many))
    assert known.ask() == (GpuPod(namespace="a", name="b", devices=("GPU-1",)),)
    monkeypatch.setattr(pod_resources, "MAX_BYTES", len(many) - 1)
    with pytest.raises(Unreadable, match="larger than max"):
        known.ask()


def test_no_pods_are_an_answer(kubelet):
    known = KubeletPods(kubelet(b""))
    assert known.pods() is None
    known.refresh()
    assert known.pods() == ()


def test_a_kubelet_that_refuses_is_no_empty_list(kubelet, tmp_path: Path, caplog):
    known = KubeletPods(kubelet(b"", "Other"))
    known.refresh()
    known.refresh()
    assert known.pods() is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert "kubelet.sock does not list the pods with GPUs: Method not found" in said
    with pytest.raises(Unreadable, match="No such file"):
        KubeletPods(tmp_path / "none").ask()


def test_a_kubelet_that_does_not_answer_is_waited_for_no_longer_than_the_limit(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pod_resources, "ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "peer.sock"))
        server.listen()
        with pytest.raises(Unreadable, match="Deadline"):
            KubeletPods(tmp_path / "peer.sock").ask()


def test_without_its_packages_the_extra_is_named(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(GpuShareError, match=r'pip install "jupyter-gpushare\[node\]"'):
        KubeletPods(tmp_path / "kubelet.sock")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(9), b"\xff" * 60])
def test_a_peer_that_is_no_kubelet_is_no_empty_list(tmp_path: Path, said: bytes):
    path = tmp_path / "peer.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def talk() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(said)

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(Unreadable):
            KubeletPods(path).ask()
        thread.join()


def test_what_is_no_list_of_pods_is_refused(kubelet):
    with pytest.raises(Unreadable, match="deserializing"):
        KubeletPods(kubelet(answer(pod("a", "b", "GPU-1"))[:-1])).ask()


def test_more_pods_than_a_node_has_are_refused(kubelet, monkeypatch):
    monkeypatch.setattr(pod_resources, "MAX_PODS", 1)
    with pytest.raises(Unreadable, match="more than 1"):
        KubeletPods(kubelet(answer(pod("a", "b", "GPU-1"), pod("a", "c", "GPU-2")))).ask()


def test_a_list_that_grew_old_is_not_known(kubelet, monkeypatch):
    known = KubeletPods(kubelet(answer(pod("a", "b", "GPU-1"))))
    known.refresh()
    assert known.pods() is not None
    monkeypatch.setattr(pod_resources, "STALE_S", 0.0)
    assert known.pods() is None
