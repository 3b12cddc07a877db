"""The kubelet's list of pods with GPUs, from a gRPC server that is not ours."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from jupyter_gpushare.gpu.leases import pod_resources
from jupyter_gpushare.gpu.leases.pod_resources import KubeletPods, Unreadable, gpu_pods, listed
from jupyter_gpushare.protocol.seats import GpuPod


def field(number: int, value: bytes) -> bytes:
    size, length = len(value), b""
    while size >= 128:
        length += bytes((size & 127 | 128,))
        size >>= 7
    return bytes((number << 3 | 2,)) + length + bytes((size,)) + value


def pod(namespace: str, name: str, *ids: str, resource: str = "nvidia.com/gpu") -> bytes:
    """A ``PodResources``, with a topology and CPU ids that nothing here reads."""
    devices = (
        field(1, resource.encode())
        + b"".join(field(2, each.encode()) for each in ids)
        + field(3, b"\x08\x01")
    )
    container = field(1, b"main") + field(2, devices) + b"\x18\x05"
    return field(1, field(1, name.encode()) + field(2, namespace.encode()) + field(3, container))


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
    answer = (
        pod("gpushare", "seat-1", "GPU-1", "GPU-2")
        + pod("web", "nginx")
        + pod("net", "nic", "eth0", resource="vendor.com/nic")
    )
    assert gpu_pods(listed(kubelet(answer))) == (
        GpuPod(namespace="gpushare", name="seat-1", devices=("GPU-1", "GPU-2")),
    )


def test_a_long_answer_is_read_whole(kubelet):
    many = b"".join(pod("web", f"nginx-{n}" + "x" * 200) for n in range(4000)) + pod("a", "b", "GPU-1")
    assert len(many) > 900_000
    assert gpu_pods(listed(kubelet(many))) == (GpuPod(namespace="a", name="b", devices=("GPU-1",)),)


def test_no_pods_are_an_answer(kubelet):
    known = KubeletPods(kubelet(b""))
    assert known.pods() is None
    known.look()
    assert known.pods() == ()


def test_a_kubelet_that_refuses_is_no_empty_list(kubelet, tmp_path: Path):
    known = KubeletPods(kubelet(b"", "Other"))
    known.look()
    assert known.pods() is None
    with pytest.raises(OSError, match="No such file"):
        listed(tmp_path / "none")


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
        with pytest.raises((Unreadable, OSError)):
            listed(path)
        thread.join()


def test_what_is_no_list_of_pods_is_refused():
    whole = pod("a", "b", "GPU-1")
    for cut in range(1, len(whole)):
        with pytest.raises(Unreadable):
            gpu_pods(whole[:cut])
    with pytest.raises(Unreadable):
        gpu_pods(b"\x0b")
    assert gpu_pods(b"\x09" + bytes(8) + b"\x0d" + bytes(4) + whole) == gpu_pods(whole)


def test_more_pods_than_a_node_has_are_refused(monkeypatch):
    monkeypatch.setattr(pod_resources, "MAX_PODS", 1)
    with pytest.raises(Unreadable, match="more than 1"):
        gpu_pods(pod("a", "b", "GPU-1") + pod("a", "c", "GPU-2"))


def test_a_list_that_grew_old_is_not_known(kubelet, monkeypatch):
    known = KubeletPods(kubelet(pod("a", "b", "GPU-1")))
    known.look()
    assert known.pods() is not None
    monkeypatch.setattr(pod_resources, "STALE_S", 0.0)
    assert known.pods() is None
