"""Build a cluster and its load, and replay them with `core.replay`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from random import Random

from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    CheckpointMode,
    Cluster,
    Device,
    JobOrder,
    Kind,
    Lease,
    Project,
    Settings,
    State,
)
from jupyter_gpushare.core.order import attained_gpu_s, gpus
from jupyter_gpushare.core.pairs import Parted
from jupyter_gpushare.core.replay import Costs, Replay
from jupyter_gpushare.core.simulated_lease import Reports
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gibibytes import GIB
from jupyter_gpushare.sim.metrics import ReplayMeter
from jupyter_gpushare.sim.sharing import Sharing
from jupyter_gpushare.sim.traces import NotebookSession, TrainingJob

# ---- shortest remaining service first: needs durations, which only a trace has


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(Lease):
    """A job with a known duration."""

    duration_s: float


class ShortestRemaining(JobOrder):
    """Order by remaining GPU-seconds; a job of unknown duration comes last."""

    __slots__ = ()

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        if not isinstance(lease, TraceJob):
            return inf
        return lease.duration_s * gpus(lease) - attained_gpu_s(lease, now)

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        return self.group(lease, 0.0, settings), False, lease.queued_at

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        return self.group(lease, now, settings) if isinstance(lease, TraceJob) else 0.0


SRTF = ShortestRemaining(preempts=True, drifts=True)


# ---- progress reports of simulated jobs: a share of the jobs reports, with an error ---


def with_error(factor: float) -> Reports:
    """Return reports that overestimate the remaining work by ``factor``."""
    return lambda done: done / (done + factor * (1.0 - done)) if done < 1.0 else 1.0


def some(share: float, sigma: float, seed: int = 0) -> Callable[[int], Reports | None]:
    """Return a function of a job's number that returns its reports.

    Only a ``share`` of the jobs reports, each with its own log-normal error.
    """

    def reports_of(number: int) -> Reports | None:
        random = Random(f"{seed} {number}")  # noqa: S311 - a repeatable draw, no secret
        error = exp(random.gauss(0.0, sigma))
        return with_error(error) if random.random() < share else None

    return reports_of


# ---- scenarios ---------------------------------------------------------------

GPUS_PER_NODE = 8
NOTEBOOKS, JOBS = "notebooks", "jobs"
# The number of small jobs that always wait under saturation: more than a node takes at once.
BACKLOG = 64
# The number of events between two updates of the progress.
SLICE = 2_000

Progress = Callable[[float], None]  # receives the part that is done, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The GPUs of a cluster; with ``nodes`` None, placement is ignored and only their number counts."""

    gpus: int
    nodes: int | None
    islands: int = 1  # per node, each linked by NVLink
    memory_bytes: int = 80 * GIB
    movable: bool = False  # a suspended lease may resume on another GPU of its node

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs, spread evenly over the nodes and over the NVLink islands of each node.

        Raises:
            InvalidRequest: a node or an island would have no GPU.
        """
        if self.nodes is None:
            names = [f"g{number:05d}" for number in range(self.gpus)]
            return tuple(
                Device(uuid=x, memory_bytes=self.memory_bytes, node=x, movable=self.movable) for x in names
            )
        if self.nodes > self.gpus:
            raise InvalidRequest(f"{self.gpus} GPUs cannot make {self.nodes} nodes: each has at least one")
        if self.islands > self.gpus // self.nodes:
            per_node = self.gpus // self.nodes
            raise InvalidRequest(f"{per_node} GPUs of a node cannot make {self.islands} islands")
        return tuple(
            Device(
                uuid=f"n{node:04d}g{number:04d}",
                memory_bytes=self.memory_bytes,
                node=f"n{node:04d}",
                island=f"i{number * self.islands // size:02d}" if self.islands > 1 else "",
                movable=self.movable,
            )
            for node, size in enumerate(_parts(self.gpus, self.nodes))
            for number in range(size)
        )

    @property
    def largest_node(self) -> int:
        """The number of GPUs of the largest node, or of all GPUs if placement is ignored."""
        return max(_parts(self.gpus, self.nodes or 1))


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (number < total % count) for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A finished replay and its metrics."""

    meter: ReplayMeter
    replay: Replay
    wall_s: float
    fleet: Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprint:
    """Device memory of a workload on each of its GPUs, and the rate at which it is copied."""

    bytes_per_gpu: int = 16 * GIB
    copy_bytes_per_s: float = 8e9  # per GPU


def replay_jobs(
    jobs: Sequence[TrainingJob],
    fleet: Fleet,
    settings: Settings,
    *,
    projects: Sequence[Project] = (),
    preempt_cost_s: float = 0.0,
    survival: CheckpointMode = CheckpointMode.SIGTERM,
    reports: Callable[[int], Reports | None] = lambda number: None,
    users: Callable[[int], str] = lambda number: "",
    sharing: Sharing | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay training jobs to their end; job n belongs to project n mod the number of projects.

    A stop takes `Settings.grace_s`.  The stopped job starts again on any GPUs and makes no progress for
    ``preempt_cost_s``.  A suspension copies the GPU memory of a job (`DeviceFootprint`) to the host.  The
    suspended job continues on its GPUs, or on other GPUs of its node if the ``fleet`` is movable.
    ``reports`` and ``users`` return the progress reports and the user of a job, by its number.
    With ``sharing``, every job may be a host or a guest.
    """
    projects = projects or (Project(name="p0", quota_milli=fleet.gpus * WHOLE_GPU),)
    devices = fleet.devices()
    meter = ReplayMeter(devices, projects, settings)
    cluster = Cluster(devices=devices, projects=tuple(projects), leases=(), settings=settings)
    state = DeviceFootprint()
    costs = Costs(restart_s=preempt_cost_s, copy_bytes_per_s=state.copy_bytes_per_s)
    replay = Replay(
        cluster,
        costs,
        watcher=meter,
        speeds=sharing.speeds if sharing else None,
        parted=Parted(sharing.parted if sharing else ()),
    )
    for number, job in enumerate(jobs):
        project = projects[number % len(projects)].name
        lease = job_lease(number, job, project, fleet, state, survival, users(number))
        if sharing is not None:
            needs_bytes = int(sharing.uses(lease.id) * fleet.memory_bytes)
            lease = replace(lease, share=True, needs_bytes=needs_bytes, pair_key=sharing.key(lease.id))
        replay.add_job(lease, job.duration_s, reports(number))
    return _run(replay, meter, fleet, lambda: len(meter.completion_s) / len(jobs), progress)


def job_lease(
    number: int,
    job: TrainingJob,
    project: str,
    fleet: Fleet,
    state: DeviceFootprint = DeviceFootprint(),
    survival: CheckpointMode = CheckpointMode.SIGTERM,
    user: str = "",
) -> TraceJob:
    """Return the lease of job ``number`` of a trace."""
    return TraceJob(
        id=f"j{number:07d}",
        project=project,
        user=user,
        kind=Kind.TRAIN,
        size=Size(WHOLE_GPU, job.gpus),
        consolidate=fleet.nodes is not None,
        survival=survival,
        movable=True,
        used_bytes=job.gpus * state.bytes_per_gpu,
        submitted_at=job.submit_at,
        duration_s=job.duration_s,
    )


def replay_notebooks(
    sessions: Sequence[NotebookSession],
    jobs: Sequence[TrainingJob],
    fleet: Fleet,
    settings: Settings,
    *,
    adaptive: bool = False,
    survival: CheckpointMode = CheckpointMode.SIGTERM,
    saturate: bool = False,
    state: DeviceFootprint = DeviceFootprint(),
    preempt_cost_s: float = 0.0,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay notebook sessions and training jobs together, until the last session ends.

    The project of the sessions is guaranteed every GPU, the project of the jobs none.
    So jobs run on unclaimed devices and on those of suspended sessions.  A suspension
    copies the state of a session, or of a job with ``survival`` suspend, to host memory;
    such a job continues on the same GPUs.  A job with sigterm takes as long to write its
    state and continues on any GPUs.  ``adaptive``: each session learns its own idle
    timeout from its past.  ``saturate``: the submission times of the jobs are ignored, and
    the list is repeated so that `BACKLOG` of the smallest jobs always wait.
    """
    projects = (
        Project(name=NOTEBOOKS, quota_milli=fleet.gpus * WHOLE_GPU),
        Project(name=JOBS, quota_milli=0),
    )
    devices = fleet.devices()
    rate = state.copy_bytes_per_s
    settings = replace(settings, grace_s=state.bytes_per_gpu / rate)
    meter = _UntilSessionsEnd(devices, projects, settings, sessions=len(sessions))
    costs = Costs(restart_s=preempt_cost_s, copy_bytes_per_s=rate)
    cluster = Cluster(devices=devices, projects=projects, leases=(), settings=settings)
    replay = meter.replay = Replay(cluster, costs, adaptive=adaptive, watcher=meter)
    for number, session in enumerate(sessions):
        lease = Lease(
            id=f"s{number:05d}",
            project=NOTEBOOKS,
            kind=Kind.BUILD,
            size=Size(WHOLE_GPU, session.gpus),
            used_bytes=session.gpus * state.bytes_per_gpu,
        )
        replay.add_session(lease, session.cells)

    def leases(jobs: Iterable[TrainingJob]) -> Iterator[TraceJob]:
        return (job_lease(number, job, JOBS, fleet, state, survival) for number, job in enumerate(jobs))

    if saturate and jobs:
        jobs = [replace(job, submit_at=0.0) for job in jobs]  # each comes when it is added
        meter.feed(leases(itertools.cycle(jobs)), min(j.gpus for j in jobs))
    else:
        for lease in leases(jobs):
            replay.add_job(lease, lease.duration_s)
    cells = sum(len(s.cells) for s in sessions)
    return _run(replay, meter, fleet, lambda: meter.cells / cells, progress)


class _UntilSessionsEnd(ReplayMeter):
    """A meter that ends the replay with the last session, and can keep jobs waiting until then."""

    replay: Replay

    def __init__(
        self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings, *, sessions: int
    ) -> None:
        super().__init__(devices, projects, settings)
        self._sessions_left = sessions
        self._source: Iterator[TraceJob] = iter(())
        self._size = 0  # size of the jobs that always wait; 0: no job does
        self._scheduled = 0  # number of jobs of that size that are added but have not come

    def feed(self, source: Iterator[TraceJob], gpus: int) -> None:
        """Keep `BACKLOG` jobs for ``gpus`` GPUs in the queue, taken from an endless ``source``."""
        self._source, self._size = source, gpus * WHOLE_GPU
        self._top_up()

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        """Count the change, and refill the queue."""
        super().changed(now, before, after)
        if after.kind is Kind.BUILD:
            self._sessions_left -= after.state is State.RELEASED
            self.replay.stopped = not self._sessions_left
        elif self._size and (before is None or before.state is State.PENDING):
            self._scheduled -= before is None and _size(after) == self._size
            self._top_up()

    def _top_up(self) -> None:
        while self.projects[JOBS].sizes[self._size] + self._scheduled < BACKLOG:
            lease = next(self._source)
            self.replay.add_job(lease, lease.duration_s)
            self._scheduled += _size(lease) == self._size


def _size(lease: Lease) -> int:
    return lease.size.fraction_milli * lease.size.device_count


def _run(
    replay: Replay, meter: ReplayMeter, fleet: Fleet, done: Callable[[], float], progress: Progress | None
) -> ReplayResult:
    began = time.perf_counter()
    while replay.run(max_events=SLICE):
        if progress is not None:
            progress(done())
    meter.advance(replay.now)
    return ReplayResult(meter=meter, replay=replay, wall_s=time.perf_counter() - began, fleet=fleet)
