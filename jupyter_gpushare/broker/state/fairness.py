"""Lags of projects and services of users: updated every round, stored every few minutes.

A crash loses minutes of a horizon of a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jupyter_gpushare.broker.state.records import Lags, MetaValue, UserService
from jupyter_gpushare.core.fairshare import Ledger
from jupyter_gpushare.core.model import Device, Lease, Project
from jupyter_gpushare.core.users import User, UserLedger


class FairnessTracker:
    """Lags of projects (`core.fairshare`) and services of users (`core.users`)."""

    def __init__(self, stored: Lags, stored_users: UserService) -> None:
        self.stored = stored
        self.stored_users = stored_users
        self._ledger: Ledger | None = None
        self._built_from: tuple[object, ...] = ()
        self._counted: object = None
        self._users: UserLedger | None = None
        self._users_counted: object = None

    @property
    def lags_gpu_s(self) -> Mapping[str, float]:
        """GPU-seconds that each project is behind its fair share; empty before the first update."""
        return self._ledger.lags_gpu_s if self._ledger else {}

    @property
    def user_levels(self) -> Mapping[User, int]:
        """Levels of users by project and user; empty before the first update."""
        return self._users.levels() if self._users else {}

    def update_users(self, version: object, leases: Callable[[], Iterable[Lease]], now: float) -> None:
        """Bring the users' service up to ``now``; from there on these leases count.

        ``leases`` are asked for when ``version`` is another than at the last call.
        """
        if self._users is None:
            stored = self.stored_users.gpu_s.items()
            services = {(project, user): s for project, users in stored for user, s in users.items()}
            self._users = UserLedger(services, now=now)
        self._users.advance(now)
        if self._users_counted != version:
            self._users.recount(leases())
            self._users_counted = version

    def move_owner(self, old: str, new: str) -> UserService:
        """Let what one owner received be what another did; returns what to store."""
        if self._users is not None:
            self.stored_users = _by_project(self._users.service_gpu_s())
        moved: dict[User, float] = {}
        for project, users in self.stored_users.gpu_s.items():
            for user, service in users.items():
                key = project, new if user == old else user
                moved[key] = moved.get(key, 0.0) + service
        self.drop_users()
        self.stored_users = _by_project(moved)
        return self.stored_users

    def drop_users(self) -> None:
        """Forget the users' levels: the order in force has none.  What is stored counts from there on."""
        self._users = self._users_counted = None

    def update(
        self,
        projects: tuple[Project, ...],
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags up to ``now``; from there on these projects, devices and leases count.

        ``leases`` are asked for when ``version`` is another than at the last call.
        """
        ledger, built_from = self._ledger, (projects, devices)
        if ledger is not None:
            ledger.advance(now)
        if ledger is None or built_from != self._built_from:
            lags = ledger.lags_gpu_s if ledger else self.stored.gpu_s
            ledger = self._ledger = Ledger(projects, devices, lags, now=now)
            self._built_from, self._counted = built_from, None
        if self._counted != version:
            ledger.recount(leases())
            self._counted = version

    def to_store(self) -> list[MetaValue]:
        """Return lags and users' service, as far as they are new."""
        found: list[MetaValue] = []
        if self._ledger is not None:
            lags = Lags(gpu_s={name: round(lag, 1) for name, lag in self._ledger.lags_gpu_s.items()})
            if lags != self.stored:
                self.stored = lags
                found.append(lags)
        if self._users is not None:
            services = _by_project(self._users.service_gpu_s())
            if services != self.stored_users:
                self.stored_users = services
                found.append(services)
        return found


def _by_project(services: Mapping[User, float]) -> UserService:
    found: dict[str, dict[str, float]] = {}
    for (project, user), service in services.items():
        found.setdefault(project, {})[user] = round(service, 1)
    return UserService(gpu_s=found)
