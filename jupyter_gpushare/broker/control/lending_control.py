"""The lending mode: an administrator sets it, and each round of the loop applies it.

* ``on``: the engine suspends idle sessions; this module does nothing.
* ``watch``: nothing is suspended.  Every `PLAN_S` a second plan is made as if lending were on, and only
  logged: one decision when a session would be suspended, one when it would be resumed.
* ``off``: every suspended session is marked as wanted, so that the engine resumes it.
"""

from __future__ import annotations

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.records import LeaseRecord, LendingMode, LendingOverride
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.tables import Change
from jupyter_gpushare.core.model import State, Suspend
from jupyter_gpushare.protocol.wire import Text

# Between two plans that are only logged; each costs as much as a real plan.
PLAN_S = 5.0


class LendingControl:
    """Sets the lending mode and carries it out."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine
        # By lease: a session that would be suspended now, and since when.
        self._watched: dict[str, tuple[LeaseRecord, float]] = {}
        self._plan_at = float("-inf")

    async def set(self, mode: LendingMode | None, by: str) -> None:
        """Store the mode (None: as configured), with a line in the log of decisions.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry, switch = self._registry, self._registry.lending_switch
        registry.journal.check()
        before, by = switch.mode, messages.printable(by)
        switch.override = LendingOverride(mode=mode, by=by, at=registry.iso_now())
        key = "notice.lending_unset" if mode is None else "notice.lending_set"
        sentence = messages.text(key, by, str(switch.mode), str(before))
        await registry.journal.commit(switch.override, registry.decisions.add(None, "lending", sentence))
        await registry.notify()

    async def apply(self, now: float) -> None:
        """Apply the mode in one round of the loop.

        Raises:
            StoreError: the database failed; the broker ends.
        """
        registry, mode = self._registry, self._registry.lending_switch.mode
        for record in list(registry.index.placed.values()):
            if record.is_job or record.state not in (State.SUSPENDING, State.SUSPENDED):
                continue
            if mode is LendingMode.OFF or snapshot.never_sleeps(registry, record):
                await registry.want(record)
        if mode is not LendingMode.WATCH:
            if self._watched:
                await registry.journal.commit(*[self._ended(lease, now) for lease in list(self._watched)])
        elif now >= self._plan_at:
            self._plan_at = now + PLAN_S
            if stored := self._watch(now):
                await registry.journal.commit(*stored)
                await registry.notify()

    def _watch(self, now: float) -> list[Change]:
        """Return the decisions about sessions that would be suspended or resumed now."""
        registry = self._registry
        cluster = snapshot.cluster(registry, self._engine, now, as_if_lending=True)
        suspends: dict[str, Suspend] = {}
        for action in self._engine.would_suspend(cluster, now):
            record = registry.leases.get(action.lease)
            if record is not None and not record.is_job:
                suspends[action.lease] = action
        stored: list[Change] = [self._ended(lease, now) for lease in self._watched.keys() - suspends.keys()]
        for lease, action in suspends.items():
            if lease not in self._watched:
                record = registry.leases[lease]
                self._watched[lease] = record, now
                stored.append(registry.decision(record, "would_suspend", action.why, action.for_lease))
        return stored

    def _ended(self, lease: str, now: float) -> Change:
        """Return the decision that a session would be resumed now, with the duration of its suspension."""
        record, since = self._watched.pop(lease)
        sentence = messages.text(
            "decision.would_have_lent",
            self._registry.subject_of(record),
            messages.duration_text(now - since),
            self._why_ended(lease, since, now),
        )
        return self._registry.decisions.add(record, "would_resume", sentence)

    def _why_ended(self, lease: str, since: float, now: float) -> Text:
        registry, record = self._registry, self._registry.leases.get(lease)
        if registry.lending_switch.mode is not LendingMode.WATCH:
            return messages.text("until.switched", str(registry.lending_switch.mode))
        if record is None:
            return messages.text("until.server_ended")
        idle_since = snapshot.idle_since(registry, record, now)
        was_used = idle_since is None or idle_since > since
        return messages.text("until.used" if was_used else "until.not_needed")
