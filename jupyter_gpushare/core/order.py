"""Who comes first.

* Build sessions before training jobs: a person waits.
* Between projects: those below quota first, then the one that is least over
  quota for its weight (`quota.Account.turn`).
* Inside a project: priority, then a suspended job before a waiting one (its
  state takes host memory), then first come first served.
"""

from __future__ import annotations

from jupyter_gpushare.core.model import Lease, State

Key = tuple[float | str, ...]


def session_key(lease: Lease) -> Key:
    """Sorts build sessions: priority, then first come first served."""
    return -lease.priority, lease.queued_at, lease.id


def job_key(lease: Lease) -> Key:
    """Sorts the jobs of one project that wait for room."""
    return -lease.priority, lease.state is not State.SUSPENDED, lease.queued_at, lease.id
