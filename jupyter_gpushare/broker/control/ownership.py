"""Owners: a name at the Hub is not a person, but a name and the moment at which it was made is.

* What belongs to the present user of a name is kept under the name.  When another user gets it,
  everything of the earlier one is moved aside at once (`records.former`): the new user neither sees
  nor runs nor inherits it.  When the earlier user is back, as after a restored database, it moves back.
* A user with another name and the very same moment was renamed, if the old name has gone:
  everything moves to the new name.  Whole seconds (a MySQL database) are no such moment.
* `Ownership.look` compares all owners with the Hub's users, every `LOOK_S`, and `AGAIN_S` after one
  was absent: from the list, and when asked for by name.  After two such looks the waiting jobs fail.
* All users of the Hub are owners once they were seen.  When more than a tenth of them and more than
  one, or all, are absent at one look, the Hub has another database.  Then nothing fails: the jobs are
  held until an administrator gives them to a user (`adopt`) or ends them (`end`), or the owners are back.
* Jobs of absent, held or former owners do not start (`KnownOwners.absent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import Hub, HubError, HubUser
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.state.records import Owner, OwnerForgotten, OwnerMoved, UserService, former
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.rows import Change
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import exact

log = logging.getLogger("gpushare.broker")

LOOK_S = 300.0
AGAIN_S = 60.0
# More owners than this and than a tenth do not go by chance.
_FEW = 1
# When so many are absent in the list, not all are asked for by name.
_ASKED = 50


class Ownership:
    """Knows which user of the Hub is which owner."""

    def __init__(self, registry: Registry, hub: Hub, effects: Effects) -> None:
        self._registry = registry
        self._hub = hub
        self._effects = effects
        self._absent_since: dict[str, float] = {}  # by `Owner.user`
        self._changing = asyncio.Lock()  # held from a question to the Hub to what follows from it

    # ---- users that come -----------------------------------------------------

    def find(self, name: str, created: str) -> str | None:
        """Return the `Owner.user` of a user that was made at ``created``; None: the name is not known."""
        owners = self._registry.owners.of
        owner = owners.get(name)
        if owner is not None and not owner.is_other(created):
            return name
        # The Hub's answer about a token may be of before a rename.
        if _is_exact(created) and (same := next((x for x in owners.values() if x.created == created), None)):
            return same.user
        return None if owner is None else former(name, created)

    async def meet(self, name: str, created: str, uid: int = -1) -> None:
        """Note that the Hub has this user now; what belongs to another of that name is moved aside.

        Raises:
            BrokerUnavailable: the Hub does not answer, and has to be asked about a rename.
            DiskFull: another user had the name, and that cannot be stored.
            StoreError: the database failed; the broker ends.
        """
        known = self._registry.owners.of.get(name)
        if known is not None and known == known.with_known(created, uid) and not known.is_other(created, uid):
            return  # also while the Hub is looked at
        async with self._changing:
            try:
                await self._meet(name, created, uid)
            except HubError as error:
                raise BrokerUnavailable(str(error)) from None

    async def _meet(self, name: str, created: str, uid: int = -1) -> None:
        registry, known = self._registry, self._registry.owners.of.get(name)
        if known is None:
            if registry.journal.is_disk_full:
                return  # noted at the next time
            before = registry.owners.of.get(former(name, created)) or await self._renamed_to(name, created)
            moves = () if before is None else (OwnerMoved(before.user, name),)
            await self.change(*moves, Owner(user=name, name=name, created=created, uid=uid))
            self._show()
        elif known.is_other(created, uid):
            await self._replace(known, created, uid)
        elif (same := known.with_known(created, uid)) != known and not registry.journal.is_disk_full:
            await self.change(same)

    async def _replace(self, known: Owner, created: str, uid: int) -> None:
        """Move aside what belongs to the earlier user of a name, and back what belongs to this one."""
        name, is_uid_other = known.name, not known.is_other(created)
        aside = former(name, known.created, known.uid if is_uid_other else -1)
        back = former(name, created, uid if is_uid_other else -1)
        log.warning("user=%s is another one: made at %s, before at %s", name, created, known.created)
        self._absent_since.setdefault(aside, self._absent_since.pop(name, self._registry.clock()))
        # Another uid alone is seen at one user after the other, however many have one.
        earlier = replace(known, user=aside, held=known.held or is_uid_other)
        has_leases = any(record.lease.user == name for record in self._registry.leases.values())
        await self.change(
            OwnerMoved(name, aside),
            OwnerMoved(back, name),
            *((earlier,) if has_leases or not earlier.held else ()),
            Owner(user=name, name=name, created=created, uid=uid),
        )
        self._show()

    async def _renamed_to(self, name: str, created: str) -> Owner | None:
        """Return the owner that had another name before; None: there is none.

        Raises:
            HubError: the Hub does not answer.
        """
        same = [
            owner
            for owner in self._registry.owners.of.values()
            if owner.created == created and owner.name != name and _is_exact(created)
        ]
        if len(same) != 1:
            return None
        (owner,) = same
        there = None if owner.is_former else await self._hub.user(owner.name)
        return owner if there is None or owner.is_other(there.created) else None

    async def meet_start(self, request: wire.SpawnRequest) -> None:
        """Note the owner of a server that is about to start, as `meet` does."""
        uid = request.uid if request.own_uid else -1
        await self.meet(request.user, exact(request.created), uid)

    # ---- users that go -------------------------------------------------------

    async def watch(self) -> AsyncIterator[None]:
        """Look at the Hub's users, again and again."""
        doubted = self._registry.owners.doubted
        while True:
            doubted.clear()
            if not self._registry.journal.is_disk_full:
                await self.look()
            yield
            with contextlib.suppress(TimeoutError):
                # A timer may be a moment early.
                async with asyncio.timeout(AGAIN_S + 1 if self._absent_since else LOOK_S):
                    await doubted.wait()

    async def look(self) -> None:
        """Compare all owners with the Hub's users; fail or hold the waiting jobs of those that are absent.

        Raises:
            HubError: the Hub does not answer.
            DiskFull: not everything could be stored; the next look goes on.
            StoreError: the database failed; the broker ends.
        """
        async with self._changing:
            registry, now = self._registry, self._registry.clock()
            users = {user.name: user for user in await self._hub.users()}
            await self._find_again(users)
            absent = [x for x in registry.owners.of.values() if not x.held and not self._is_in(users, x)]
            asked = absent[:_ASKED] if self._are_many(absent) else absent
            gone = [owner for owner in asked if await self._is_gone(owner)]
            if len(gone) < len(asked):
                absent = gone  # the list is not of all users
            self._absent_since = {each.user: self._absent_since.get(each.user, now) for each in absent}
            if self._are_many(absent):
                await self.change(*(replace(owner, held=True) for owner in absent))
                log.error("%d owners are gone from the Hub at once: their jobs are held", len(absent))
                self._absent_since.clear()
            # Users of rows of an earlier version are adopted as the Hub has them at the first look.
            new = {
                *users,
                *(record.lease.user for record in registry.leases.values()),
            } - registry.owners.of.keys()
            made = {name: users[name].created if name in users else "" for name in new}
            await self.change(*(Owner(user=x, name=x, created=at) for x, at in made.items()))
            for owner in absent:
                if now - self._absent_since.get(owner.user, now) >= AGAIN_S:
                    await self._end(owner)
            self._show()

    async def _find_again(self, users: Mapping[str, HubUser]) -> None:
        """Note the owners that are back, or have another name."""
        registry = self._registry
        made = Counter(user.created for user in users.values())
        names = {user.created: user.name for user in users.values() if made[user.created] == 1}
        for owner in list(registry.owners.of.values()):
            renamed = names.get(owner.created, owner.name)
            if registry.owners.of.get(owner.user) != owner:
                continue  # it was moved with another
            if self._is_in(users, owner):
                await self._meet(owner.name, users[owner.name].created)
                back = registry.owners.of.get(owner.name)
                if back is not None and back.held:
                    await self.change(replace(back, held=False))
            elif renamed != owner.name and _is_exact(owner.created):
                to = replace(owner, user=renamed, name=renamed, held=False)
                await self.change(OwnerMoved(owner.user, renamed), to)

    def _is_in(self, users: Mapping[str, HubUser], owner: Owner) -> bool:
        return (there := users.get(owner.name)) is not None and self._is_back(owner, there)

    def _is_back(self, owner: Owner, there: HubUser) -> bool:
        """Return whether the Hub's user of this name is this owner; only the uid of another may differ."""
        now = self._registry.owners.of.get(owner.name)
        is_uid_other = owner.is_former and now is not None and not now.is_other(there.created)
        return not owner.is_other(there.created) and not is_uid_other

    def _are_many(self, absent: list[Owner]) -> bool:
        """Return whether so many have gone that the Hub has another database."""
        known = sum(not owner.held for owner in self._registry.owners.of.values())
        return bool(absent) and (len(absent) > max(_FEW, known / 10) or len(absent) == known)

    async def _is_gone(self, owner: Owner) -> bool:
        there = await self._hub.user(owner.name)
        return there is None or not self._is_back(owner, there)

    async def _end(self, owner: Owner) -> None:
        """Fail the waiting jobs of an owner, and keep the rest aside."""
        registry = self._registry
        for record in [r for r in registry.index.queued.values() if r.lease.user == owner.user]:
            await self._effects.finish(record, "failed", messages.text("job.owner_gone", owner.name))
        aside = owner.user if owner.is_former else former(owner.name, owner.created)
        self._absent_since.pop(owner.user, None)
        moves = () if owner.is_former else (OwnerMoved(owner.user, aside),)
        if any(record.lease.user in (owner.user, aside) for record in registry.leases.values()):
            self._absent_since[aside] = registry.clock() - AGAIN_S
            await self.change(*moves, replace(owner, user=aside, held=False))
        else:
            await self.change(*moves, OwnerForgotten(owner.user))
        log.info("user=%s, made at %s, is gone from the Hub", owner.name, owner.created or "?")
        self._show()

    async def change(
        self, *changes: Owner | OwnerMoved | OwnerForgotten, note: wire.Text | None = None
    ) -> None:
        """Change owners in this order, in one commit, with ``note`` in the log of decisions.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry = self._registry
        registry.journal.check()
        stored: list[Change] = [*changes]
        for change in changes:
            match change:
                case Owner():
                    registry.owners.of[change.user] = change
                case OwnerForgotten():
                    registry.owners.of.pop(change.user, None)
                case OwnerMoved():
                    stored.append(self._move(change.old, change.new))
        if note is not None:
            stored.append(registry.decisions.add(None, "owner", note))
        await registry.journal.commit(*stored)
        if len(stored) > len(changes):  # else readers see the same as before
            await registry.notify()

    def _move(self, old: str, new: str) -> UserService:
        """Let everything of one owner belong to another, in memory; returns what else is to be stored."""
        registry = self._registry
        for record in [r for r in registry.leases.values() if r.lease.user == old]:
            registry.index.put(replace(record, lease=replace(record.lease, user=new)))
        keys = {job.idempotency_key for job in registry.jobs.values() if job.user == new}
        for job in [job for job in registry.jobs.values() if job.user == old]:
            key = None if job.idempotency_key in keys else job.idempotency_key
            registry.cache_job(replace(job, user=new, idempotency_key=key))
        registry.session_queue.forget(old)
        registry.decisions.move_owner(old, new)
        registry.usage.move_owner(old, new)
        registry.owners.of.pop(old, None)
        log.info("what was of user=%s is of user=%s now", old, new)
        return registry.fairness.move_owner(old, new)

    def _show(self) -> None:
        """Let jobs start, or wait, as the owners are now."""
        registry = self._registry
        absent = {x.user for x in registry.owners.of.values() if x.held or x.is_former}
        before, registry.owners.absent = registry.owners.absent, frozenset(absent | self._absent_since.keys())
        if before != registry.owners.absent:
            registry.changed.set()
            registry.notifications.add()

    # ---- administrators ------------------------------------------------------

    async def adopt(self, name: str, to: str | None, by: str) -> None:
        """Give what belongs to the absent owners of a name to a user of the Hub.

        ``to``: the name of that user; None: the present user of the same name.

        Raises:
            BrokerUnavailable: the Hub does not answer.
            Conflict: the Hub has no such user.
            NotFound: no owner of this name is absent.
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry, target = self._registry, to or name
        async with self._changing:
            self._absent(name)
            try:
                there = await self._hub.user(target)
                if there is None:
                    raise Conflict("the Hub has no user %1: name another, or add it there", repr(target[:60]))
                await self._meet(target, there.created)
            except HubError as error:
                raise BrokerUnavailable(str(error)) from None
            note = messages.text("notice.owner_adopted", *map(messages.printable, (by, name, target)))
            # One of them may be there again.
            found = [
                x for x in registry.owners.of.values() if x.name == name and x.user in registry.owners.absent
            ]
            moves = [OwnerMoved(owner.user, target) for owner in found if owner.user != target]
            await self.change(*moves, replace(registry.owners.of[target], held=False), note=note)
            for owner in found:
                self._absent_since.pop(owner.user, None)
            self._show()

    async def end(self, name: str, by: str) -> None:
        """Fail the waiting jobs of the absent owners of a name.

        Raises:
            NotFound: no owner of this name is absent.
            DiskFull: not everything is changed.
            StoreError: the database failed; the broker ends.
        """
        async with self._changing:
            found = self._absent(name)
            note = messages.text("notice.owner_ended", *map(messages.printable, (by, name)))
            await self.change(note=note)
            for owner in found:
                await self._end(owner)

    def _absent(self, name: str) -> list[Owner]:
        registry = self._registry
        found = [
            x for x in registry.owners.of.values() if x.name == name and x.user in registry.owners.absent
        ]
        if not found:
            raise NotFound("no owner %1 is absent: `gpushare admin owners` lists them", repr(name[:60]))
        return found


def _is_exact(created: str) -> bool:
    return bool(created) and not created.endswith(".000000Z")
