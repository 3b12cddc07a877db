"""Queues and priority classes of KAI for the configured projects.

::

    <p>                 quota, limit and weight of the project     compared with other roots
    ├── <p>-build       the same quota                             sessions within it
    └── <p>-train       quota 0, minimum run time                  jobs, and sessions beyond it
    gpushare-idle       quota 0, weight 0                          a root: below its project, an idle
    ├── gpushare-idle-sessions                                     session would be protected by the
    └── gpushare-yield                                             project's quota
    gpushare-return     no quota, highest priority                 a root: below its project, a return
    └── gpushare-return-sessions                                   would wait behind projects within
                                                                   their quota

Because of rounding, KAI refuses requests that equal a quota, so quotas and limits are 0.01 GPUs higher.
Between roots, KAI reads only the root's ``reclaimMinRuntime``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.model import WHOLE_GPU, Project
from jupyter_gpushare.kube.cluster.objects import MANAGED_BY, Json, Queue
from jupyter_gpushare.kube.rules.seats import (
    IDLE_LEAF,
    IDLE_ROOT,
    RETURN_LEAF,
    RETURN_ROOT,
    YIELD_LEAF,
    check_project,
)

_MARGIN = 0.01
_UNLIMITED = -1
# Priority of the root of returns; the priority of a project's root is 100 plus the site's setting.
_RETURN_PRIORITY = 1_000_000


def queues(projects: Iterable[Project], min_run_s: float) -> list[Json]:
    """Return the Queues of all projects, and those for idle and returning sessions.

    Raises:
        InvalidRequest: a queue cannot have the name of a project.
    """
    found: list[Json] = []
    for project in projects:
        name = check_project(project.name)
        quota = project.quota_milli / WHOLE_GPU + _MARGIN
        limit = _UNLIMITED if project.limit_milli is None else project.limit_milli / WHOLE_GPU + _MARGIN
        gpu, min_runtime = _gpu(quota, limit, project.weight), f"{math.ceil(min_run_s)}s"
        found += [
            _queue(name, 100 + project.priority, gpu, reclaimMinRuntime="0s"),
            _queue(f"{name}-build", 200, _gpu(quota), parentQueue=name),
            _queue(f"{name}-train", 100, _gpu(0), parentQueue=name, preemptMinRuntime=min_runtime),
        ]
    nothing, everything = _gpu(0, weight=0), _gpu(_UNLIMITED, weight=0)
    return [
        *found,
        _queue(IDLE_ROOT, 1, nothing, reclaimMinRuntime="0s"),
        _queue(RETURN_ROOT, _RETURN_PRIORITY, everything, reclaimMinRuntime="0s"),
        _queue(IDLE_LEAF, 2, nothing, parentQueue=IDLE_ROOT),
        _queue(YIELD_LEAF, 1, nothing, parentQueue=IDLE_ROOT),
        _queue(RETURN_LEAF, 1, everything, parentQueue=RETURN_ROOT),
    ]


def priority_classes(levels: int) -> list[Json]:
    """Return the priority classes of seats; ``levels`` is the number of LAS queues of jobs, at most 10."""
    values = {"gpushare-session": 110, "gpushare-borrowed": 70, "gpushare-idle": 10, "gpushare-yield": 5}
    values |= {f"gpushare-train-{level}": 60 - 5 * level for level in range(levels)}
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name, "labels": {MANAGED_BY: "gpushare"}},
            "value": value,
            "preemptionPolicy": "Never",  # for the default scheduler; KAI has its own rules
        }
        for name, value in values.items()
    ]


def missing(projects: Iterable[Project], existing: Mapping[str, Queue]) -> list[str]:
    """Return the names of the queues that the projects need and that do not exist."""
    return [name for q in queues(projects, 0) if (name := q["metadata"]["name"]) not in existing]


def misplaced(projects: Iterable[Project], existing: Mapping[str, Queue]) -> list[tuple[str, str]]:
    """Return the queues with a wrong parent, and the name of that parent (empty if none)."""
    wanted = {q["metadata"]["name"]: q["spec"].get("parentQueue", "") for q in queues(projects, 0)}
    found = {name: existing[name].spec.parent_queue for name in wanted if name in existing}
    return [(name, parent) for name, parent in found.items() if parent != wanted[name]]


def in_force(project: Project, existing: Mapping[str, Queue]) -> Project:
    """Return a project with the quota, weight and limit of its Queue; without a Queue, as configured."""
    queue = existing.get(project.name)
    if queue is None:
        return project
    gpu = queue.spec.resources.gpu
    return Project(
        name=project.name,
        quota_milli=_milli(gpu.quota),
        weight=max(0, round(gpu.over_quota_weight)),
        limit_milli=None if gpu.limit < 0 else _milli(gpu.limit),
        priority=project.priority,
    )


def _milli(gpus: float) -> int:
    """Return thousandths of a GPU, without the margin."""
    return max(0, round((gpus - _MARGIN) * WHOLE_GPU))


def _gpu(quota: float, limit: float = _UNLIMITED, weight: float = 1) -> Json:
    return {"quota": round(quota, 3), "limit": round(limit, 3), "overQuotaWeight": weight}


def _queue(name: str, priority: int, gpu: Json, **more: str) -> Json:
    """Return a Queue; ``more`` are further fields of its spec."""
    unlimited = _gpu(_UNLIMITED)
    spec = {"priority": priority, "resources": {"gpu": gpu, "cpu": unlimited, "memory": unlimited}, **more}
    metadata = {"name": name, "labels": {MANAGED_BY: "gpushare"}}
    return {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": metadata, "spec": spec}
