"""What the broker shows: records and measurements turned into answers of `wire`.

Nothing is decided here.  What `core` has to work out is in `moment`, what a
sentence depends on in `facts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from jupyter_gpushare import __version__, wire, words
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.facts import Facts
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.loop import STALE_S
from jupyter_gpushare.broker.moment import Moments
from jupyter_gpushare.broker.records import DecisionRecord, JobRecord, LeaseRecord
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    WHOLE_GPU,
    Kind,
    Lease,
    State,
)

_JOB_STATES: Mapping[State, wire.JobState] = {
    State.PENDING: "queued",
    State.GRANTED: "starting",
    State.RUNNING: "running",
    State.SUSPENDING: "suspended",
    State.SUSPENDED: "suspended",
    State.RESUMING: "suspended",
    State.STOPPING: "stopping",
}
MAX_EVENTS = 20


class Views:
    """Answers built from the book."""

    def __init__(self, book: Book, forecast: Forecast) -> None:
        self.book = book
        self.forecast = forecast
        self.moments = Moments(book)
        self._facts = Facts(book, self.moments, forecast)

    # ---- leases --------------------------------------------------------------

    def leases(self, user: str | None) -> list[wire.LeaseStatus]:
        """Return the living leases of a user, or of all."""
        return [self.lease(r) for r in self.book.leases.values() if user is None or r.lease.user == user]

    def lease(self, record: LeaseRecord) -> wire.LeaseStatus:
        """Return what people see of one lease."""
        facts, lease, book = self._facts.of(record), record.lease, self.book
        sample = book.live[record.id].sample if record.id in book.live else None
        level = {d.uuid: str(d.level) for d in book.inventory.devices} if book.inventory else {}
        kernels = book.live[record.id].kernels if record.id in book.live else {}
        return wire.LeaseStatus(
            id=record.id,
            user=lease.user,
            server=record.server,
            project=lease.project,
            kind=lease.kind,
            state=lease.state,
            size=facts.size,
            fraction_milli=lease.held_milli or lease.fraction_milli,
            device_count=lease.device_count,
            devices=list(lease.devices),
            device_name=facts.device_name,
            memory_limit_bytes=facts.memory_limit_bytes,
            memory_used_bytes=facts.memory_used_bytes,
            memory_saved_bytes=facts.memory_saved_bytes,
            utilization_percent=self._utilization(lease),
            level=str(sample.level) if sample else level.get(lease.devices[0], "") if lease.devices else "",
            suspendable=facts.suspendable,
            borrowed=facts.borrowed,
            wanted=facts.wanted,
            badge=words.badge(facts),
            lost=record.note == words.STATE_LOST and record.state is State.RUNNING,
            sentence=words.sentence(facts),
            idle_s=facts.idle_s,
            lend_in_s=facts.lend_in_s,
            since_at=record.since_at,
            job=record.id[1:] if record.is_job else None,
            processes=[
                wire.ProcessUse(
                    pid=p.pid,
                    name=p.name,
                    kernel=kernels.get(p.kernel, p.kernel),
                    used_bytes=p.used_bytes,
                    kernel_id=p.kernel,
                )
                for p in (sample.processes if sample else ())
            ],
        )

    def _utilization(self, lease: Lease) -> int | None:
        sample = self.book.sample
        if sample is None or lease.state is not State.RUNNING or lease.held_milli != WHOLE_GPU:
            return None  # of a shared device nobody can tell whose utilization it is
        mine = [d.utilization_percent for d in sample.devices if d.uuid in lease.devices]
        return sum(mine) // len(mine) if mine else None

    def _estimate(self, record: LeaseRecord) -> wire.StartEstimate | None:
        found = self.forecast.of(record.id)
        if found is None or record.state not in (State.PENDING, State.SUSPENDED):
            return None
        return wire.StartEstimate(
            low_s=round(found.low_s), likely_s=round(found.likely_s), high_s=round(found.high_s)
        )

    # ---- jobs ----------------------------------------------------------------

    def jobs(self, user: str | None, *, limit: int) -> list[wire.Job]:
        """Return jobs: those at work, those that were, those in the queue, ended ones; each newest first.

        However many wait, a fifth is for those that ended last, so that their owners hear of it.
        """
        mine = [j for j in self.book.jobs.values() if user is None or j.user == user]
        living = sorted((j for j in mine if not j.result), key=self._how_far, reverse=True)
        ended = sorted((j for j in mine if j.result), key=lambda j: j.ended_at or "", reverse=True)
        shown = living[: limit - min(len(ended), limit // 5)]
        return [self.job(j) for j in (*shown, *ended[: limit - len(shown)])]

    def _how_far(self, job: JobRecord) -> tuple[bool, bool, str]:
        record = self.book.leases.get(job.lease_id)
        if record is None:
            return False, False, job.submitted_at
        return record.state is not State.PENDING, record.attempt > 0, job.submitted_at

    def job(self, job: JobRecord) -> wire.Job:
        """Return what people see of one job."""
        job = self.book.jobs.get(job.id, job)
        record = self.book.leases.get(job.lease_id)
        state: wire.JobState
        position = None
        ran_s = job.ran_s
        if job.result or record is None:
            state, reason = _ended(job), job.reason
        else:
            facts = self._facts.of(record)
            state, reason = _JOB_STATES[record.state], words.sentence(facts)
            if record.state is State.PENDING:
                position = self.moments.now().position.get(record.id)
            if record.state is State.RUNNING:
                ran_s += max(0.0, self.book.clock() - record.entered_at)
        request = wire.decode(job.request.encode(), wire.JobRequest)
        return wire.Job(
            id=job.id,
            name=job.name,
            state=state,
            exit_code=job.exit_code if job.result else None,
            attempt=record.attempt if record else job.attempts,
            reason=reason,
            user=job.user,
            project=job.project,
            size=words.size_as_written(request.gpus, request.memory, request.profile),
            command=list(job.command),
            checkpoint=request.checkpoint,
            position=position,
            submitted_at=job.submitted_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            waited_s=round(
                max(0.0, _seconds(job.submitted_at, job.ended_at or self.book.iso_now()) - ran_s), 3
            ),
            ran_s=round(ran_s, 3),
            preemptions=job.preemptions,
            log=f"~/.local/share/gpushare/jobs/{job.id}",
            server=record.handle if record and record.state is not State.PENDING else None,
            done=job.done,
            total=job.total,
            cwd=job.cwd,
            variables=sorted(job.env),
            gpus=request.gpus,
            memory=request.memory,
            profile=request.profile,
            retries=request.retries,
            borrow=request.borrow,
            source=request.source,
            estimate=None if record is None else self._estimate(record),
            notify=request.notify,
            priority=request.priority,
            grace_s=request.grace_s,
        )

    # ---- projects, devices, the rest ------------------------------------------

    def projects(self, groups: Sequence[str], *, everyone: bool = False) -> list[wire.ProjectUse]:
        """Return the projects of a user, or all."""
        names = self.book.policy.projects_of(groups)
        moment = self.moments.now()
        cluster, borrowed, uses = moment.cluster, moment.borrowed, moment.uses
        return [
            wire.ProjectUse(
                name=project.name,
                quota_milli=project.quota_milli,
                weight=project.weight,
                limit_milli=project.limit_milli,
                in_use_milli=uses[project.name].in_use_milli,
                borrowed_milli=_held(
                    x for x in cluster.leases if x.project == project.name and borrowed.get(x.id)
                ),
                lent_milli=round(moment.lent_milli.get(project.name, 0.0)),
                fair_share_milli=uses[project.name].fair_share_milli,
                waiting=sum(
                    1
                    for x in cluster.leases
                    if x.project == project.name
                    and (x.state is State.PENDING or (x.state is State.SUSPENDED and x.kind is Kind.TRAIN))
                ),
                overridden=project.name in self.book.overrides,
                saved_bytes=sum(x.saved_bytes for x in cluster.leases if x.project == project.name),
            )
            for project in cluster.projects
            if everyone or project.name in names
        ]

    def offers(self, groups: Sequence[str], project: str) -> wire.Offers:
        """Return what a session of ``project`` could get now."""
        worked, book = self.moments.now(), self.book
        names = book.policy.projects_of(groups)
        known = bool(worked.cluster.devices) and book.clock() - book.sampled_at <= STALE_S
        offers = (
            [
                self._offer(o, project)
                for o in explain.offers(worked.cluster, project, self._sizes(), worked.at)
            ]
            if known
            else []
        )
        use = next(p for p in self.projects((), everyone=True) if p.name == project)
        held = _held(x for x in worked.cluster.leases if x.state in HOLDS_ROOM)
        return wire.Offers(
            project=project,
            projects=list(names),
            offers=offers,
            use=use,
            free_milli=max(0, snapshot.total_milli(book) - held),
            total_milli=snapshot.total_milli(book),
            idle_timeout_s=book.policy.idle_timeout_s,
        )

    def _sizes(self) -> list[explain.Size]:
        """What is offered: the site's sizes where a GPU is whole, and every profile of MIG instances."""
        profiles = dict.fromkeys(sorted(d.profile for d in snapshot.devices(self.book)))
        sizes = [explain.Size(*size) for size in self.book.policy.sizes] if "" in profiles else []
        return sizes + [explain.Size(WHOLE_GPU, profile=name) for name in profiles if name]

    def _offer(self, offer: explain.Offer, project: str) -> wire.Offer:
        devices = [d for d in snapshot.devices(self.book) if d.profile == offer.profile]
        device = max(devices, key=lambda d: d.grantable_bytes)
        label = words.size(offer.fraction_milli, offer.device_count, profile=offer.profile)
        options: dict[str, str | int] = {"fraction": f"{offer.fraction_milli / WHOLE_GPU:g}"}
        if offer.profile:
            options = {"profile": offer.profile}
        elif offer.fraction_milli == WHOLE_GPU:
            options = {"gpus": offer.device_count}
        starts: Literal["now", "soon", "no"] = "now" if offer.starts == "now" else "no"
        reason = ""
        if offer.starts == "asleep":
            starts, reason = "soon", "lent just now; it comes back with your first GPU cell"
        elif starts == "no":
            reason = words.waiting(offer.why, needs=label, free_milli=offer.free_milli, position=None)
        elif offer.borrowed:
            reason = f"beyond the quota of project {project}: it may be taken back, and sleeps then"
        return wire.Offer(
            label=label,
            options=options,
            memory_bytes=device.grantable_bytes * offer.fraction_milli // WHOLE_GPU * offer.device_count,
            starts=starts,
            guaranteed=not offer.borrowed,
            reason=reason,
            device=device.name,
        )

    def devices(self) -> wire.Devices:
        """Return the devices, measured, with what is held and claimed of each."""
        book, cluster = self.book, self.moments.now().cluster
        inventory, sample = book.inventory, book.sample
        if inventory is None:
            return wire.Devices(
                devices=[], driver="", simulated=False, host_budget_bytes=0, host_saved_bytes=0
            )
        measured = {d.uuid: d for d in sample.devices} if sample else {}
        claims = explain.claims(cluster)
        rows = []
        for device in inventory.devices:
            now = measured.get(device.uuid)
            rows.append(
                wire.DeviceStatus(
                    uuid=device.uuid,
                    name=device.name,
                    memory_bytes=device.memory_bytes,
                    used_bytes=now.used_bytes if now else 0,
                    utilization_percent=now.utilization_percent if now else 0,
                    healthy=now.healthy if now else device.healthy,
                    reason=now.reason if now else device.reason,
                    level=str(device.level),
                    suspendable=device.suspendable,
                    suspend_reason=device.suspend_reason,
                    held_milli=sum(
                        x.held_milli
                        for x in cluster.leases
                        if device.uuid in x.devices and x.state in HOLDS_ROOM
                    ),
                    claimed_milli=claims.get(device.uuid, 0),
                    ladder=[
                        wire.Rung(level=str(rung.level), offered=rung.offered, reason=rung.reason)
                        for rung in device.ladder
                    ],
                )
            )
        return wire.Devices(
            devices=rows,
            driver=inventory.driver,
            simulated=inventory.simulated,
            host_budget_bytes=inventory.host_budget_bytes,
            host_saved_bytes=sample.host_saved_bytes if sample else 0,
            watchdog=inventory.watchdog.value,
        )

    def decisions(self, user: str | None, limit: int) -> list[wire.Decision]:
        """Return the newest decisions about a user's leases, newest first."""
        found: list[wire.Decision] = []
        for decision in reversed(self.book.decisions.latest):
            if user is None or decision.user == user:
                found.append(_decision(decision, show_all=user is None))
                if len(found) == limit:
                    break
        return found

    def status(self, user: str, groups: Sequence[str], *, admin: bool) -> wire.Status:
        """Return everything that is a user's."""
        return wire.Status(
            seq=self.book.seq,
            at=self.book.iso_now(),
            user=user,
            admin=admin,
            leases=[
                self.lease(r)
                for r in self.book.leases.values()
                if r.lease.user == user and r.state is not State.PENDING  # those are in ``jobs``
            ],
            jobs=self.jobs(user, limit=100),
            projects=self.projects(groups),
            events=self.decisions(user, MAX_EVENTS),
            devices_known=self.book.clock() - self.book.sampled_at <= STALE_S,
        )

    def health(self) -> wire.Health:
        """Return whether everything that is needed answers."""
        reasons = []
        if self.book.inventory is None or self.book.clock() - self.book.sampled_at > STALE_S:
            reasons.append("The device helper does not answer: nothing is granted until it does.")
        elif not self.book.inventory.devices:
            reasons.append("The device helper found no GPU.")
        reasons += [f"GPU {d.uuid}: {d.reason}" for d in self.devices().devices if not d.healthy]
        reasons += [
            f"GPU {uuid}: the server of lease {lease} runs on it, and the database does not know it (was an "
            "older copy restored?): nothing new is granted there until that server has stopped."
            for uuid, lease in self.book.strayed.items()
        ]
        return wire.Health(
            status="degraded" if reasons else "ok",
            version=__version__,
            epoch=self.book.store.epoch,
            reasons=reasons,
        )


def _held(leases: Iterable[Lease]) -> int:
    return sum(x.held_milli * len(x.devices) for x in leases if x.state in HOLDS_ROOM)


def _decision(record: DecisionRecord, *, show_all: bool) -> wire.Decision:
    return wire.Decision(
        seq=record.seq,
        at=record.at,
        lease=record.lease,
        user=record.user,
        project=record.project,
        action=record.action,
        why=record.why,
        for_lease=record.for_lease if show_all else None,
        sentence=record.sentence,
    )


def _ended(job: JobRecord) -> wire.JobState:
    match job.result:
        case "succeeded":
            return "succeeded"
        case "cancelled":
            return "cancelled"
        case _:
            return "failed"


def _seconds(start: str, end: str) -> float:
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())
