"""The helper's verb ``reserve``: names of leases that servers without a GPU may get while they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Name a lease that a server without a GPU may get while it runs.

    Nothing is created: its processes carry the name from their start, and are denied every
    allocation until `SetLimit` creates the lease.
    """

    lease: str
