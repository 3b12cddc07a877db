"""Answers of the API: records and measurements as messages of `protocol.wire`, without any decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from jupyter_gpushare import __version__, messages
from jupyter_gpushare.broker.control.ending import result_state
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.outlook import Offer
from jupyter_gpushare.broker.state.observations import Faults
from jupyter_gpushare.broker.state.records import DecisionRecord, JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry, keep_left
from jupyter_gpushare.broker.state.session_queue import QueuePlace
from jupyter_gpushare.broker.state.usage import own_milli
from jupyter_gpushare.broker.views import cluster_view
from jupyter_gpushare.broker.views.cluster_view import ClusterViewCache
from jupyter_gpushare.broker.views.lease_sentences import badge, sentence, share
from jupyter_gpushare.broker.views.lease_view import LeaseView
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, Lease, State, Why
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import DeviceSample
from jupyter_gpushare.wall_clock import before, seconds_between

# ---- the drain of a device, and the leases still on it, as `wire.Drain` ------


def drain_of(registry: Registry, uuid: str) -> wire.Drain | None:
    """Return the drain of a device, or None if it is not being drained."""
    drains = registry.devices.drains
    if (drain := drains.on(uuid)) is None:
        return None
    placed = [record for record in registry.index.placed.values() if uuid in record.lease.devices]
    return wire.Drain(
        **asdict(drain),
        machine=uuid not in drains.of,
        sessions=sum(not record.is_job for record in placed),
        jobs=sum(record.is_job for record in placed),
    )


# ---- absent owners of leases, for administrators and for `health` ------------


def owners(registry: Registry) -> wire.Owners:
    """Return the owners of leases that are absent from the Hub, or whose name has a new user."""
    waiting = Counter(record.lease.user for record in registry.index.queued.values())
    others = Counter(record.lease.user for record in registry.index.placed.values())
    found = [
        wire.Owner(
            name=owner.name,
            user=user,
            created=owner.created,
            jobs=waiting[user],
            others=others[user],
            held=owner.held,
        )
        for user, owner in registry.owners.of.items()
        if user in registry.owners.absent
    ]
    return wire.Owners(owners=[owner for owner in found if owner.jobs or owner.others])


def undated(registry: Registry) -> list[str]:
    """Return a sentence if the Hub does not report when its users were created."""
    if not registry.owners.are_undated:
        return []
    return [
        "The Hub does not report when it created some users: whoever gets the name of such a user gets the "
        "jobs and sessions too. Give the broker's role in c.JupyterHub.load_roles the scope read:users."
    ]


def held(registry: Registry) -> tuple[int, list[str]]:
    """Return the number of jobs held until an administrator decides, and a sentence if there are any."""
    found = [owner.jobs for owner in owners(registry).owners if owner.held and owner.jobs]
    if not found:
        return 0, []
    return sum(found), [
        f"{len(found)} owners of waiting jobs are gone from the Hub, or were created again: the jobs are "
        "held. `gpushare admin owners` lists them; `adopt` gives them to a user, `end` fails them."
    ]


# ---- memory of a device that was not granted ---------------------------------


def closed_of(registry: Registry, measured: DeviceSample, *, admin: bool) -> str:
    """Return why a device takes no new lease; for administrators with the processes that cause it."""
    observed = (
        (record, registry.observations[record.id].sample) for record in registry.index.placed.values()
    )
    named = [
        f"process {each.pid} ({messages.printable(each.name)}) of {record.lease.user}"
        for record, sample in observed
        for each in (sample.over if sample is not None else ())
        if each.pid and each.device == measured.uuid
    ]
    if not (admin and measured.closed and named):
        return measured.closed
    return f"{measured.closed}: {', '.join(named)}"


# ---- processes without a lease on a device, as `wire.UnleasedProcess` --------


def unleased_on(measured: DeviceSample | None) -> list[wire.UnleasedProcess]:
    """Return the processes without a lease that the last sample of a device shows."""
    return [
        wire.UnleasedProcess(
            process=each.process,
            pid=each.pid,
            uid=each.uid,
            name=messages.printable(each.name),
            used_bytes=each.used_bytes,
            kept=each.kept,
            ending=each.ending,
        )
        for each in (measured.unleased if measured is not None else ())
    ]


# ---- leases, jobs and projects -----------------------------------------------

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
# Health reports a lease whose processes could not be read for this time.
UNREAD_S = 10.0


class Views:
    """Builds answers from the registry and the current cluster view."""

    def __init__(self, registry: Registry, engine: Engine, faults: Faults) -> None:
        self.registry = registry
        self._faults = faults
        self.engine = engine
        self.cluster_views = ClusterViewCache(registry, engine)

    # ---- leases --------------------------------------------------------------

    def leases(self, user: str | None) -> list[wire.LeaseStatus]:
        """Return the leases of a user (None: of all users) that have not ended."""
        everyone = user is None
        mine = (r for r in self.registry.leases.values() if everyone or r.lease.user == user)
        return [self.lease(record, everyone=everyone) for record in mine]

    def lease(self, record: LeaseRecord, *, everyone: bool = False) -> wire.LeaseStatus:
        """Return one lease with measurements and sentences; ``everyone`` if the reader sees all leases."""
        seen, lease, registry = self._seen(record), record.lease, self.registry
        sample, kernels = registry.observations[record.id].sample, registry.observations[record.id].kernels
        level = registry.devices.level(lease.devices[0]) if lease.devices else ""
        return wire.LeaseStatus(
            id=record.id,
            user=lease.user,
            server=record.server,
            project=lease.project,
            kind=lease.kind,
            state=lease.state,
            size_texts=[messages.size_text(lease.size)],
            fraction_milli=lease.held_milli or lease.size.fraction_milli,
            device_count=lease.size.device_count,
            devices=list(lease.devices),
            device_name=seen.device_name,
            memory_limit_bytes=seen.memory_limit_bytes,
            memory_used_bytes=seen.lease.used_bytes,
            memory_saved_bytes=seen.lease.saved_bytes,
            utilization_percent=self._utilization(lease),
            level=str(sample.level) if sample else level,
            suspendable=not seen.obstacle,
            borrowed=seen.borrowed,
            wanted=seen.lease.wanted,
            badge_texts=[badge(seen)],
            lost=record.lost and record.state is State.RUNNING,
            sentence_texts=list(sentence(seen)),
            idle_s=seen.idle_s,
            lend_in_s=seen.lending.lend_in_s,
            back_in=seen.back,
            warned=seen.lending.warned,
            resizable=self.engine.resizable(lease),
            keep_until=self._kept_until(lease),
            keep_left_minutes=None if record.is_job else keep_left(registry, lease.user, lease.project),
            since_at=record.since_at,
            saved_lost=seen.has_lost,
            compute_share=seen.time_share.mode.value,
            share_percent=seen.time_share.granted,
            measured_share_percent=seen.time_share.measured,
            share_texts=list(share(seen)),
            **self._shared(seen, everyone=everyone),
            ends_at=(seen.site_end.at or None) if seen.site_end else None,
            ends_by=seen.site_end.by if seen.site_end else "",
            job=record.id[1:] if record.is_job else None,
            processes=[
                wire.ProcessUse(
                    pid=p.pid,
                    name=p.name,
                    kernel=kernels.get(p.kernel, p.kernel),
                    used_bytes=p.used_bytes,
                    kernel_id=p.kernel,
                    keeps=p.keeps,
                )
                for p in (sample.processes if sample else ())
            ],
        )

    def _seen(self, record: LeaseRecord, *, is_new: bool = False) -> LeaseView:
        view = self.cluster_views.recent() if is_new else self.cluster_views.now()
        return LeaseView(self.registry, view, record)

    def _shared(self, seen: LeaseView | None, *, everyone: bool) -> dict[str, Any]:
        """Return the fields about the other job on the GPU of a running one.

        As in the log of decisions, only readers of the same project and those who see all leases get its id.
        """
        if seen is None or (companion := seen.companion) is None:
            return {}
        other = self.registry.leases.get(companion.other)
        is_seen = other is not None and (everyone or other.lease.project == seen.lease.project)
        kept = companion.kept
        return {
            "shared": companion.role,
            "shared_with": companion.other[1:] if is_seen else "",
            "kept_speed_percent": None if kept is None else round(100 * kept, 1),
        }

    def _kept_until(self, lease: Lease) -> str | None:
        left_s = lease.keep_until_at - self.registry.clock()
        return before(self.registry.iso_now(), seconds=-left_s) if left_s > 0 else None

    def _utilization(self, lease: Lease) -> int | None:
        if lease.state is not State.RUNNING or lease.held_milli != WHOLE_GPU:
            return None  # the driver does not split utilization between processes
        return self.registry.devices.utilization_percent(lease.devices)

    # ---- jobs ----------------------------------------------------------------

    def jobs(self, user: str | None, *, limit: int) -> list[wire.Job]:
        """Return jobs of a user (None: of all users) in the order of `cluster_view.listed`."""
        mine = (j for j in self.registry.jobs.values() if user is None or j.user == user)
        found = cluster_view.listed(mine, self.registry, self.cluster_views, limit)
        return [self.job(job, everyone=user is None) for job in found]

    def job(self, job: JobRecord, *, is_new: bool = False, everyone: bool = False) -> wire.Job:
        """Return one job with its sentence, position and times.

        ``is_new`` if it was just submitted; in a long queue its position is then unknown.
        ``everyone`` if the reader sees all jobs.
        """
        job = self.registry.jobs.get(job.id, job)
        record = self.registry.leases.get(job.lease_id)
        now, ran_s = self.registry.clock(), job.ran_s
        if record is not None and not job.result and record.state is State.RUNNING:
            ran_s += max(0.0, now - record.entered_at)
        waited_s = seconds_between(job.submitted_at, job.ended_at or self.registry.iso_now()) - ran_s
        seen = None if job.result or record is None else self._seen(record, is_new=is_new)
        reason = sentence(seen) if seen else job.reason_texts
        request = wire.decode(job.request.encode(), wire.JobRequest)
        return wire.Job(
            **request.terms,
            source=request.source,
            id=job.id,
            name=job.name,
            state=_JOB_STATES[seen.record.state] if seen else result_state(job.result),
            exit_code=job.exit_code if job.result else None,
            attempt=record.attempt if record else job.attempts,
            reason_texts=list(reason),
            user=job.user,
            project=job.project,
            size_texts=[messages.size_text(request.requested_size())],
            command=list(job.command),
            position=seen.position if seen and seen.record.state is State.PENDING else None,
            submitted_at=job.submitted_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            waited_s=round(max(0.0, waited_s), 3),
            ran_s=round(ran_s, 3),
            preemptions=job.preemptions,
            log=f"~/.local/share/gpushare/jobs/{job.id}",
            server=record.handle if record and record.state is not State.PENDING else None,
            done=job.done,
            total=job.total,
            left_s=None if record is None else messages.left_s(record.lease, job.measure, now),
            cwd=job.cwd,
            variables=sorted(job.env),
            ends_in=seen.ends_in if seen else None,
            **self._shared(seen, everyone=everyone),
        )

    # ---- projects, devices, the rest ------------------------------------------

    def projects(self, groups: Sequence[str], *, everyone: bool = False) -> list[wire.ProjectUse]:
        """Return the projects of these Hub groups, or all projects."""
        policy, overrides, view = self.registry.policy, self.registry.overrides, self.cluster_views.now()
        names, cluster, uses = policy.projects_of(groups), view.cluster, view.outlook.usage
        return [
            wire.ProjectUse(
                name=project.name,
                quota_milli=project.quota_milli,
                weight=project.weight,
                limit_milli=project.limit_milli,
                in_use_milli=uses[project.name].in_use_milli,
                borrowed_milli=uses[project.name].borrowed_milli,
                lent_milli=round(view.lent_milli.get(project.name, 0.0)),
                fair_share_milli=uses[project.name].fair_share_milli,
                waiting=sum(
                    1
                    for x in cluster.leases
                    if x.project == project.name
                    and (x.state is State.PENDING or (x.state is State.SUSPENDED and x.kind is Kind.TRAIN))
                ),
                overridden=project.name in overrides,
                priority_max=policy.priority_max(project.name, overrides.get(project.name)),
                saved_bytes=sum(x.saved_bytes for x in cluster.leases if x.project == project.name),
            )
            for project in cluster.projects
            if everyone or project.name in names
        ]

    def offers(self, groups: Sequence[str], project: str) -> wire.Offers:
        """Return what a session of ``project`` could get now."""
        view, registry = self.cluster_views.now(), self.registry
        known = bool(view.cluster.devices) and registry.devices.are_known(registry.clock())
        offers = view.outlook.offers(project, self._sizes()) if known else ()
        use = next(p for p in self.projects((), everyone=True) if p.name == project)
        held = _held(view.cluster.leases)
        return wire.Offers(
            project=project,
            projects=list(registry.policy.projects_of(groups)),
            offers=[self._offer(offer, project) for offer in offers],
            use=use,
            free_milli=max(0, registry.devices.total_milli - held),
            total_milli=registry.devices.total_milli,
            idle_timeout_s=registry.policy.idle_timeout_of(project) if self._lends() else 0.0,
            shares=registry.policy.share,
        )

    def _lends(self) -> bool:
        """Return whether a session that starts now could be lent; MIG instances never are."""
        devices = self.registry.devices.for_planner()
        can_lend = any(device.suspendable and not device.profile for device in devices)
        return can_lend and not self.registry.lending_switch.obstacle

    def _sizes(self) -> list[Size]:
        """Return the offered sizes: the site's sizes of undivided GPUs, and each MIG profile."""
        profiles = dict.fromkeys(sorted(d.profile for d in self.registry.devices.for_planner()))
        sizes = list(self.registry.policy.sizes) if "" in profiles else []
        return sizes + [Size(WHOLE_GPU, profile=name) for name in profiles if name]

    def _offer(self, offer: Offer, project: str) -> wire.Offer:
        size = offer.size
        min_bytes, max_bytes, device = self._memory_of(offer)
        options: dict[str, str | int] = {"fraction": f"{size.fraction_milli / WHOLE_GPU:g}"}
        if size.profile:
            options = {"profile": size.profile}
        elif size.fraction_milli == WHOLE_GPU:
            options = {"gpus": size.device_count}
        starts: Literal["now", "soon", "no"] = "now" if offer.starts == "now" else "no"
        reason = ""
        if offer.starts == "asleep":
            starts, reason = "soon", "lent just now; it comes back with your first GPU cell"
        elif starts == "no":
            reason = messages.english(
                messages.waiting(offer.why, needs=size.text, free_milli=offer.free_milli)
            )
        elif offer.borrowed:
            reason = f"beyond the quota of project {project}: it may be taken back, and sleeps then"
        return wire.Offer(
            label=size.text,
            options=options,
            memory_bytes=min_bytes,
            memory_most_bytes=max_bytes if max_bytes > min_bytes else None,
            starts=starts,
            guaranteed=not offer.borrowed,
            reason=reason,
            device=device,
            waits=offer.waits,
        )

    def _memory_of(self, offer: Offer) -> tuple[int, int, str]:
        """Return the minimum and maximum memory of an offer in bytes, and its models of GPUs."""
        size, devices = offer.size, self.registry.devices
        fitting = [d for d in devices.for_planner() if d.profile == size.profile]
        if chosen := [d for d in fitting if d.uuid in offer.devices]:
            name = devices.model_name(offer.devices)
        else:
            # No device is free yet; it may be any of these.
            chosen = [d for d in fitting if d.usable and d.demand_milli(size) <= WHOLE_GPU] or fitting
            chosen.sort(key=lambda d: d.grantable_bytes)
            name = " or ".join(dict.fromkeys(d.name for d in chosen))
        count = size.device_count
        parts = sorted(d.grantable_bytes * size.fraction_milli // WHOLE_GPU for d in chosen)
        if len(parts) < count:  # the offer has more GPUs than the site
            return parts[0] * count, parts[-1] * count, name
        return sum(parts[:count]), sum(parts[-count:]), name

    def devices(self, *, admin: bool = False) -> wire.Devices:
        """Return the devices with their measurements and their held and claimed parts."""
        registry, cluster = self.registry, self.cluster_views.now().cluster
        inventory = registry.devices.inventory
        if inventory is None:
            return wire.Devices(
                devices=[], driver="", simulated=False, host_budget_bytes=0, host_saved_bytes=0
            )
        measured = {d.uuid: d for d in registry.devices.measured}
        claims, rows = self.cluster_views.now().outlook.claims_milli, []
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
                    movable=device.movable,
                    move_reason=device.move_reason,
                    drain=drain_of(registry, device.uuid),
                    closed=closed_of(registry, now, admin=admin) if now else "",
                    unleased=unleased_on(now) if admin else [],
                    held_milli=sum(
                        own_milli(x)
                        for x in cluster.leases
                        if device.uuid in x.devices and x.state in HOLDS_CAPACITY
                    ),
                    claimed_milli=claims.get(device.uuid, 0),
                    ladder=[wire.Rung(**asdict(rung)) for rung in device.ladder],
                )
            )
        return wire.Devices(
            devices=rows,
            driver=inventory.driver,
            simulated=inventory.simulated,
            host_budget_bytes=inventory.host_budget_bytes,
            host_saved_bytes=registry.devices.host_saved_bytes,
            watchdog=inventory.watchdog.value,
            left_out=list(registry.devices.left_out),
            guaranteed_milli=sum(project.quota_milli for project in cluster.projects),
        )

    def lending(self) -> wire.Lending:
        """Return the lending mode, and the counts of suspensions on this machine."""
        switch, counts = self.registry.lending_switch, self.registry.suspensions
        is_set = switch.override.mode is not None
        return wire.Lending(
            mode=switch.mode.value,
            configured=switch.configured.value,
            set_by=switch.override.by if is_set else "",
            set_at=switch.override.at if is_set else "",
            **asdict(counts),
        )

    def decisions(self, user: str | None, limit: int, reader: str = "") -> list[wire.Decision]:
        """Return the newest decisions about the leases of a user (None: all), newest first.

        They are worded for ``reader``, by default this user.
        """
        found: list[wire.Decision] = []
        for decision in reversed(self.registry.decisions.latest):
            if user is None or decision.user == user:
                found.append(_decision(decision, reader or user or "", show_all=user is None))
                if len(found) == limit:
                    break
        return found

    def status(self, user: str, groups: Sequence[str], *, admin: bool) -> wire.Status:
        """Return leases, jobs, projects and events of a user."""
        return wire.Status(
            seq=self.registry.notifications.seq,
            at=self.registry.iso_now(),
            user=user,
            admin=admin,
            leases=[
                self.lease(r)
                for r in self.registry.leases.values()
                if r.lease.user == user and r.state is not State.PENDING  # pending ones are in ``jobs``
            ],
            jobs=self.jobs(user, limit=100),
            projects=self.projects(groups),
            events=self.decisions(user, MAX_EVENTS),
            devices_known=self.registry.devices.are_known(self.registry.clock()),
        )

    def health(self) -> wire.Health:
        """Return the health of the broker, with a sentence for each fault."""
        reasons, devices = [*self.engine.trouble(), *self._faults.sentences()], self.registry.devices
        now = self.registry.clock()
        if devices.sample is None:
            reasons.append("The device helper does not answer: no GPU is given until it does.")
        elif not devices.are_known(now):
            age = f"{now - devices.sampled_at:.0f} s"
            reasons.append(f"The last measurement of the GPUs is {age} old: no GPU is given until a new one.")
        elif not devices.listed:
            reasons += ["The device helper found no GPU.", *(f"{reason}." for reason in devices.left_out)]
        if self.registry.journal.is_disk_full:
            reasons.append(
                "The disk of the broker's database is full: requests for changes are refused (507)."
            )
        elif self.registry.journal.is_blocked:
            reasons.append("The broker's database does not answer: requests for changes wait for it.")
        held_jobs, held_sentences = held(self.registry)
        reasons += [*held_sentences, *undated(self.registry)]
        measured = {d.uuid: d for d in devices.measured}
        current = (measured.get(device.uuid, device) for device in devices.listed)
        reasons += [f"GPU {d.uuid}: {d.reason}" for d in current if not d.healthy]
        reasons += [
            f"GPU {d.uuid} takes nothing new: {d.closed}." for d in devices.measured if d.healthy and d.closed
        ]
        reasons += [
            f"GPU {uuid}: the server of lease {lease} runs on it, and the database does not know it (was an "
            "older copy restored?): nothing new starts there until that server has stopped."
            for uuid, lease in devices.orphaned.items()
        ]
        reasons += [
            f"Lease {lease.lease}: the device helper could not read processes of its user on its GPU for "
            f"{now - lease.unread_since:.0f} s. It does not count as ended."
            for lease in (devices.sample.leases if devices.sample else ())
            if lease.unread_since and now - lease.unread_since > UNREAD_S
        ]
        return wire.Health(
            status="degraded" if reasons else "ok",
            version=__version__,
            epoch=self.registry.store.epoch,
            reasons=reasons,
            held_jobs=held_jobs,
            sample_age_s=None if devices.sample is None else round(max(0.0, now - devices.sampled_at), 1),
        )


def _held(leases: Iterable[Lease]) -> int:
    return sum(own_milli(x) * len(x.devices) for x in leases if x.state in HOLDS_CAPACITY)


def _decision(record: DecisionRecord, reader: str, *, show_all: bool) -> wire.Decision:
    return wire.Decision(
        seq=record.seq,
        at=record.at,
        lease=record.lease,
        user=record.user,
        project=record.project,
        action=record.action,
        why=record.why,
        for_lease=record.for_lease if show_all else None,
        sentence_texts=list(messages.to_reader(record.texts, reader)),
    )


# ---- sessions that wait for their start, for the spawn page and the lists of the queue


def spawn_wait(views: Views, place: QueuePlace) -> wire.SpawnWait:
    """Return the state and sentence of a place for the spawn page."""
    if place.grant is not None:
        left_s = place.ends_at() - views.registry.clock()
        size, left_text = messages.size_text(place.lease.size), messages.duration_text(left_s)
        reserved = messages.text("spawn.reserved", size, left_text)
        return wire.SpawnWait(state="ready", sentence=messages.english(reserved))
    waiting = views.registry.session_queue.waiting()
    position = next(n for n, each in enumerate(waiting, 1) if each.lease.id == place.lease.id)
    sentence = messages.english(_sentence(views, place, position))
    return wire.SpawnWait(state="waiting", sentence=sentence, position=position)


def waiting_sessions(views: Views, user: str | None) -> list[wire.WaitingSession]:
    """Return the waiting sessions of a user (None: of all users), in the order of the queue."""
    return [
        wire.WaitingSession(
            user=place.lease.user,
            server=place.lease.server,
            project=place.lease.project,
            size=place.lease.size.text,
            position=position,
            sentence_texts=list(_sentence(views, place, position)),
        )
        for position, place in enumerate(views.registry.session_queue.waiting(), 1)
        if user is None or place.lease.user == user
    ]


def _sentence(views: Views, place: QueuePlace, position: int) -> messages.Texts:
    explanation = views.cluster_views.now().outlook.explain(place.lease.id)
    return messages.waiting(
        "" if explanation.why is Why.NOT_WAITING else explanation.why,
        needs=messages.needs_of(place.lease),
        free_milli=explanation.free_milli,
        position=position,
    )
