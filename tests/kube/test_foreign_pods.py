"""Pods with GPUs of a unit pool that are not ours."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpushare.kube.cluster.nodes import UNUSED_S, ForeignPods
from jupyter_gpushare.protocol.helper import DeviceSample, Sample, UnleasedProcess
from jupyter_gpushare.protocol.seats import GpuPod, SeatSample

SEAT = GpuPod(namespace="gpushare", name="seat-1", devices=("GPU-1",))
RESERVATION = GpuPod(namespace="kai", name="gpu-reservation-1", devices=("GPU-1",))


def sample(*pods: GpuPod, **more: Any) -> Sample:
    given = {"at": 0.0, "devices": (), "leases": (), "host_available_bytes": 0, "host_saved_bytes": 0}
    return Sample(**given | {"gpu_pods": pods, "knows_gpu_pods": True} | more)


def found(one: Sample | None) -> dict[str, str]:
    return ForeignPods("gpushare", "kai", lambda: {"n0": one}).by_node()


def test_seats_and_reservations_of_their_gpus_are_ours():
    seat = SeatSample(seat="seat-2", lease="b1", devices=("GPU-1",))
    assert found(sample(SEAT, RESERVATION, seats=(seat,))) == {}


def test_any_other_pod_with_a_gpu_is_foreign():
    other = GpuPod(namespace="ml", name="train", devices=("GPU-2",))
    assert found(sample(SEAT, other)) == {"n0": "the pod ml/train has a GPU there"}


@pytest.mark.parametrize("said", [None, sample(knows_gpu_pods=False)], ids=["silent", "no kubelet"])
def test_a_node_that_does_not_say_is_not_taken_for_empty(said):
    assert found(said) == {"n0": "its device helper does not say which pods have GPUs"}


def test_a_reservation_that_no_seat_has_used_for_long_is_another_pods():
    now, seats = 0.0, ()
    pods = ForeignPods("gpushare", "kai", lambda: {"n0": sample(RESERVATION, seats=seats)}, lambda: now)
    assert pods.by_node() == {}
    now = UNUSED_S - 1
    assert pods.by_node() == {}
    seats = (SeatSample(seat="seat-2", lease="b1", devices=("GPU-1",)),)
    assert pods.by_node() == {}
    now, seats = UNUSED_S + 1, ()
    assert pods.by_node() == {}
    now = 3 * UNUSED_S
    assert pods.by_node() == {"n0": "the pod kai/gpu-reservation-1 has a GPU there"}


def test_a_process_without_a_lease_is_foreign():
    process = UnleasedProcess(process="1-2", pid=1, uid=0, name="python", used_bytes=1, kept="")
    device = DeviceSample(
        uuid="GPU-1", used_bytes=1, utilization_percent=0, healthy=True, unleased=(process,)
    )
    assert "(python)" in found(sample(SEAT, devices=(device,)))["n0"]
