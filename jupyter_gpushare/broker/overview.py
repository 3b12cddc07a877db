"""What the administrator's page says beside the lists: what the GPUs do, and what needs a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import quantiles

from jupyter_gpushare import words
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.desk import Desk
from jupyter_gpushare.broker.machine import Shares, shares, thinned
from jupyter_gpushare.broker.moment import Moments
from jupyter_gpushare.broker.records import MachineUse
from jupyter_gpushare.broker.usage import WEEK_DAYS
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, State

# Hours that can be shown, and in how many parts.
PERIODS = {"24h": 24.0, "7d": 7 * 24.0, "90d": 90 * 24.0}
PARTS = 180
# A guarantee is met within a minute, or something is wrong.
OWED_S = 60.0
# A session that is idle for so long and keeps its GPU needs a look.
IDLE_LONG_S = 3600.0
# What happened in the last hours needs a look.
LATELY_HOURS = 24
_WORRYING = ("lost", "watchdog")
MOST_LOOKS = 30
# Fewer jobs tell nothing about waiting.
_LEAST_JOBS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Something that needs a look: a sentence, and the session that the administrator may lend at once."""

    sentence: str
    lend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectWeek:
    """The last seven days of a project."""

    used_gpu_h: float
    lent_gpu_h: float
    waited_s: tuple[float, float] | None  # half of the jobs waited less than, and 95 %; None: too few


class Overview:
    """Answers built from the book."""

    def __init__(self, book: Book, desk: Desk, moments: Moments) -> None:
        self._book = book
        self._desk = desk
        self._moments = moments

    def now(self) -> Shares:
        """Return what the GPUs do at this moment."""
        cluster = self._moments.now().cluster
        usable = [device.uuid for device in cluster.devices if device.usable]
        return shares(cluster.leases, usable, len(cluster.devices) - len(usable))

    async def past(self, period: str) -> list[MachineUse | None]:
        """Return what the GPUs did, in `PARTS` equal parts, oldest first; None where nothing is known.

        Raises:
            StoreError: the database cannot be read.
        """
        book, hours = self._book, PERIODS[period]
        until = book.iso_now()
        first = datetime.fromisoformat(until) - timedelta(hours=hours)
        since = first.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return thinned(await book.store.machine_since(since), until, hours, PARTS)

    def weeks(self) -> dict[str, ProjectWeek]:
        """Return what each project took, lent and waited for in the last seven days."""
        book = self._book
        first = (datetime.fromisoformat(book.iso_now()) - timedelta(days=WEEK_DAYS - 1)).date().isoformat()
        sums = [use for use in book.usage.sums.values() if use.day >= first]
        waited: dict[str, list[float]] = {}
        for job in book.jobs.values():
            if job.started_at and job.started_at >= first:
                begun = datetime.fromisoformat(job.started_at) - datetime.fromisoformat(job.submitted_at)
                waited.setdefault(job.project, []).append(begun.total_seconds())
        return {
            project.name: ProjectWeek(
                used_gpu_h=sum(use.used_gpu_s for use in sums if use.project == project.name) / 3600,
                lent_gpu_h=sum(use.lent_gpu_s for use in sums if use.project == project.name) / 3600,
                waited_s=_half_and_most(waited.get(project.name, [])),
            )
            for project in snapshot.projects(book)
        }

    def looks(self) -> list[Look]:
        """Return what needs a look, most urgent first."""
        return [*self._promised(), *self._starved(), *self._idle(), *self._kept(), *self._lately()][
            :MOST_LOOKS
        ]

    def _promised(self) -> list[Look]:
        """Guarantees that cannot all be met."""
        cluster = self._moments.now().cluster
        promised = sum(project.quota_milli for project in cluster.projects) / WHOLE_GPU
        if not cluster.devices or promised <= len(cluster.devices):
            return []
        have = len(cluster.devices)
        told = f"The projects are guaranteed {promised:g} GPUs together, and there are {have}"
        return [Look(sentence=f"{told}: not all of that can be kept.")]

    def _starved(self) -> list[Look]:
        """Projects that wait for long for what they are guaranteed, and who borrows meanwhile."""
        moment = self._moments.now()
        late = {
            lease.project
            for lease in moment.cluster.leases
            if lease.id in moment.why and moment.at - lease.waits_since_at >= OWED_S
        }
        found = []
        for project in moment.cluster.projects:
            use = moment.uses[project.name]
            owed = min(project.quota_milli - (use.in_use_milli - use.borrowed_milli), use.waiting_milli)
            if owed <= 0 or project.name not in late:
                continue
            others = [u for u in moment.uses.values() if u.borrowed_milli and u is not use]
            who = ", ".join(f"{u.project} borrows {u.borrowed_milli / WHOLE_GPU:g}" for u in others)
            sentence = f"Project {project.name} waits for {owed / WHOLE_GPU:g} GPU of what it is guaranteed"
            found.append(Look(sentence=f"{sentence}{'; ' if who else ''}{who}."))
        return found

    def _idle(self) -> list[Look]:
        """Sessions that are idle for long and keep their GPU, the longest first."""
        book, now = self._book, self._book.clock()
        idle = []
        for record in book.leases.values():
            if record.lease.kind is not Kind.BUILD or record.state is not State.RUNNING:
                continue
            since = snapshot.idle_since(book, record, now)
            if since is not None and now - since >= IDLE_LONG_S:
                idle.append((now - since, record))
        found = []
        for idle_s, record in sorted(idle, key=lambda item: -item[0]):
            obstacle = snapshot.suspend_obstacle(book, record)
            sentence = f"{book.name_of(record)} has been idle for {words.duration(idle_s)}"
            if obstacle:
                found.append(Look(sentence=f"{sentence} and cannot be put to sleep: {obstacle}."))
            else:
                found.append(Look(sentence=f"{sentence}; nobody has needed its GPU.", lend=record.id))
        return found

    def _kept(self) -> list[Look]:
        """Who used up most of the day's budget for keeping an idle GPU."""
        budget = self._book.policy.keep_minutes_per_day
        users = {r.lease.user for r in self._book.leases.values() if r.lease.kind is Kind.BUILD}
        left = sorted((self._desk.keep_left(user), user) for user in users)
        return [
            Look(sentence=f"{user} kept an idle GPU for {budget - minutes:.0f} of {budget:g} minutes today.")
            for minutes, user in left
            if minutes <= budget / 2 and budget
        ]

    def _lately(self) -> list[Look]:
        """GPU memory that was lost, and what the watchdog saw, in the last hours."""
        since = datetime.fromisoformat(self._book.iso_now()) - timedelta(hours=LATELY_HOURS)
        return [
            Look(sentence=f"{d.at[:16].replace('T', ' ')} UTC: {d.sentence}")
            for d in reversed(self._book.decisions.latest)
            if d.action in _WORRYING and datetime.fromisoformat(d.at) >= since
        ]


def _half_and_most(seconds: Sequence[float]) -> tuple[float, float] | None:
    if len(seconds) < _LEAST_JOBS:
        return None
    twentieths = quantiles(seconds, n=20, method="inclusive")
    return twentieths[9], twentieths[18]
