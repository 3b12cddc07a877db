"""The site's configuration as plain values: what traits are turned into, once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jupyter_gpushare.broker.records import ProjectOverride
from jupyter_gpushare.core.model import WHOLE_GPU, Order, Project, Settings, parse_fraction
from jupyter_gpushare.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """One project as configured; ``quota`` is GPUs, or a percentage of all there are."""

    name: str
    quota_milli: int | None = None  # exactly one of the two
    quota_percent: float | None = None
    weight: int = 1
    limit_milli: int | None = None
    priority: int = 0
    groups: tuple[str, ...] = ()  # Hub groups whose members belong to it

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
    projects: tuple[ProjectConfig, ...]
    idle_timeout_s: float = 900.0
    adaptive_idle: bool = False  # each session's own idle timeout, learnt from its pauses
    order: Order = Order.LAS
    las_thresholds_gpu_s: tuple[float, ...] = (3250.0, 7200.0)
    min_run_s: float = 600.0
    preempt_cost_s: float = 30.0
    guard_s: float | None = 14 * 86_400.0
    skip_wait_s: float | None = 86_400.0
    catch_up_s: float | None = 1_800.0
    grace_s: float = 30.0
    max_grace_s: float = 120.0
    min_fraction_milli: int = 1
    sizes: tuple[tuple[int, int], ...] = ((250, 1), (500, 1), (1000, 1))  # (fraction_milli, devices) offered
    max_jobs_per_user: int = 1_000  # queued or running
    max_jobs: int = 10_000
    max_waiters_per_user: int = 8  # long polls
    keep_minutes_per_day: float = 120.0

    def project_config(self, name: str) -> ProjectConfig | None:
        return next((p for p in self.projects if p.name == name), None)

    def projects_of(self, groups: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the projects that members of ``groups`` belong to, in configured order."""
        mine = set(groups)
        return tuple(p.name for p in self.projects if mine & set(p.groups))

    def settings(self, host_budget_bytes: int = 0) -> Settings:
        """Return the knobs that `core` reads."""
        return Settings(
            idle_timeout_s=self.idle_timeout_s,
            host_budget_bytes=host_budget_bytes,
            order=self.order,
            las_thresholds_gpu_s=self.las_thresholds_gpu_s,
            min_run_s=self.min_run_s,
            preempt_cost_s=self.preempt_cost_s,
            guard_s=self.guard_s,
            skip_wait_s=self.skip_wait_s,
            catch_up_s=self.catch_up_s,
        )


def gpus_to_milli(value: Any, what: str) -> int:
    """Return thousandths of a GPU for a configured number of GPUs.

    Raises:
        InvalidRequest: not a number, negative, or finer than 1/1000.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1_000_000:
        raise InvalidRequest(f"{what} is a number of GPUs, 0 or more, not {value!r}")
    milli = round(value * WHOLE_GPU)
    if abs(milli - value * WHOLE_GPU) > 1e-6:
        raise InvalidRequest(f"{what} is given in steps of 0.001 GPU, not {value!r}")
    return milli


def parse_project(name: str, config: Mapping[str, Any]) -> ProjectConfig:
    """Return one entry of ``GPUShareBroker.projects``.

    Raises:
        InvalidRequest: an unknown key, or a value out of range.
    """
    unknown = set(config) - {"quota", "weight", "limit", "priority", "groups"}
    if unknown:
        raise InvalidRequest(f"project {name}: unknown key {sorted(unknown)[0]!r}")
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
    limit = config.get("limit")
    return ProjectConfig(
        name=name,
        quota_milli=milli,
        quota_percent=percent,
        weight=weight,
        limit_milli=None if limit is None else gpus_to_milli(limit, f"project {name}: limit"),
        priority=int(config.get("priority", 0)),
        groups=tuple(config.get("groups", (name,))),
    )


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_memory(text: str) -> int:
    """Return bytes for ``20GiB``, ``500MB`` or a plain number of bytes.

    Raises:
        InvalidRequest: not such a size, or not at least 1 MiB.
    """
    stem = text.strip().removesuffix("B")
    unit = next((u for u in _BINARY if stem.endswith(u)), None)
    factor = _BINARY[unit] if unit else _UNITS.get(stem[-1:].upper() if not stem[-1:].isdigit() else "", 0)
    digits = stem.removesuffix(unit) if unit else stem.rstrip("kKMGT")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 15 or not factor:
        raise InvalidRequest(f"{text[:40]!r} is not a size of memory: write for example 20GiB")
    count = int(digits) * factor
    if count < 1 << 20:
        raise InvalidRequest(f"{text[:40]!r} is too little GPU memory: at least 1MiB")
    return count


_PROFILE = re.compile(r"(\d{1,2}c\.)?\d{1,2}g\.\d{1,4}gb(\+[a-z0-9.]{1,12})?")


def parse_profile(text: str) -> str:
    """Return the name of a MIG profile, which is as the driver writes it: ``1g.10gb``, ``1g.10gb+me``.

    Raises:
        InvalidRequest: not such a name.
    """
    if not _PROFILE.fullmatch(text):
        raise InvalidRequest(f"{text[:40]!r} is not a MIG profile: write for example 1g.10gb")
    return text


def parse_gpus(text: str) -> tuple[int, int]:
    """Return (fraction_milli, device_count) for ``0.5``, ``1/4``, ``1`` or ``2``.

    Raises:
        InvalidRequest: neither a fraction of one GPU nor a whole number of GPUs.
    """
    if text.isascii() and text.isdigit() and text.lstrip("0") not in ("", "1"):
        count = int(text) if len(text) <= 4 else 0
        if not 1 <= count <= 1024:
            raise InvalidRequest(f"{text[:40]!r} GPUs are too many: at most 1024")
        return WHOLE_GPU, count
    return parse_fraction(text), 1
