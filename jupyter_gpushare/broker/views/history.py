"""History: the timeline of one job, and one week of one user."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.records import DecisionRecord, JobRecord, UsageRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import WEEK_DAYS
from jupyter_gpushare.protocol import wire


async def timeline(registry: Registry, job: JobRecord, reader: str) -> wire.JobTimeline:
    """Return all steps of a job with their reasons, oldest first, as ``reader`` reads them.

    Raises:
        StoreError: the database cannot be read.
    """
    return timeline_of(job, await registry.store.decisions_about(job.lease_id), reader)


def timeline_of(job: JobRecord, decisions: Iterable[DecisionRecord], reader: str) -> wire.JobTimeline:
    """Return the timeline of a job, its decisions, start and end, as ``reader`` reads them."""
    moments = [_moment(job.submitted_at, "submitted", (messages.text("job.submitted"),))]
    for each in decisions:
        texts = messages.to_reader(each.texts, reader)
        moments.append(_moment(each.at, each.action, texts))
    if job.started_at:
        moments.append(_moment(job.started_at, "started", (messages.text("job.started"),)))
    if job.ended_at:
        moments.append(_moment(job.ended_at, "ended", job.reason_texts))
    return wire.JobTimeline(moments=sorted(moments, key=lambda moment: moment.at))


def _moment(at: str, what: str, texts: messages.Texts) -> wire.JobMoment:
    return wire.JobMoment(at=at, what=what, sentence_texts=list(texts))


async def week(registry: Registry, user: str) -> wire.History:
    """Return what a user used and lent in the last `WEEK_DAYS` days, unfinished use included.

    Raises:
        StoreError: the database cannot be read.
    """
    until = registry.iso_now()
    today = until[:10]
    first = (date.fromisoformat(today) - timedelta(days=WEEK_DAYS - 1)).isoformat()
    now = registry.clock()
    stretches: list[UsageRecord] = [
        u for u in registry.usage.sums.values() if u.user == user and u.day >= first
    ]
    stretches += [u for u in registry.usage.open(registry.leases.values(), now, until) if u.user == user]
    by_day: dict[tuple[str, str], list[UsageRecord]] = {}
    for use in stretches:
        by_day.setdefault((use.day, use.project), []).append(use)
    days = [
        wire.DayUse(
            day=day,
            project=project,
            used_gpu_s=round(sum(use.used_gpu_s for use in uses), 1),
            lent_gpu_s=round(sum(use.lent_gpu_s for use in uses), 1),
            saved_gib_s=round(sum(use.saved_gib_s for use in uses), 1),
        )
        for (day, project), uses in sorted(by_day.items())
    ]
    return wire.History(
        days=days,
        used_gpu_s=round(sum(use.used_gpu_s for use in stretches), 1),
        lent_gpu_s=round(sum(use.lent_gpu_s for use in stretches), 1),
        saved_gib_s=round(sum(use.saved_gib_s for use in stretches), 1),
        helped_jobs=await registry.store.helped(user, first),
    )
