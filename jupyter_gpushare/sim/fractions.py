"""Fill a cluster with pods that request parts of GPUs, until more is requested than exists.

The set-up of the published comparison (FGD, USENIX ATC'23; the openb trace of
2023): the pods of the list are shuffled, and more are drawn from it at random,
until the GPUs asked for reach `LOAD` of the cluster.  They arrive one by one,
never leave, and are dropped when they do not fit.  CPU, memory and the model of
GPU bind as well.  What is compared is how much of all GPUs is allocated once as
much as the cluster has was asked for.
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

# GPUs asked for, of what the cluster has, when the last pod has come.
LOAD = 1.3


# The least of these is taken: (score, what is left), or None where the pod does not fit.
Choice = tuple[tuple[float, ...], Stock] | None
Choose = Callable[[Stock, TracePod], Choice]


@dataclass(frozen=True, slots=True)
class Filled:
    """Allocation over a run."""

    pods: int  # that arrived
    dropped: int
    gpus: int
    asked_percent: tuple[float, ...]  # after each pod that asks for a GPU, of all GPUs
    allocated_percent: tuple[float, ...]

    def allocated_at(self, asked_percent: float) -> float:
        """Return the per cent of all GPUs allocated when ``asked_percent`` was first requested."""
        pairs = zip(self.asked_percent, self.allocated_percent, strict=True)
        return next((got for asked, got in pairs if asked >= asked_percent), self.allocated_percent[-1])


def arrivals(pods: Sequence[TracePod], capacity_milli: int, rng: random.Random) -> list[TracePod]:
    """Return the pods in the order of one run: all, shuffled, then drawn until the load is reached.

    Each pod occurs once where none of them requests a GPU.
    """
    arriving = list(pods)
    rng.shuffle(arriving)
    asked = sum(p.gpus * p.gpu_milli for p in arriving)
    while 0 < asked < LOAD * capacity_milli:
        pod = rng.choice(pods)
        arriving.append(pod)
        asked += pod.gpus * pod.gpu_milli
    return arriving


def options(stock: Stock, pod: TracePod) -> list[Stock]:
    """Return the possible rests of a node after placing ``pod``; empty: it does not fit."""
    cpu, memory = stock.cpu_milli - pod.cpu_milli, stock.memory_mib - pod.memory_mib
    if cpu < 0 or memory < 0 or (pod.models and stock.model not in pod.models):
        return []
    free = stock.gpu_milli
    if not pod.gpus:
        return [Stock(stock.model, cpu, memory, free)]
    if pod.gpus > 1:
        left = len(free) - pod.gpus
        if left < 0 or free[left] < WHOLE_GPU:
            return []
        return [Stock(stock.model, cpu, memory, tuple(sorted(free[:left] + (0,) * pod.gpus)))]
    found = []
    for value in dict.fromkeys(v for v in free if v >= pod.gpu_milli):
        rest = list(free)
        rest.remove(value)
        insort(rest, value - pod.gpu_milli)
        found.append(Stock(stock.model, cpu, memory, tuple(rest)))
    return found


def best_fit(stock: Stock, pod: TracePod) -> Choice:
    """Score by the rest of CPU and GPU together: best fit on the node, then on its GPUs."""
    able = options(stock, pod)
    if not able:
        return None
    return (_left(able[0]),), able[0]  # options come with the tightest GPU first


def _left(stock: Stock) -> float:
    return stock.cpu_milli / _CPU_SCALE + sum(stock.gpu_milli) / _GPU_SCALE


# The largest node of the openb cluster, so that CPU and GPU weigh the same.
_CPU_SCALE = 128_000
_GPU_SCALE = 8 * WHOLE_GPU


def planner(stock: Stock, pod: TracePod) -> Choice:
    """The planner's own placement (`core.placement`): best fit on GPUs, then on their node.

    CPU and memory only bind: the planner does not place them.  A pod for several
    GPUs goes to the node with the fewest empty ones, a pod without goes where
    `best_fit` puts it.
    """
    able = options(stock, pod)
    if not able or not pod.gpus:
        return best_fit(stock, pod)
    if pod.gpus > 1:
        return (float(stock.gpu_milli.count(WHOLE_GPU)),), able[0]
    free = sum(stock.gpu_milli)
    return (min(v for v in stock.gpu_milli if v >= pod.gpu_milli) - pod.gpu_milli, free), able[0]


# ---- fragmentation gradient descent (FGD): place a pod where it leaves most for the pods to come
# After Weng et al., "Beware of Fragmentation" (USENIX ATC'23), on GPUs alone.  For one
# kind of pod the *fragment* of a node is the free GPU that such a pod cannot use there: all
# of it if the node has too few GPUs for the pod, else what lies on GPUs with less than the
# pod needs of one.  The fragment of a node is the mean over the load.
#
# Scores are whole numbers from 0 to 100, as in the published scheduler, and that
# matters: nodes tie, and ties go to the best fit, which packs.


class Fragments:
    """Fragments of nodes for the kinds of ``pods``, each as often as it occurs; they are cached."""

    def __init__(self, pods: Iterable[TracePod]) -> None:
        often = Counter((pod.gpu_milli, pod.gpus) for pod in pods if pod.gpus)
        total = often.total()
        self._kinds = [(*kind, count / total) for kind, count in sorted(often.items())]
        self.milli = cache(self._milli)

    def _milli(self, gpus: tuple[int, ...]) -> float:
        """Expected fragment of a node with ``gpus`` free thousandths on its GPUs, ascending."""
        usable = 0.0
        for gpu_milli, gpu_count, often in self._kinds:
            able = [free for free in gpus if free >= gpu_milli]
            if sum([free // gpu_milli for free in able]) >= gpu_count:
                usable += often * sum(able)
        return sum(gpus) - usable


def score(before: float, after: float) -> int:
    """Score, from 0 to 100, of a fragment that becomes ``after``; 50: no difference."""
    return int(100 / (1 + exp((after - before) / WHOLE_GPU)))


def fgd(pods: Sequence[TracePod]) -> Choose:
    """Fragmentation gradient descent for a load like ``pods``; pods of several GPUs as by `planner`."""
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
    """Return how the cluster filled; ``placement`` None: a random node, there a random GPU."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable order, no secret
    capacity = sum(sum(node.gpu_milli) for node in nodes)
    fleet = _Fleet(nodes, placement, rng)
    asked = given = dropped = 0
    asked_percent, allocated_percent = [], []
    arriving = arrivals(pods, capacity, rng)
    for pod in arriving:
        size = pod.gpus * pod.gpu_milli
        asked += size
        if fleet.place(pod):
            given += size
        else:
            dropped += 1
        if size:
            asked_percent.append(100 * asked / capacity)
            allocated_percent.append(100 * given / capacity)
    return Filled(
        len(arriving), dropped, capacity // WHOLE_GPU, tuple(asked_percent), tuple(allocated_percent)
    )


class _Fleet:
    """Nodes grouped by their stock, so that equal nodes are judged once."""

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
