"""An engine's answers about one snapshot: queue positions, reasons, free capacity, offers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jupyter_gpushare.core import explain
from jupyter_gpushare.core.explain import Offer, Use
from jupyter_gpushare.core.model import Action, Cluster, Grant, Lease, Why
from jupyter_gpushare.core.size import Size

__all__ = ["Explanation", "Offer", "Outlook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease waits."""

    why: Why
    position: int | None  # among waiting jobs; 1 is next, None is not in the queue
    free_milli: int  # free capacity of all usable devices


class Outlook(abc.ABC):
    """An engine's answers about one snapshot; each value is computed at most once."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._cluster = cluster
        self._now = now

    @property
    @abc.abstractmethod
    def actions(self) -> Iterable[Action]:
        """Actions that `Engine.decide` would begin now."""

    @property
    @abc.abstractmethod
    def why(self) -> Mapping[str, Why]:
        """The reason why each waiting lease waits, in the order of the queue."""

    @property
    @abc.abstractmethod
    def position(self) -> Mapping[str, int]:
        """Position in the queue of each waiting job that can ever start; 1 is next."""

    @cached_property
    def grants(self) -> Mapping[str, Grant]:
        """Grants that `Engine.decide` would make now, by lease."""
        return {action.lease: action for action in self.actions if isinstance(action, Grant)}

    @property
    @abc.abstractmethod
    def free_milli(self) -> int:
        """Free capacity of all usable devices, in thousandths of a GPU."""

    @property
    @abc.abstractmethod
    def borrowed(self) -> Mapping[str, bool]:
        """For each lease that holds capacity: whether the capacity may be reclaimed."""

    @property
    @abc.abstractmethod
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        """For each suspended session with a claim: the leases that use its capacity."""

    @property
    @abc.abstractmethod
    def claims_milli(self) -> Mapping[str, int]:
        """Capacity that is guaranteed to sessions, by device UUID."""

    @property
    def misplaced(self) -> Mapping[str, float]:
        """Suspended leases whose new devices are not those to which their memory returns.

        The value is the future time (monotonic) at which each lease retries.
        """
        return {}

    @cached_property
    def usage(self) -> Mapping[str, Use]:
        """For each configured project: the capacity that it holds, borrows, lends and waits for."""
        return {use.project: use for use in explain.uses(self._cluster)}

    @abc.abstractmethod
    def smaller(self, lease: Lease) -> Size | None:
        """Return the largest smaller size with which a waiting lease would start now, or None."""

    @abc.abstractmethod
    def offers(self, project: str, sizes: Iterable[Size]) -> tuple[Offer, ...]:
        """Return one offer per size: what a new session of ``project`` would get now."""

    def explain(self, lease_id: str) -> Explanation:
        """Return why a lease waits; the reason is ``Why.NOT_WAITING`` if it does not."""
        return Explanation(
            why=self.why.get(lease_id, Why.NOT_WAITING),
            position=self.position.get(lease_id),
            free_milli=self.free_milli,
        )
