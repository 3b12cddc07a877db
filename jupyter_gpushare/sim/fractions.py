"""Fill a cluster with pods that request parts of GPUs, until they request more than exists.

This is the set-up of the published comparison (FGD, USENIX ATC'23; the openb trace
of 2023).  The pods of the list are shuffled, and more pods are drawn from it at
random until the requested GPUs reach `LOAD` of the cluster.  Pods arrive one by one,
never leave, and are dropped if they do not fit.  CPU, memory and GPU model bind as
well.  The comparison is about the allocated part of all GPUs when the requests
reach the capacity of the cluster.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp

from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.sim.traces import Stock, TracePod

# The requested GPUs, as a part of the cluster's, when the last pod has arrived.
LOAD = 1.3


# (score, rest of the node), of which the least is taken; None if the pod does not fit.
Choice = tuple[tuple[float, ...], Stock] | None
Choose = Callable[[Stock, TracePod], Choice]


@dataclass(frozen=True, slots=True)
class Filled:
    """Allocation over a run."""

    pods: int  # number of arrived pods
    dropped: int
    gpus: int
    requested_percent: tuple[float, ...]  # of all GPUs, after each pod that requests a GPU
    allocated_percent: tuple[float, ...]

    def allocated_at(self, percent: float) -> float:
        """Return the percentage of all GPUs allocated when the requests first reached ``percent``."""
        pairs = zip(self.requested_percent, self.allocated_percent, strict=True)
        return next(
            (allocated for requested, allocated in pairs if requested >= percent), self.allocated_percent[-1]
        )


def arrivals(pods: Sequence[TracePod], capacity_milli: int, rng: random.Random) -> list[TracePod]:
    """Return the pods in the order of one run: all pods shuffled, then pods drawn up to the load.

    If no pod requests a GPU, each pod occurs once.
    """
    arriving = list(pods)
    rng.shuffle(arriving)
    requested = sum(p.gpus * p.gpu_milli for p in arriving)
    while 0 < requested < LOAD * capacity_milli:
        pod = rng.choice(pods)
        arriving.append(pod)
        requested += pod.gpus * pod.gpu_milli
    return arriving


def options(stock: Stock, pod: TracePod) -> list[Stock]:
    """Return the possible rests of a node after placing ``pod``; none if it does not fit."""
    cpu, memory = stock.cpu_milli - pod.cpu_milli, stock.memory_mib - pod.memory_mib
    if cpu < 0 or memory < 0 or (pod.models and stock.model not in pod.models):
        return []
    free = stock.gpu_milli
    if not pod.gpus:
        return [Stock(stock.model, cpu, memory, free)]
    if pod.gpus > 1:
        kept = len(free) - pod.gpus
        if kept < 0 or free[kept] < WHOLE_GPU:
            return []
        return [Stock(stock.model, cpu, memory, tuple(sorted(free[:kept] + (0,) * pod.gpus)))]
    found = []
    for value in dict.fromkeys(v for v in free if v >= pod.gpu_milli):
        rest = list(free)
        rest.remove(value)
        insort(rest, value - pod.gpu_milli)
        found.append(Stock(stock.model, cpu, memory, tuple(rest)))
    return found


def best_fit(stock: Stock, pod: TracePod) -> Choice:
    """Return a choice scored by the rest of CPU and GPU: best fit on the node, then on its GPUs."""
    able = options(stock, pod)
    if not able:
        return None
    return (_rest(able[0]),), able[0]  # the first option has the tightest GPU


def _rest(stock: Stock) -> float:
    return stock.cpu_milli / _CPU_SCALE + sum(stock.gpu_milli) / _GPU_SCALE


# The largest node of the openb cluster, so that CPU and GPU weigh the same.
_CPU_SCALE = 128_000
_GPU_SCALE = 8 * WHOLE_GPU


def planner(stock: Stock, pod: TracePod) -> Choice:
    """Return the choice of the planner's placement (`core.placement`): best fit on GPUs, then on nodes.

    CPU and memory only bind: the planner does not place them.  A pod for several GPUs
    goes to the node with the fewest empty GPUs; `best_fit` places a pod without GPUs.
    """
    able = options(stock, pod)
    if not able or not pod.gpus:
        return best_fit(stock, pod)
    if pod.gpus > 1:
        return (float(stock.gpu_milli.count(WHOLE_GPU)),), able[0]
    free = sum(stock.gpu_milli)
    return (min(v for v in stock.gpu_milli if v >= pod.gpu_milli) - pod.gpu_milli, free), able[0]


# ---- fragmentation gradient descent (FGD): place a pod where it leaves the most for later pods
# After Weng et al., "Beware of Fragmentation" (USENIX ATC'23), on GPUs alone.  For one kind
# of pod the *fragment* of a node is the free GPU capacity that such a pod cannot use: all of
# it if the node has too few GPUs for the pod, else the capacity on GPUs that have less than
# the pod needs of one GPU.  The fragment of a node is the mean over the load.
#
# Scores are whole numbers from 0 to 100, as in the published scheduler.  This matters: nodes
# tie, and ties go to the best fit, which packs.


class Fragments:
    """Cached fragments of nodes for the kinds of ``pods``, weighted by their frequency."""

    def __init__(self, pods: Iterable[TracePod]) -> None:
        counts = Counter((pod.gpu_milli, pod.gpus) for pod in pods if pod.gpus)
        total = counts.total()
        self._kinds = [(*kind, count / total) for kind, count in sorted(counts.items())]
        self.milli = cache(self._milli)

    def _milli(self, gpus: tuple[int, ...]) -> float:
        """Return the mean fragment of a node; ``gpus``: free thousandths of its GPUs, ascending."""
        usable = 0.0
        for gpu_milli, gpu_count, frequency in self._kinds:
            able = [free for free in gpus if free >= gpu_milli]
            if sum([free // gpu_milli for free in able]) >= gpu_count:
                usable += frequency * sum(able)
        return sum(gpus) - usable


def score(before: float, after: float) -> int:
    """Return the score, from 0 to 100, of a change of a fragment; 50 means no change."""
    return int(100 / (1 + exp((after - before) / WHOLE_GPU)))


def fgd(pods: Sequence[TracePod]) -> Choose:
    """Return the placement by fragmentation gradient descent for a load like ``pods``.

    `planner` places pods of several GPUs.
    """
    fragments = Fragments(pods)

    def choose(stock: Stock, pod: TracePod) -> Choice:
        if pod.gpus != 1 or not (able := options(stock, pod)):
            return planner(stock, pod)
        before, free = fragments.milli(stock.gpu_milli), sum(stock.gpu_milli)
        values = dict.fromkeys(v for v in stock.gpu_milli if v >= pod.gpu_milli)  # as in `options`
        scored = [
            ((-score(before, fragments.milli(rest.gpu_milli)), value - pod.gpu_milli, free), rest)
            for value, rest in zip(values, able, strict=True)
        ]
        return min(scored, key=lambda x: x[0])

    return choose


def fill(nodes: Sequence[Stock], pods: Sequence[TracePod], placement: Choose | None, seed: int) -> Filled:
    """Return how the cluster filled; with ``placement`` None, on random nodes and their random GPUs."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable order, no secret
    capacity = sum(sum(node.gpu_milli) for node in nodes)
    fleet = _Fleet(nodes, placement, rng)
    requested = allocated = dropped = 0
    requested_percent, allocated_percent = [], []
    arriving = arrivals(pods, capacity, rng)
    for pod in arriving:
        size = pod.gpus * pod.gpu_milli
        requested += size
        if fleet.place(pod):
            allocated += size
        else:
            dropped += 1
        if size:
            requested_percent.append(100 * requested / capacity)
            allocated_percent.append(100 * allocated / capacity)
    return Filled(
        len(arriving), dropped, capacity // WHOLE_GPU, tuple(requested_percent), tuple(allocated_percent)
    )


class _Fleet:
    """Nodes grouped by their stock, so that equal nodes are scored once."""

    def __init__(self, nodes: Sequence[Stock], placement: Choose | None, rng: random.Random) -> None:
        self._placement = cache(placement) if placement is not None else None
        self._options = cache(options)
        self._rng = rng
        self._count = Counter(nodes)

    def place(self, pod: TracePod) -> bool:
        found = self._random(pod) if self._placement is None else self._best(pod, self._placement)
        if found is None:
            return False
        before, after = found
        self._count[before] -= 1
        if not self._count[before]:
            del self._count[before]
        self._count[after] += 1
        return True

    def _best(self, pod: TracePod, placement: Choose) -> tuple[Stock, Stock] | None:
        best: tuple[tuple[float, ...], Stock, Stock] | None = None
        for stock in self._count:
            choice = placement(stock, pod)
            if choice is not None and (best is None or (choice[0], stock) < best[:2]):
                best = choice[0], stock, choice[1]
        return best and (best[1], best[2])

    def _random(self, pod: TracePod) -> tuple[Stock, Stock] | None:
        able = [stock for stock in self._count if self._options(stock, pod)]
        if not able:
            return None
        stock = self._rng.choices(able, weights=[self._count[s] for s in able])[0]
        return stock, self._rng.choice(self._options(stock, pod))
