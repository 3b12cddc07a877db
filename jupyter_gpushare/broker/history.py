"""Looking back: the life of one job, and a week of one user."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, timedelta

from jupyter_gpushare import wire
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.records import DecisionRecord, JobRecord, UsageRecord
from jupyter_gpushare.broker.usage import WEEK_DAYS, use_of


async def timeline(book: Book, job: JobRecord) -> wire.JobTimeline:
    """Return every step of a job with its reason, oldest first.

    Raises:
        StoreError: the database cannot be read.
    """
    return told(job, await book.store.decisions_about(job.lease_id))


def told(job: JobRecord, decisions: Iterable[DecisionRecord]) -> wire.JobTimeline:
    """Return the steps of a job: what was decided about it, and its own beginning and end."""
    moments = [wire.JobMoment(at=job.submitted_at, what="submitted", sentence="Submitted.")]
    moments += [wire.JobMoment(at=d.at, what=d.action, sentence=d.sentence) for d in decisions]
    if job.started_at:
        moments.append(wire.JobMoment(at=job.started_at, what="started", sentence="Its command started."))
    if job.ended_at:
        how = job.reason or ("Done." if job.exit_code == 0 else f"Ended with exit code {job.exit_code}.")
        moments.append(wire.JobMoment(at=job.ended_at, what="ended", sentence=how))
    return wire.JobTimeline(moments=sorted(moments, key=lambda moment: moment.at))


async def week(book: Book, user: str) -> wire.History:
    """Return what a user took in the last `WEEK_DAYS` days, what is taken at this moment included.

    Raises:
        StoreError: the database cannot be read.
    """
    today = book.iso_now()[:10]
    first = (date.fromisoformat(today) - timedelta(days=WEEK_DAYS - 1)).isoformat()
    now = book.clock()
    stretches: list[UsageRecord] = [u for u in book.usage.sums.values() if u.user == user and u.day >= first]
    for record in book.leases.values():
        if record.lease.user == user and (use := use_of(record, today, now - record.entered_at)):
            stretches.append(use)
    stretches += [u for u in book.lending.open(book.leases.values(), now, today) if u.user == user]
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
        helped_jobs=await book.store.helped(user, first),
    )
