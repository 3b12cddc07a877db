"""The budget of a day for keeping idle sessions from being lent.

A project with ``keep_minutes_per_day`` of its own counts what its sessions are kept by
itself; all other projects share the site's budget.
"""

from __future__ import annotations

from jupyter_gpushare.broker.state.registry import Registry


def keep_budget(registry: Registry, project: str) -> float:
    """Return the minutes a day for which a user may keep idle sessions of a project."""
    policy = registry.policy
    own = _own(registry, project)
    return policy.keep_minutes_per_day if own is None else own


def keep_left(registry: Registry, user: str, project: str = "") -> float:
    """Return the minutes left today (UTC) in a user's budget for a project; without one, in the site's."""
    today, usage = registry.iso_now()[:10], registry.usage
    if _own(registry, project) is not None:
        used_s = usage.kept_s(today, user, project)
    else:
        known = usage.kept_projects(today, user)
        used_s = sum(usage.kept_s(today, user, each) for each in known if _own(registry, each) is None)
    return max(0.0, keep_budget(registry, project) - used_s / 60)


def _own(registry: Registry, project: str) -> float | None:
    config = registry.policy.project_config(project)
    return None if config is None else config.keep_minutes_per_day
