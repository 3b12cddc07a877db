"""Absent owners of leases, for administrators and for `health`."""

from __future__ import annotations

from collections import Counter

from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.protocol import wire


def owners(registry: Registry) -> wire.Owners:
    """Return the owners of leases that are absent from the Hub, or were made anew."""
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
    """Return a sentence if the Hub does not say when its users were made."""
    if not registry.owners.are_undated:
        return []
    return [
        "The Hub does not say of all users when it made them: whoever gets the name of such a user gets the "
        "jobs and sessions too. Give the broker's role in c.JupyterHub.load_roles the scope read:users."
    ]


def held(registry: Registry) -> tuple[int, list[str]]:
    """Return how many jobs are held until an administrator decides, and a sentence if there are any."""
    found = [owner.jobs for owner in owners(registry).owners if owner.held and owner.jobs]
    if not found:
        return 0, []
    return sum(found), [
        f"{len(found)} owners of waiting jobs are gone from the Hub, or were made anew: the jobs are held. "
        "`gpushare admin owners` lists them; `adopt` gives them to a user, `end` fails them."
    ]
