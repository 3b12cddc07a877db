"""The site's configuration as plain values, built once from the traits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from jupyter_gpushare.broker.state.records import LendingMode, ProjectOverride
from jupyter_gpushare.core.model import DEFAULT_ORDER, DEFAULT_POLICY, WHOLE_GPU, Order, Project, Settings
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import ComputeShare

# ---- receivers of the broker's messages about jobs, as the administrator allows

_URL_CHARS = 2_000
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}@[A-Za-z0-9][A-Za-z0-9.-]{0,252}")


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where messages go; an empty field means nowhere."""

    url: str = ""  # receives JSON by POST
    mail_command: tuple[str, ...] = ()  # receives a mail on its standard input
    mail_to: str = "{user}"  # an address; {user} stands for the name of the job's owner
    mail_from: str = ""

    def address_of(self, user: str) -> str:
        """Return the mail address of a user.

        Raises:
            InvalidRequest: the name of the user makes no valid address.
        """
        address = self.mail_to.replace("{user}", user)
        if not _ADDRESS.fullmatch(address):
            raise InvalidRequest("this site has no mail address for %1", repr(user[:60]))
        return address

    def check(self, user: str, request: wire.JobRequest) -> None:
        """Refuse a job that asks for mail if the site or the user has none.

        Raises:
            InvalidRequest: its text says what to change.
        """
        if request.notify_mail and not self.mail_command:
            raise InvalidRequest(
                "this site sends no mail: submit without it, or with the address of a webhook (--notify)"
            )
        if request.notify_mail:
            self.address_of(user)


def is_url(text: str) -> bool:
    """Return whether a text is an http or https URL with a host, in printable ASCII without spaces."""
    if len(text) > _URL_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# ---- the policy --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """One project as configured; ``quota`` is a number of GPUs or a percentage of all GPUs."""

    name: str
    quota_milli: int | None = None  # exactly one of these two is set
    quota_percent: float | None = None
    weight: int = 1
    limit_milli: int | None = None
    priority: int = 0
    priority_max: int = 0  # the highest priority that its members may give to their jobs
    groups: tuple[str, ...] = ()  # members of these Hub groups belong to it
    never_sleep: bool = False  # its members may mark sessions as never to be suspended
    # Rules of its sessions; None: the site's (`Policy`).
    idle_timeout_s: float | None = None
    notice_s: float | None = None
    max_hold_s: float | None = None
    keep_minutes_per_day: float | None = None

    def project(self, total_milli: int, override: ProjectOverride | None) -> Project:
        """Return the numbers in force on a machine with ``total_milli`` of GPU."""
        quota = self.quota_milli
        if quota is None:
            quota = int(total_milli * (self.quota_percent or 0.0) / 100)
        project = Project(
            name=self.name,
            quota_milli=quota,
            weight=self.weight,
            limit_milli=self.limit_milli,
            priority=self.priority,
        )
        if override is None:
            return project
        return replace(
            project,
            quota_milli=project.quota_milli if override.quota_milli is None else override.quota_milli,
            weight=project.weight if override.weight is None else override.weight,
            limit_milli=project.limit_milli if override.limit_milli is None else override.limit_milli,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The site's projects, limits and planner settings; most defaults are those of `DEFAULT_POLICY`."""

    projects: tuple[ProjectConfig, ...]
    idle_timeout_s: float = DEFAULT_POLICY.idle_timeout_s
    notice_s: float = DEFAULT_POLICY.notice_s
    adaptive_idle: bool = False  # each session learns its own idle timeout from its pauses
    order: Order = DEFAULT_ORDER
    las_thresholds_gpu_s: tuple[float, ...] = DEFAULT_POLICY.las_thresholds_gpu_s
    min_run_s: float = DEFAULT_POLICY.min_run_s
    preempt_cost_s: float = DEFAULT_POLICY.preempt_cost_s
    starvation_guard_s: float | None = DEFAULT_POLICY.starvation_guard_s
    max_bypass_s: float | None = DEFAULT_POLICY.max_bypass_s
    fairness_horizon_s: float | None = DEFAULT_POLICY.fairness_horizon_s
    grace_s: float = DEFAULT_POLICY.grace_s
    max_grace_s: float = 120.0
    min_fraction_milli: int = 1
    sizes: tuple[Size, ...] = (Size(250), Size(500), Size(1000))  # offered to users
    max_jobs_per_user: int = 1_000  # queued or running
    max_jobs: int = 10_000
    max_waiters_per_user: int = 8  # long polls
    keep_minutes_per_day: float = 120.0
    fake_busy_after_s: float = 4 * 3600.0  # 0: no notice
    max_hold_s: float | None = None  # maximum time that CPU work without GPU work keeps a session busy
    lending: LendingMode = LendingMode.ON
    compute_share: ComputeShare = ComputeShare.OFF
    share: bool = False  # jobs whose owners agreed may run on the GPU of another job
    share_between_projects: bool = False  # even on the GPU of another project's job
    _by_name: Mapping[str, ProjectConfig] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {project.name: project for project in self.projects})

    def in_force(self, total_milli: int, overrides: Mapping[str, ProjectOverride]) -> tuple[Project, ...]:
        """Return the projects with their numbers in force on a machine with ``total_milli`` of GPU."""
        return tuple(p.project(total_milli, overrides.get(p.name)) for p in self.projects)

    def project_config(self, name: str) -> ProjectConfig | None:
        """Return the configuration of a project, or None if it is not configured."""
        return self._by_name.get(name)

    def max_hold_of(self, name: str) -> float | None:
        """Return the seconds for which CPU work alone keeps a project's session busy; None: no limit."""
        own = self._by_name.get(name)
        return self.max_hold_s if own is None or own.max_hold_s is None else own.max_hold_s

    def idle_timeout_of(self, name: str) -> float:
        """Return the seconds of the idle timeout of a project's sessions, unless they learn their own."""
        own = self._by_name.get(name)
        return self.idle_timeout_s if own is None or own.idle_timeout_s is None else own.idle_timeout_s

    def priority_max(self, name: str, override: ProjectOverride | None) -> int:
        """Return the highest priority that members of a project may give to their jobs."""
        if override is not None and override.priority_max is not None:
            return override.priority_max
        config = self.project_config(name)
        return config.priority_max if config else 0

    def projects_of(self, groups: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the projects of these Hub groups, in configured order."""
        mine = set(groups)
        return tuple(p.name for p in self.projects if mine & set(p.groups))

    def settings(self, host_budget_bytes: int = 0) -> Settings:
        """Return the settings that `core` reads."""
        return Settings(
            idle_timeout_s=self.idle_timeout_s,
            notice_s=self.notice_s,
            host_budget_bytes=host_budget_bytes,
            order=self.order,
            las_thresholds_gpu_s=self.las_thresholds_gpu_s,
            min_run_s=self.min_run_s,
            preempt_cost_s=self.preempt_cost_s,
            grace_s=self.grace_s,
            starvation_guard_s=self.starvation_guard_s,
            max_bypass_s=self.max_bypass_s,
            fairness_horizon_s=self.fairness_horizon_s,
            share_between_projects=self.share_between_projects,
        )


def over_capacity(projects: Iterable[Project], total_milli: int) -> str:
    """Return a warning if ``projects`` are guaranteed more than ``total_milli`` of GPU; else empty."""
    promised = sum(project.quota_milli for project in projects)
    if not 0 < total_milli < promised:
        return ""
    promise = f"The projects are guaranteed {promised / WHOLE_GPU:g} GPUs together"
    return f"{promise}, and there are {total_milli / WHOLE_GPU:g}: jobs share these by weight."


def gpus_to_milli(value: Any, subject: str) -> int:
    """Return thousandths of a GPU for a configured number of GPUs.

    Raises:
        InvalidRequest: the value is not a number, negative, or finer than 1/1000.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1_000_000:
        raise InvalidRequest(f"{subject} is a number of GPUs, 0 or more, not {value!r}")
    milli = round(value * WHOLE_GPU)
    if abs(milli - value * WHOLE_GPU) > 1e-6:
        raise InvalidRequest(f"{subject} is given in steps of 0.001 GPU, not {value!r}")
    return milli


_KEYS = {"quota", "weight", "limit", "priority", "priority_max", "groups", "never_sleep"}
_IDLE_KEYS = {
    "idle_timeout": "idle_timeout_s",
    "notice": "notice_s",
    "max_hold": "max_hold_s",
    "keep_minutes_per_day": "keep_minutes_per_day",
}


def parse_project(name: str, config: Mapping[str, Any]) -> ProjectConfig:
    """Return the project of one entry of ``GPUShareBroker.projects``.

    Raises:
        InvalidRequest: a key is unknown, or a value is out of range.
    """
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"project {name}: a dict of quota, weight, ..., not {config!r}")
    if unknown := sorted(set(config) - _KEYS - set(_IDLE_KEYS)):
        raise InvalidRequest(f"project {name}: unknown key {unknown[0]!r}")
    if not name or len(name) > 255:
        raise InvalidRequest("a project's name has 1 to 255 characters")
    quota = config.get("quota", 0)
    percent: float | None = None
    milli: int | None = None
    if isinstance(quota, str):
        try:
            percent = float(quota.removesuffix("%")) if quota.endswith("%") else None
        except ValueError:
            percent = None
        if percent is None or not 0 <= percent <= 100:
            raise InvalidRequest(f'project {name}: quota is a number of GPUs or a percentage like "50%"')
    else:
        milli = gpus_to_milli(quota, f"project {name}: quota")
    weight = config.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 1000:
        raise InvalidRequest(f"project {name}: weight is a whole number from 0 to 1000, not {weight!r}")
    priority, groups = config.get("priority", 0), config.get("groups", (name,))
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"project {name}: priority is a whole number, not {priority!r}")
    priority_max = config.get("priority_max", 0)
    if isinstance(priority_max, bool) or not isinstance(priority_max, int) or not 0 <= priority_max <= 100:
        raise InvalidRequest(
            f"project {name}: priority_max is a whole number from 0 to 100, not {priority_max!r}"
        )
    if isinstance(groups, str) or not all(isinstance(group, str) for group in groups):
        raise InvalidRequest(f"project {name}: groups is a list of names, not {groups!r}")
    limit, never_sleep = config.get("limit"), config.get("never_sleep", False)
    if not isinstance(never_sleep, bool):
        raise InvalidRequest(f"project {name}: never_sleep is True or False, not {never_sleep!r}")
    return ProjectConfig(
        name=name,
        quota_milli=milli,
        quota_percent=percent,
        weight=weight,
        limit_milli=None if limit is None else gpus_to_milli(limit, f"project {name}: limit"),
        priority=priority,
        priority_max=priority_max,
        groups=tuple(groups),
        never_sleep=never_sleep,
        **{field: _duration(name, key, config[key]) for key, field in _IDLE_KEYS.items() if key in config},
    )


def _duration(name: str, key: str, value: Any) -> float | None:
    """Return a valid number of seconds or minutes, or None for the site's own."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 10_000_000:
        raise InvalidRequest(f"project {name}: {key} is a number of 0 or more, not {value!r}")
    return float(value)
