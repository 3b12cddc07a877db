"""Numbers of projects that administrators set; they override the configuration until they are reset."""

from __future__ import annotations

import logging
from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.policy import gpus_to_milli
from jupyter_gpushare.broker.state.records import ProjectOverride
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import WHOLE_GPU, Project
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")


class ProjectNumbers:
    """Changes the quota, limit, weight and maximum priority of projects."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self.registry = registry
        self.engine = engine

    async def change(self, name: str, change: wire.ProjectChange, by: str) -> None:
        """Override the configured numbers of a project; the log of decisions names ``by``.

        Raises:
            NotFound: there is no such project.
            InvalidRequest: a value is out of range.
            Conflict: the change would raise the sum of all guarantees above the machine's GPUs, and is not
                forced; or the engine takes these numbers from elsewhere.
        """
        old = self.registry.overrides.get(name, ProjectOverride(name=name))
        if change.weight is not None and not 0 <= change.weight <= 1000:
            raise InvalidRequest("weight is a whole number from 0 to 1000, not %1", change.weight)
        if change.priority_max is not None and not 0 <= change.priority_max <= 100:
            raise InvalidRequest("priority_max is a whole number from 0 to 100, not %1", change.priority_max)
        override = replace(
            old,
            priority_max=old.priority_max if change.priority_max is None else change.priority_max,
            quota_milli=old.quota_milli if change.quota is None else gpus_to_milli(change.quota, "quota"),
            weight=old.weight if change.weight is None else change.weight,
            limit_milli=old.limit_milli if change.limit is None else gpus_to_milli(change.limit, "limit"),
        )
        total_milli = self.registry.devices.total_milli
        before, after = self._guaranteed_milli(old), self._guaranteed_milli(override)
        if 0 < total_milli < after and before < after and not change.force:
            raise Conflict(
                "this machine has %2 GPUs, fewer than the %1 that the projects would be guaranteed together; "
                "send force to set it all the same",
                f"{after / WHOLE_GPU:g}",
                f"{total_milli / WHOLE_GPU:g}",
                reason="beyond_machine",
            )
        await self._override(override, by)

    def _guaranteed_milli(self, override: ProjectOverride) -> int:
        """Return the sum of all guarantees with this override, in thousandths of a GPU."""
        registry = self.registry
        overrides = {**registry.overrides, override.name: override}
        projects = registry.policy.in_force(registry.devices.total_milli, overrides)
        return sum(project.quota_milli for project in projects)

    async def reset(self, name: str, by: str) -> None:
        """Return a project to its configured numbers; a repeated call changes nothing.

        Raises:
            NotFound: there is no such project.
            Conflict: the engine takes these numbers from elsewhere.
        """
        await self._override(ProjectOverride(name=name), by)

    async def _override(self, override: ProjectOverride, by: str) -> None:
        registry, name = self.registry, override.name
        config = registry.policy.project_config(name)
        if config is None:
            raise NotFound("there is no project %1", repr(name[:60]))
        old = registry.overrides.get(name)
        if override == (old or ProjectOverride(name=name)):
            await registry.journal.durable()
            return
        total_milli = registry.devices.total_milli
        before, after = config.project(total_milli, old), config.project(total_milli, override)
        self.engine.set_project(after)

        key = "notice.project_unset" if override.is_empty else "notice.project_set"
        notice = messages.text(
            key,
            messages.printable(by),
            name,
            *(
                _numbers(project, registry.policy.priority_max(name, each))
                for project, each in ((after, override), (before, old))
            ),
        )
        log.info("project=%s %s", name, messages.english(notice))
        await registry.put_override(override, notice)


def _numbers(project: Project, priority_max: int) -> wire.Text:
    quota, weight = f"{project.quota_milli / WHOLE_GPU:g}", project.weight
    numbers = messages.text("project.numbers", quota, weight)
    if project.limit_milli is not None:
        limit = f"{project.limit_milli / WHOLE_GPU:g}"
        numbers = messages.text("project.numbers_limit", quota, weight, limit)
    return messages.text("project.priority", numbers, priority_max) if priority_max else numbers


def overrides_text(registry: Registry) -> list[str]:
    """Return one sentence per stored override, with each number and the configured one beside it.

    A quota may be configured as a percentage.
    """
    notices = []
    for name, override in sorted(registry.overrides.items()):
        config = registry.policy.project_config(name)
        if config is None:
            notices.append(f"project {name} is not configured: numbers that were set for it have no effect")
            continue
        percent = config.quota_percent
        quota = _gpus(config.quota_milli) if percent is None else f"{percent:g}%"
        numbers = (
            ("quota", _gpus(override.quota_milli), quota),
            ("limit", _gpus(override.limit_milli), _gpus(config.limit_milli)),
            ("weight", override.weight, config.weight),
            ("priority_max", override.priority_max, config.priority_max),
        )
        parts = [
            f"{label} {number} (configured: {configured})"
            for label, number, configured in numbers
            if number not in (None, "none")
        ]
        notices.append(
            f"project {name}: {', '.join(parts)}, set by an administrator, wins over the configuration"
            f" until `gpushare admin quota {name} --reset`"
        )
    return notices


def _gpus(milli: int | None) -> str:
    return "none" if milli is None else f"{milli / WHOLE_GPU:g}"
