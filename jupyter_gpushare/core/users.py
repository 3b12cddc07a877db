"""Attained service of users, which decides between the users of a project.

The *service* of a user in a project is the sum of the GPU-seconds that the user's
jobs held there; half of it is forgotten in a day, as of lags (`fairshare`).  So
cutting a job into pieces, submitting it again or submitting many gains nothing.

Services are compared by *levels*, which are a factor of `STEP` apart: a user rises
when the service reaches the next level, and sinks only `SINK` levels below the own
one.  Else users would preempt each other's jobs whenever their services cross; with
half a level they did so twice as often (docs/benchmarks-archive.md).
The only user of a project has level 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, log, log1p, log2

from jupyter_gpushare.core.fairshare import HALF_LIFE_S
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, Lease, State
from jupyter_gpushare.core.quota import size_of

User = tuple[str, str]  # project, user

# Factor between levels; below `BASE_GPU_S` they are about as far apart as the second LAS threshold.
STEP = 1.1
BASE_GPU_S = 72_000.0
# Levels that a service falls below the own one before its user sinks, or half of the own one.
SINK = 1.5
# Part of a level that counts for nothing: times are floats.
_MARGIN = 1e-6
# Less than this is forgotten.
_LEAST_GPU_S = 1.0


@dataclass(slots=True)
class _User:
    at: float
    service_gpu_s: float = 0.0
    held_milli: int = 0
    jobs: int = 0
    level: int = 0
    crosses_at: float = inf

    def advance(self, now: float) -> None:
        """Bring the service up to ``now``, and the level after it."""
        limit = self.held_milli / WHOLE_GPU * HALF_LIFE_S / log(2)
        self.service_gpu_s = limit + (self.service_gpu_s - limit) * 0.5 ** ((now - self.at) / HALF_LIFE_S)
        self.at = now
        reached = _reached(self.service_gpu_s)
        self.level = max(int(reached), self.level)
        while reached < _sinks_at(self.level):
            self.level -= 1
        bound = _starts_at(self.level + 1 if limit > self.service_gpu_s else _sinks_at(self.level) - _MARGIN)
        part = (bound - limit) / (self.service_gpu_s - limit) if self.service_gpu_s != limit else 1.0
        self.crosses_at = now - HALF_LIFE_S * log2(part) if 0 < part < 1 else inf


def _reached(service_gpu_s: float) -> float:
    """Levels that a service reaches."""
    return log1p(service_gpu_s / BASE_GPU_S) / log(STEP) + _MARGIN / 2


def _sinks_at(level: int) -> float:
    """Levels below which the service of a user of ``level`` falls before the user sinks."""
    return level - min(SINK, level / 2)


def _starts_at(level: float) -> float:
    return BASE_GPU_S * (float(STEP**level) - 1)


class UserLedger:
    """Adds up the services of users, and says their levels."""

    def __init__(self, service_gpu_s: Mapping[User, float], *, now: float) -> None:
        self._now = now
        self._users: dict[User, _User] = {}
        self._competing: Counter[str] = Counter()  # users with jobs, by project
        for key, service in service_gpu_s.items():
            user = self._users[key] = _User(now, service)
            user.advance(now)

    def recount(self, leases: Iterable[Lease]) -> None:
        """Count exactly these leases from now on."""
        for user in self._users.values():
            user.advance(self._now)
            user.held_milli = user.jobs = 0
        self._competing.clear()
        for lease in leases:
            self.count(lease, 1)
        for user in self._users.values():
            user.advance(self._now)

    def count(self, lease: Lease, sign: int) -> None:
        """Add a job from now on (``sign`` 1), or take it out (-1)."""
        if lease.kind is not Kind.TRAIN or lease.state in (State.RELEASED, State.FAILED):
            return
        key = lease.project, lease.user
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = _User(self._now)
        had = bool(user.jobs)
        user.jobs += sign
        self._competing[lease.project] += bool(user.jobs) - had
        if lease.state in HOLDS_CAPACITY:
            user.advance(self._now)
            user.held_milli += sign * size_of(lease)
            user.advance(self._now)

    def advance(self, now: float) -> None:
        """Bring services and levels up to ``now``; nothing counted changed since the last call."""
        self._now = now
        for user in self._users.values():
            if user.crosses_at <= now:
                user.advance(now)

    @property
    def next_at(self) -> float:
        """When the next user of a project with several reaches another level."""
        competing = (x for key, x in self._users.items() if self._competing[key[0]] > 1)
        return min((x.crosses_at for x in competing), default=inf)

    def levels(self) -> dict[User, int]:
        """Return the levels above 0 of users with jobs in projects with several of them."""
        return {
            key: user.level
            for key, user in self._users.items()
            if user.jobs and user.level and self._competing[key[0]] > 1
        }

    def service_gpu_s(self) -> dict[User, float]:
        """Return the services up to now; those that have faded are forgotten."""
        for key, user in tuple(self._users.items()):
            user.advance(self._now)
            if not user.jobs and user.service_gpu_s < _LEAST_GPU_S:
                del self._users[key]
        return {key: user.service_gpu_s for key, user in self._users.items()}
