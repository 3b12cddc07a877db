"""Pods that use GPUs of a unit pool without being ours: there the pool grants and lends nothing.

==============================================  =====================================
pod, or process, on a GPU of the node           it is foreign
==============================================  =====================================
seat: in the namespace of seats                 no
reservation of KAI, for parts of a GPU          once no seat has had that GPU for
                                                `UNUSED_S`: a part is another pod's
any other pod to which the kubelet gave a GPU   yes
process without a lease                         yes: a part of a GPU can be another
                                                pod's beside a seat, which no list
                                                tells
kubelet or device helper do not say             yes
==============================================  =====================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from jupyter_gpushare.protocol.helper import Sample

# KAI makes a reservation before the seat connects, and ends it some time after.
UNUSED_S = 120.0


class ForeignPods:
    """Foreign pods of every node, as the helpers' last samples tell."""

    def __init__(
        self,
        namespace: str,
        reservations: str,
        samples: Callable[[], Mapping[str, Sample | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace``: of seats; ``reservations``: of KAI's pods that reserve GPUs."""
        self._namespace = namespace
        self._reservations = reservations
        self._samples = samples
        self._clock = clock
        self._unused: dict[tuple[str, str], float] = {}  # reservations without a seat, and since when

    def by_node(self) -> dict[str, str]:
        """Return what is foreign, by node, as a sentence has it; nodes without are left out."""
        now, samples = self._clock(), self._samples()
        unused = {(node, pod) for node, sample in samples.items() if sample for pod in self._idle(sample)}
        self._unused = {key: self._unused.get(key, now) for key in unused}
        found = {node: self._foreign(node, sample, now) for node, sample in samples.items()}
        return {node: said for node, said in found.items() if said}

    def _idle(self, sample: Sample) -> Iterator[str]:
        """Yield the names of KAI's reservations of GPUs that no seat has."""
        seated = {uuid for seat in sample.seats for uuid in seat.devices}
        for pod in sample.gpu_pods:
            if pod.namespace == self._reservations and not seated.intersection(pod.devices):
                yield pod.name

    def _foreign(self, node: str, sample: Sample | None, now: float) -> str:
        if sample is None or not sample.knows_gpu_pods:
            return "its device helper does not say which pods have GPUs"
        for pod in sample.gpu_pods:
            since = self._unused.get((node, pod.name), now)
            is_ours = pod.namespace in (self._namespace, self._reservations)
            if not is_ours or now - since >= UNUSED_S:
                return f"the pod {pod.namespace}/{pod.name} has a GPU there"
        process = next((each.name for device in sample.devices for each in device.unleased), None)
        return "" if process is None else f"a process without a lease ({process}) uses a GPU there"
