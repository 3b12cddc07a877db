"""A model of KAI-Scheduler on the tests' API server: allocate, reclaim, preempt and bind.

Each rule names its source in kai-scheduler v0.16.8 (commit 40da4c87106f28cc6ca3a1c08d89473474cbe3f3),
below ``pkg/scheduler``; `kai_queues` has the rules of queues, `kai_binder` those of binding.  The action
``consolidation`` is off, as in our installation.  Not modelled: topology, DRA, elastic groups, several
pods in a group, and the placement of evicted pods on another node.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.kube.kai_binder import GPU_GROUP, Binder
from tests.kube.kai_queues import Group, Json, Shares, counted
from tests.kube.store import Refused, Store, allows

# pkg/common/constants: DefaultStuckInReleasingThreshold; api/pod_info/pod_info.go:450-470
STUCK_S = 120.0
_DEFAULT_PRIORITY = 50
# api/unschedule_info.go:117-124, actions/utils/action.go:49-90 (the first of two lines)
_RECLAIMED = "Pod {victim} was preempted by workload {task}.\n"
_PREEMPTED = "Pod {victim} was preempted by higher priority workload {task}"


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as ``1h2m3s``."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)([hms])", text))


@dataclass
class Task:
    """A PodGroup with its only pod."""

    group: Json
    pod: Json
    priority: int
    gpus: float  # charged to queues
    count: int  # whole GPUs
    memory: float  # portion of one GPU; 0 for whole GPUs
    memory_mib: int = 0
    chosen: Json = field(default_factory=dict)  # ``spec`` of its BindRequest

    @property
    def name(self) -> str:
        return str(self.group["metadata"]["name"])

    @property
    def full_name(self) -> str:
        return f"{self.group['metadata']['namespace']}/{self.name}"

    @property
    def queue(self) -> str:
        return str(self.group["spec"].get("queue", ""))

    @property
    def preemptible(self) -> bool:
        """``spec.preemptibility``, else by priority (``cache/cluster_info/cluster_info.go:462-474``)."""
        said = self.group["spec"].get("preemptibility", "")
        return said == "preemptible" if said else self.priority < 100

    @property
    def node(self) -> str:
        """Return the node, also of a pod that is being bound (``api/pod_info/pod_info.go:470-472``)."""
        return str(self.pod["spec"].get("nodeName", "") or self.chosen.get("selectedNode", ""))

    @property
    def gpu_group(self) -> str:
        """``api/pod_info/pod_info.go:490-495``"""
        named = self.chosen.get("selectedGPUGroups") or [
            self.pod["metadata"].get("labels", {}).get(GPU_GROUP, "")
        ]
        return str(named[0])


@dataclass
class Node:
    """The GPUs of a node: fractions share GPU groups, by memory in MiB; whole GPUs are only counted."""

    name: str
    gpus: int
    mib: int  # of each GPU, a multiple of 100 (api/node_info/node_info.go:631-645)
    whole: int = 0
    groups: dict[str, int] = field(default_factory=dict)

    def need_mib(self, task: Task) -> int:
        """``api/node_info/node_info.go:611-617``"""
        return task.memory_mib or int(task.memory * self.mib)

    def place(self, task: Task) -> str | None:
        """Return the GPU group of a fraction, "" for whole GPUs, None without capacity; shared GPUs first."""
        idle = self.gpus - self.whole - len(self.groups)
        if task.count:
            return "" if task.count <= idle else None
        need = self.need_mib(task)
        if need > self.mib:
            return None
        fitting = [g for g, used in self.groups.items() if used + need <= self.mib]
        if fitting:  # gpu_sharing_node_info.go:369-382; the fullest first: binpack
            return max(fitting, key=lambda g: self.groups[g])
        return f"{self.name}-{uuid.uuid4().hex[:8]}" if idle > 0 else None

    def add(self, task: Task, group: str) -> None:
        if task.count:
            self.whole += task.count
        else:
            self.groups[group] = self.groups.get(group, 0) + self.need_mib(task)

    def remove(self, task: Task, group: str) -> None:
        if task.count:
            self.whole -= task.count
        else:
            self.groups[group] -= self.need_mib(task)
            if not self.groups[group]:
                del self.groups[group]


class Kai:
    """One scheduler; `cycle` is one scheduling cycle."""

    quiet_s = 0.3  # nothing changes for so long: it has looked at everything
    idle_s = 0.0  # the same where nothing else runs

    def __init__(self, store: Store, *, seed: int = 0, now: Callable[[], datetime] | None = None) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.now = now or (lambda: datetime.now(UTC))
        self.evicted: list[str] = []
        self.binder = Binder(store, self.now)
        self._is_stopped = False

    def cycle(self) -> None:
        """Allocate, then reclaim, then preempt (``pkg/apis/kai/v1/schedulingshard_types.go:140-146``).

        Then the binder, a separate process, makes a step.
        """
        if not self._is_stopped:
            _Cycle(self).run()
        self.binder.step()

    def stop(self) -> None:
        """Prevent new cycles."""
        self._is_stopped = True

    def go_on(self) -> None:
        """Allow cycles again."""
        self._is_stopped = False


class _Cycle:
    def __init__(self, kai: Kai) -> None:
        self.kai, self.store = kai, kai.store
        self.chosen = self._bind_requests()
        self.nodes = {n.name: n for n in map(_node, self.store.all("nodes")) if n is not None}
        self.queues = {q["metadata"]["name"]: q for q in self.store.all("queues")}
        self.tasks = self._tasks()
        self.releasing = [t for t in self.tasks if t.node and "deletionTimestamp" in t.pod["metadata"]]
        self.placed = [t for t in self.tasks if t.node and "deletionTimestamp" not in t.pod["metadata"]]
        waiting = [t for t in self.tasks if not t.node and "deletionTimestamp" not in t.pod["metadata"]]
        for task in (*self.placed, *self.releasing):
            if task.node in self.nodes:
                self.nodes[task.node].add(task, task.gpu_group)
        self.reasons: dict[str, str] = {}
        self.promised: set[str] = set()  # nodes with capacity that is free only once pods are gone
        self.pending: list[Task] = []
        for task in waiting:
            if task.queue in self.queues:  # cluster_info.go:425-427,454-460
                self.pending.append(task)
            else:
                self.reasons[task.name] = "QueueDoesNotExist"
        # Releasing pods hold their GPU and are not charged (api/pod_status/pod_status.go:70-76).
        known = [t for t in self.placed if t.queue in self.queues]
        groups = [Group(t.queue, t.gpus, t.preemptible, True) for t in known]
        groups += [Group(t.queue, t.gpus, t.preemptible, False) for t in self.pending]
        total = float(sum(n.gpus for n in self.nodes.values()))
        self.shares = Shares.of(self.queues.values(), groups, total, kai.rng)

    def _bind_requests(self) -> dict[tuple[str, str], Json]:
        """Return the open BindRequests by pod; delete failed ones (``cache/cache.go:440-475``)."""
        found = {}
        for request in self.store.all("bindrequests"):
            meta = request["metadata"]
            if request.get("status", {}).get("phase") == "Failed":
                self.store.delete("bindrequests", meta["namespace"], meta["name"])
            else:
                found[meta["namespace"], request["spec"]["podName"]] = request["spec"]
        return found

    def run(self) -> None:
        order = sorted(self.pending, key=lambda t: (self.shares.order(t.queue, t.gpus), -t.priority, _age(t)))
        left = [task for task in order if not self._allocate(task)]
        for action in (self._reclaim, self._preempt):
            left = [task for task in left if not action(task)]
        failed = {task.name for task in left}
        for task in self.tasks:
            if task.name in failed:
                self.reasons.setdefault(task.name, "PodSchedulingErrors")
            self._say(task)

    def _tasks(self) -> list[Task]:
        """Return the tasks: PodGroups by name only, with pods by their annotation, in all namespaces.

        Of several groups with one name, the last one in a Go map counts, whose order is random in
        each cycle (``cache/cluster_info/cluster_info.go:422,434,448``).
        """
        listed = list(self.store.all("podgroups"))
        self.kai.rng.shuffle(listed)
        groups = {g["metadata"]["name"]: g for g in listed}
        classes = {c["metadata"]["name"]: c["value"] for c in self.store.all("priorityclasses")}
        found = []
        for pod in self.store.all("pods"):
            group = groups.get(pod["metadata"].get("annotations", {}).get("pod-group-name", ""))
            if group is None or pod["status"]["phase"] in ("Succeeded", "Failed"):
                continue
            priority = classes.get(group["spec"].get("priorityClassName", ""), _DEFAULT_PRIORITY)
            task = _task(group, pod, priority)
            task.chosen = self.chosen.get((pod["metadata"]["namespace"], pod["metadata"]["name"]), {})
            found.append(task)
        return found

    # ---- actions -------------------------------------------------------------

    def _feasible(self, task: Task) -> list[Node]:
        allowed = [node for node in self.nodes.values() if allows(task.pod["spec"], node.name)]
        return sorted(allowed, key=lambda n: n.gpus - n.whole - len(n.groups))  # binpack

    def _allocate(self, task: Task) -> bool:
        """Bind on free capacity, or wait for capacity that is being released (``pod_info.go:450-463``)."""
        refusal = self.shares.refusal(task.queue, task.gpus, preemptible=task.preemptible)
        if refusal:
            self.reasons[task.name] = refusal
            return False
        for node in self._feasible(task):
            if node.name not in self.promised and (group := node.place(task)) is not None:
                self._bind(task, node, group)
                return True
        soon = [t for t in self.releasing if not self._is_stuck(t) and t.node in self.nodes]
        return self._pipeline(task, soon)

    def _bind(self, task: Task, node: Node, group: str) -> None:
        node.add(task, group)
        self.shares.allocate(task.queue, task.gpus, preemptible=task.preemptible)
        meta = task.pod["metadata"]
        owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        groups = [group] if group else []
        spec = {"podName": meta["name"], "selectedNode": node.name, "selectedGPUGroups": groups}
        body = {"metadata": {"name": meta["name"], "ownerReferences": [owner]}, "spec": spec}
        self.store.create("bindrequests", meta["namespace"], body)  # cache/cache.go:344-400

    def _pipeline(self, task: Task, gone: list[Task]) -> bool:
        """Reserve capacity that is free once ``gone`` have ended; bind nothing in this cycle."""
        for other in gone:
            self.nodes[other.node].remove(other, other.gpu_group)
        found = [(n, g) for n in self._feasible(task) if (g := n.place(task)) is not None]
        if found:
            node, group = found[0]
            node.add(task, group)
            self.promised.add(node.name)
            self.shares.allocate(task.queue, task.gpus, preemptible=task.preemptible)
        for other in gone:
            if not found or _returns(self.nodes[other.node], other):
                self.nodes[other.node].add(other, other.gpu_group)
            else:
                self.releasing.remove(other)
        return bool(found)

    def _is_stuck(self, task: Task) -> bool:
        """Return whether its grace period ended over two minutes ago (``pod_info.go:453-457``)."""
        ends = datetime.strptime(task.pod["metadata"]["deletionTimestamp"], "%Y-%m-%dT%H:%M:%SZ")
        return self.kai.now() - ends.replace(tzinfo=UTC) > timedelta(seconds=STUCK_S)

    def _reclaim(self, task: Task) -> bool:
        """``actions/reclaim/reclaim.go:69-167``"""
        if not self.shares.can_reclaim(task.queue, task.gpus, preemptible=task.preemptible):
            return False
        if self.shares.refusal(task.queue, task.gpus, preemptible=task.preemptible) == "OverLimit":
            return False
        victims = [
            t
            for t in self.placed
            if t.queue != task.queue
            and t.queue in self.queues
            and t.preemptible
            and self.shares.is_candidate(task.queue, task.gpus, t.queue)
            and not self._is_protected(t, self._reclaim_min_s(task.queue, t.queue))
        ]

        def valid(chosen: list[Task]) -> bool:
            lost = [(t.queue, t.gpus) for t in chosen]
            return self.shares.may_reclaim(task.queue, task.gpus, task.preemptible, lost)

        return self._solve(task, victims, valid, _RECLAIMED)

    def _preempt(self, task: Task) -> bool:
        """``actions/preempt/preempt.go:112-177``"""
        if self.shares.refusal(task.queue, task.gpus, preemptible=task.preemptible):
            return False
        victims = [
            t
            for t in self.placed
            if t.queue == task.queue
            and t.preemptible
            and t.priority < task.priority
            and not self._is_protected(t, self._preempt_min_s(t.queue))
        ]
        return self._solve(task, victims, lambda _: True, _PREEMPTED)

    def _solve(self, task: Task, victims: list[Task], valid: Callable[[list[Task]], bool], said: str) -> bool:
        """Choose victims in the reverse order of queues and jobs until the task fits.

        A victim that can stay in its place is not evicted (``framework/statement.go:222-235``)
        and does not count (``plugins/proportion/proportion.go:229-236``).
        """
        ordered = sorted(
            victims, key=lambda t: (self.shares.order(t.queue, 0.0), -t.priority, _age(t)), reverse=True
        )
        for number in range(1, len(ordered) + 1):
            chosen = self._evicting(task, ordered[:number])
            if chosen and valid(chosen):
                for victim in chosen:
                    self._evict(victim, said.format(victim=victim.full_name, task=task.full_name))
                return self._pipeline(task, [t for t in self.releasing if t.node in self.nodes])
        return False

    def _evicting(self, task: Task, prefix: list[Task]) -> list[Task]:
        """Return the victims among the first ones that have to leave for a task; none if it does not fit."""
        here = [t for t in prefix if t.node in self.nodes]
        for victim in here:
            self.nodes[victim.node].remove(victim, victim.gpu_group)
        spots = [(n, g) for n in self._feasible(task) if (g := n.place(task)) is not None]
        leaving: list[Task] = []
        if spots:
            node, group = spots[0]
            node.add(task, group)
        for victim in here:
            if spots and not _returns(self.nodes[victim.node], victim):
                leaving.append(victim)
            else:
                self.nodes[victim.node].add(victim, victim.gpu_group)
        if spots:
            spots[0][0].remove(task, spots[0][1])
        for victim in leaving:
            self.nodes[victim.node].add(victim, victim.gpu_group)
        return leaving

    def _evict(self, victim: Task, said: str) -> None:
        """Name the other group, delete with the pod's grace (``cache/evictor/default_evictor.go:33-73``).

        Only ``--update-pod-eviction-condition`` writes the condition, as in `helm-values/kai.yaml`.
        """
        self.kai.evicted.append(victim.name)
        self.shares.allocate(victim.queue, -victim.gpus, preemptible=victim.preemptible)
        self.placed.remove(victim)
        meta = victim.pod["metadata"]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        status = {"conditions": [condition | {"message": said}]}
        self.store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")
        victim.pod = self.store.delete("pods", meta["namespace"], meta["name"])
        self.releasing.append(victim)

    # ---- minimum run time ----------------------------------------------------

    def _is_protected(self, task: Task, least_s: float) -> bool:
        """``plugins/minruntime/minruntime.go:161-170``"""
        started = task.pod["status"].get("startTime", task.pod["metadata"]["creationTimestamp"])
        since = datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        return self.kai.now() < since + timedelta(seconds=least_s)

    def _preempt_min_s(self, queue: str) -> float:
        """Return the nearest value, from the leaf up (``plugins/minruntime/resolver.go:48-71``)."""
        said = (share.spec.get("preemptMinRuntime") for share in self.shares.path(queue))
        return next((duration_s(text) for text in said if text), 0.0)

    def _reclaim_min_s(self, reclaimer: str, victim: str) -> float:
        """Of the victim's ancestor below the common one, up (``plugins/minruntime/resolver.go:123-186``)."""
        mine = {share.name for share in self.shares.path(reclaimer)}
        path = self.shares.path(victim)
        below = [share for share in path if share.name not in mine]
        if len(below) == len(path):
            return duration_s(below[-1].spec.get("reclaimMinRuntime", "0s"))
        return next((duration_s(s.spec["reclaimMinRuntime"]) for s in (*below[-1:], *path[len(below) :])
                     if s.spec.get("reclaimMinRuntime")), 0.0)  # fmt: skip

    # ---- conditions ----------------------------------------------------------

    def _say(self, task: Task) -> None:
        """Write ``schedulingConditions`` (``pkg/apis/scheduling/v2alpha2/podgroup_types.go:345-365``).

        They are written at the end of a cycle for groups that wait; a group for which others are evicted
        does not (``framework/session.go:473-482``, ``api/podgroup_info/job_info.go:388-390``).  They are
        never removed, not even after placement
        (``cache/status_updater/default_status_updater.go:427-580``).
        """
        reason = self.reasons.get(task.name)
        if not reason:
            return
        said = {"reason": reason, "message": f"{reason} in queue {task.queue}"}
        conditions = [{"type": "UnschedulableOnNodePool", "status": "True", "reasons": [said]}]
        meta = task.group["metadata"]
        try:
            old = self.store.get("podgroups", meta["namespace"], meta["name"])
        except Refused:
            return
        if old.get("status", {}).get("schedulingConditions", []) != conditions:
            body = {"status": {"schedulingConditions": conditions}}
            self.store.patch("podgroups", meta["namespace"], meta["name"], body, part="status")


def _returns(node: Node, victim: Task) -> bool:
    """Return whether a victim fits in its old place."""
    if victim.count:
        return victim.count <= node.gpus - node.whole - len(node.groups)
    if victim.gpu_group in node.groups:
        return node.groups[victim.gpu_group] + node.need_mib(victim) <= node.mib
    return node.gpus - node.whole - len(node.groups) > 0


def _age(task: Task) -> tuple[str, str]:
    """Return the sort key by age: creation, then UID."""
    return task.group["metadata"]["creationTimestamp"], task.group["metadata"]["uid"]


def _node(node: Json) -> Node | None:
    """Return a ready node (``plugins/proportion/proportion.go:266-272``)."""
    ready = [
        c["status"] == "True" for c in node.get("status", {}).get("conditions", []) if c["type"] == "Ready"
    ]
    if not all(ready) or node.get("spec", {}).get("unschedulable"):
        return None
    mib = int(node["metadata"].get("labels", {}).get("nvidia.com/gpu.memory", "100"))
    gpus = int(node.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", "0"))
    return Node(node["metadata"]["name"], gpus, mib - mib % 100)


def _task(group: Json, pod: Json, priority: int) -> Task:
    """``api/pod_info/pod_info.go`` (requests by annotations)."""
    notes = pod["metadata"].get("annotations", {})
    if "gpu-fraction" in notes:
        portion = float(notes["gpu-fraction"])
        return Task(group, pod, priority, counted(portion), 0, portion)
    if "gpu-memory" in notes:
        # Of the smallest GPU while it waits (proportion.go:373-377); modelled with equal GPUs of 80 GiB.
        mib = int(notes["gpu-memory"])
        return Task(group, pod, priority, counted(mib / 81900), 0, 0.0, mib)
    count = sum(
        int(c.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", "0"))
        for c in pod["spec"]["containers"]
    )
    return Task(group, pod, priority, counted(1, count), count, 0.0)
