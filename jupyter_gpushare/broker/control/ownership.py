"""Owners: a name at the Hub does not identify a person; a name with its moment of creation does.

* What belongs to the present user of a name is kept under the name.  When another user gets the name,
  everything of the earlier user is moved aside at once (`records.former`): the new user cannot see, run or
  inherit it.  When the earlier user is back, as after a restored database, it moves back.
* A new name is a rename if its moment of creation is exactly that of one owner whose name has gone from the
  Hub.  Everything moves to the new name.  A moment does not count if it is in whole seconds (a MySQL
  database) or if several owners share it (a Hub that did not record moments at first).
* `Ownership.check_users` compares all owners with the Hub's users, every `CHECK_S`.  An owner is absent if
  the Hub neither lists it nor knows it by name; the next check then follows after `RECHECK_S`.  If the owner
  is absent in both checks, its waiting jobs fail.
* Every user of the Hub that was once seen is an owner.  If all owners, or more than a tenth and more than
  one, are absent in one check, the Hub has another database.  Then no job fails: jobs are held until an
  administrator gives them to a user (`adopt`) or ends them (`end`), or until their owners are back.  Held
  owners without a lease are forgotten, so that the table has a bound; their history stays aside.
* Jobs of absent, held or former owners do not start (`KnownOwners.absent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import Hub, HubError, HubUser
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.state.records import Owner, OwnerForgotten, OwnerMoved, UserLags, former
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.tables import Change
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, NotAllowed, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import exact, is_same, is_whole_second

log = logging.getLogger("gpushare.broker")

CHECK_S = 300.0
RECHECK_S = 60.0
# If more owners than this, and more than a tenth, disappear together, that is no coincidence.
_FEW = 1
# Replaces the start of an owner's absence once its waiting jobs have failed.
_LONG_AGO = float("-inf")
# If many owners are missing in the list, only this many are asked for by name.
_MAX_REQUESTS = 50


class Ownership:
    """Knows which user of the Hub is which owner."""

    def __init__(self, registry: Registry, hub: Hub, effects: Effects) -> None:
        self._registry = registry
        self._hub = hub
        self._effects = effects
        self._absent_since: dict[str, float] = {}  # by `Owner.user`
        self._has_checked = False
        self._changing = asyncio.Lock()  # held from a request to the Hub until its answer is carried out

    # ---- users that appear ---------------------------------------------------

    def find(self, name: str, created: str) -> str | None:
        """Return the `Owner.user` of a user that was made at ``created``; None if the name is unknown."""
        owner = self._registry.owners.of.get(name)
        if not _is_name(name):
            return former(name, created)  # such a user owns nothing
        if owner is not None and not owner.is_other(created):
            return name
        # The Hub's answer about a token may be older than a rename.
        if same := self._only_owner_made_at(created):
            return same.user
        return None if owner is None else former(name, created)

    async def meet(self, name: str, created: str, uid: int = -1) -> None:
        """Note that the Hub has this user now; move aside what belongs to another user of that name.

        Raises:
            BrokerUnavailable: the Hub does not answer the question whether this is a rename.
            NotAllowed: the name has a slash, like the keys of former owners (`records.former`).
            DiskFull: another user had the name, and the change cannot be stored.
            StoreError: the database failed; the broker ends.
        """
        if not _is_name(name):
            raise NotAllowed("the name %1 has a slash: the GPU service knows no such user", repr(name[:60]))
        known = self._registry.owners.of.get(name)
        if known is not None and known == known.with_known(created, uid) and not known.is_other(created, uid):
            return  # does not wait for a check of the Hub's users
        async with self._changing:
            try:
                await self._meet(name, created, uid)
            except HubError as error:
                raise BrokerUnavailable(str(error)) from None

    async def _meet(self, name: str, created: str, uid: int = -1) -> None:
        """Note a user of the Hub; a user who is new under this name may have had another name.

        Raises:
            HubError: the Hub does not answer.
        """
        registry, known = self._registry, self._registry.owners.of.get(name)
        if known is not None and not known.is_other(created, uid):
            if (same := known.with_known(created, uid)) != known and not registry.journal.is_disk_full:
                await self.change(same)
            return
        if known is None and registry.journal.is_disk_full:
            return  # a later call notes it
        is_uid_other = known is not None and not known.is_other(created)
        earlier = self._former(name, created, uid if is_uid_other else -1)
        if not is_uid_other and earlier not in registry.owners.of:
            earlier = await self._renamed_to(name, created) or earlier
        if known is not None:
            moves = self._aside(known, is_uid_other=is_uid_other)
        else:
            # Data under this name is of a user who went before the broker recorded moments: the first check
            # met all others.
            moves = (OwnerMoved(name, former(name, "")),) if self._has_checked else ()
        await self.change(
            *moves, OwnerMoved(earlier, name), Owner(user=name, name=name, created=created, uid=uid)
        )
        self._absent_since.pop(earlier, None)
        self._update_absent()

    def _aside(self, known: Owner, *, is_uid_other: bool) -> tuple[Owner | OwnerMoved, ...]:
        """Return the changes that move aside what belongs to the earlier user of a name."""
        name = known.name
        aside = former(name, known.created, known.uid if is_uid_other else -1)
        log.warning("user=%s is another one than that made at %s", name, known.created)
        self._absent_since.setdefault(aside, self._absent_since.pop(name, self._registry.clock()))
        # A check cannot count users who differ in their uid alone, because each is seen at its own start.
        # So such an owner is held at once.
        earlier = replace(known, user=aside, held=known.held or is_uid_other)
        is_kept = name in self._users_of_leases() or not earlier.held
        return OwnerMoved(name, aside), *((earlier,) if is_kept else ())

    def _former(self, name: str, created: str, uid: int) -> str:
        """Return the key of an earlier user of the name (`records.former`)."""
        known = (
            owner.user
            for owner in self._registry.owners.of.values()
            if owner.name == name
            and owner.user == former(name, owner.created, uid)
            and is_same(owner.created, created)
        )
        return next(known, former(name, created, uid))

    async def _renamed_to(self, name: str, created: str) -> str | None:
        """Return the `Owner.user` of the owner that was renamed to ``name``; None if there is none.

        Raises:
            HubError: the Hub does not answer.
        """
        owner = self._only_owner_made_at(created)
        if owner is None or owner.name == name:
            return None
        present = None if owner.is_former else await self._hub.user(owner.name)
        return owner.user if present is None or owner.is_other(present.created) else None

    def _only_owner_made_at(self, created: str) -> Owner | None:
        """Return the only owner that was made at this moment; None if there are several or none."""
        same = [owner for owner in self._registry.owners.of.values() if owner.created == created]
        is_exact = bool(created) and not is_whole_second(created)
        return same[0] if is_exact and len(same) == 1 else None

    def _users_of_leases(self) -> set[str]:
        return {record.lease.user for record in self._registry.leases.values()}

    async def meet_start(self, request: wire.SpawnRequest) -> None:
        """Note the owner of a server that is about to start; see `meet`."""
        uid = request.uid if request.own_uid else -1
        await self.meet(request.user, exact(request.created), uid)

    # ---- users that disappear ------------------------------------------------

    async def watch(self) -> AsyncIterator[None]:
        """Check the Hub's users until cancelled; yield after each check."""
        doubted = self._registry.owners.doubted
        while True:
            doubted.clear()
            if not self._registry.journal.is_disk_full:
                await self.check_users()
            yield
            with contextlib.suppress(TimeoutError):
                is_new = any(since != _LONG_AGO for since in self._absent_since.values())
                # One second more, because a timer may be a moment early.
                async with asyncio.timeout(RECHECK_S + 1 if is_new else CHECK_S):
                    await doubted.wait()

    async def check_users(self) -> None:
        """Compare all owners with the Hub's users; fail or hold the waiting jobs of absent owners.

        Raises:
            HubError: the Hub does not answer.
            DiskFull: not everything could be stored; the next check continues.
            StoreError: the database failed; the broker ends.
        """
        async with self._changing:
            registry, now = self._registry, self._registry.clock()
            users = {user.name: user for user in await self._hub.users() if _is_name(user.name)}
            registry.owners.are_undated = any(not user.created for user in users.values())
            await self._meet_all(users)
            absent = [x for x in registry.owners.of.values() if not x.held and not self._is_listed(users, x)]
            requested = absent[:_MAX_REQUESTS] if self._are_many(absent) else absent
            gone = [owner for owner in requested if await self._is_gone(owner)]
            if len(gone) < len(requested):
                absent = gone  # the list was incomplete
            self._absent_since = {each.user: self._absent_since.get(each.user, now) for each in absent}
            if self._are_many(absent):
                await self.change(*(replace(owner, held=True) for owner in absent))
                log.error("%d owners are gone from the Hub at once: their jobs are held", len(absent))
                self._absent_since.clear()
            for owner in absent:
                if now - self._absent_since.get(owner.user, now) >= RECHECK_S:
                    await self._end(owner)
            await self._forget_idle()
            self._update_absent()

    async def _meet_all(self, users: Mapping[str, HubUser]) -> None:
        """Note all users of the list, and the owners of leases that the database knows only by name."""
        registry, is_first = self._registry, not self._registry.owners.of
        made_at = Counter(user.created for user in users.values())
        unknown = [user for user in users.values() if user.name not in registry.owners.of]
        # A moment that several users share cannot prove a rename.
        new = [user for user in unknown if is_first or made_at[user.created] > 1]
        moves = () if is_first else (OwnerMoved(former(user.name, user.created), user.name) for user in new)
        await self.change(
            *moves, *(Owner(user=user.name, name=user.name, created=user.created) for user in new)
        )
        for user in users.values():
            await self._meet(user.name, user.created)
        back = [registry.owners.of[name] for name in users if name in registry.owners.of]
        await self.change(*(replace(owner, held=False) for owner in back if owner.held))
        for name in self._users_of_leases() - registry.owners.of.keys():
            if _is_name(name) and (present := await self._hub.user(name)):
                await self._meet(name, present.created)
            else:
                aside = former(name, "")
                await self.change(OwnerMoved(name, aside), Owner(user=aside, name=name))
        self._has_checked = True

    async def _forget_idle(self) -> None:
        """Forget held owners without a lease, so that their number is bounded; their history moves aside."""
        busy = self._users_of_leases()
        idle = [x for x in self._registry.owners.of.values() if x.held and x.user not in busy]
        for owner in idle:
            moves = () if owner.is_former else (OwnerMoved(owner.user, former(owner.name, owner.created)),)
            await self.change(*moves, OwnerForgotten(owner.user))

    def _is_listed(self, users: Mapping[str, HubUser], owner: Owner) -> bool:
        return (user := users.get(owner.name)) is not None and self._is_same(owner, user)

    def _is_same(self, owner: Owner, user: HubUser) -> bool:
        """Return whether the Hub's user of this name is this owner.

        A former owner with the moment of the present owner differs from it in the uid, so it is not.
        """
        if owner.is_former and not owner.created and user.created:
            return False  # it went before the broker recorded moments
        present = self._registry.owners.of.get(owner.name)
        is_uid_other = owner.is_former and present is not None and not present.is_other(user.created)
        return not owner.is_other(user.created) and not is_uid_other

    def _are_many(self, absent: list[Owner]) -> bool:
        """Return whether enough owners are newly absent to mean that the Hub has another database."""
        known, gone = (
            sum(not x.held and self._absent_since.get(x.user) != _LONG_AGO for x in owners)
            for owners in (self._registry.owners.of.values(), absent)
        )
        return gone > 0 and (gone > max(_FEW, known / 10) or gone == known)

    async def _is_gone(self, owner: Owner) -> bool:
        user = await self._hub.user(owner.name)
        return user is None or not self._is_same(owner, user)

    async def _end(self, owner: Owner) -> None:
        """Fail the waiting jobs of an owner, and move everything else aside."""
        registry = self._registry
        for record in [r for r in registry.index.queued.values() if r.lease.user == owner.user]:
            await self._effects.finish(record, "failed", messages.text("job.owner_gone", owner.name))
        aside = owner.user if owner.is_former else former(owner.name, owner.created)
        self._absent_since.pop(owner.user, None)
        moves = () if owner.is_former else (OwnerMoved(owner.user, aside),)
        if {owner.user, aside} & self._users_of_leases():
            self._absent_since[aside] = _LONG_AGO
            await self.change(*moves, replace(owner, user=aside, held=False))
        else:
            await self.change(*moves, OwnerForgotten(owner.user))
        log.info("user=%s, made at %s, is gone from the Hub", owner.name, owner.created or "?")
        self._update_absent()

    async def change(
        self, *changes: Owner | OwnerMoved | OwnerForgotten, note: wire.Text | None = None
    ) -> None:
        """Apply changes of owners in this order, in one commit, with ``note`` in the log of decisions.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry = self._registry
        registry.journal.check()
        stored: list[Change] = [*changes]
        moved = {change.old for change in changes if isinstance(change, OwnerMoved)}
        is_visible = bool(
            moved and moved & (self._users_of_leases() | {x.user for x in registry.jobs.values()})
        )
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
        if is_visible or note is not None:
            await registry.notify()

    def _move(self, old: str, new: str) -> UserLags:
        """Give everything of one owner to another in memory; return the change that must also be stored."""
        registry = self._registry
        records = [record for record in registry.leases.values() if record.lease.user == old]
        jobs = [job for job in registry.jobs.values() if job.user == old]
        for record in records:
            registry.index.put(replace(record, lease=replace(record.lease, user=new)))
        for job in jobs:
            registry.cache_job(replace(job, user=new, idempotency_key=None))
        if records or jobs:
            log.info("what was of user=%s is of user=%s now", old, new)
        registry.session_queue.forget(old)
        registry.decisions.move_owner(old, new)
        registry.usage.move_owner(old, new)
        registry.owners.of.pop(old, None)
        return registry.fairness.move_owner(old, new)

    def _update_absent(self) -> None:
        """Update the absent owners, whose jobs do not start."""
        registry = self._registry
        absent = {x.user for x in registry.owners.of.values() if x.held or x.is_former}
        before, registry.owners.absent = registry.owners.absent, frozenset(absent | self._absent_since.keys())
        if before != registry.owners.absent:
            registry.changed.set()
            registry.notifications.add()

    # ---- administrators ------------------------------------------------------

    async def adopt(self, name: str, to: str | None, by: str) -> None:
        """Give what belongs to the absent owners of a name to a user of the Hub.

        ``to`` is the name of that user; None means the present user of the same name.

        Raises:
            BrokerUnavailable: the Hub does not answer.
            Conflict: the Hub has no such user, or the user may not have this; the text says why.
            NotFound: no owner of this name is absent.
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry, target = self._registry, to or name
        async with self._changing:
            registry.journal.check()
            self._absent(name)
            try:
                user = await self._hub.user(target)
                if user is None or not _is_name(target):
                    raise Conflict("the Hub has no user %1: name another, or add it there", repr(target[:60]))
                await self._meet(target, user.created)
            except HubError as error:
                raise BrokerUnavailable(str(error)) from None
            note = messages.text("notice.owner_adopted", *map(messages.printable, (by, name, target)))
            # One of them may be back by now.
            found = [
                x for x in registry.owners.of.values() if x.name == name and x.user in registry.owners.absent
            ]
            self._check_adoption({owner.user for owner in found}, target, user.groups)
            moves = [OwnerMoved(owner.user, target) for owner in found if owner.user != target]
            await self.change(*moves, replace(registry.owners.of[target], held=False), note=note)
            for owner in found:
                self._absent_since.pop(owner.user, None)
            self._update_absent()

    def _check_adoption(self, owners: set[str], target: str, groups: Sequence[str]) -> None:
        """Refuse an adoption by a user who cannot have what belongs to these owners.

        Raises:
            Conflict: the user lacks a project of the jobs, or would have two sessions of one server.
        """
        registry = self._registry
        projects = registry.policy.projects_of(groups)
        waiting = {r.lease.project for r in registry.index.queued.values() if r.lease.user in owners}
        if lacking := sorted(waiting.difference(projects)):
            raise Conflict(
                "%1 is no member of project %2, in which jobs wait: add %1 to its group first",
                target,
                ", ".join(lacking),
            )
        placed = registry.index.placed.values()
        servers = Counter(r.server for r in placed if r.lease.user in {*owners, target} and not r.is_job)
        if doubled := sorted(name for name, number in servers.items() if number > 1):
            raise Conflict(
                "%1 would have two sessions of the server %2: stop one of them first",
                target,
                repr(doubled[0]) if doubled[0] else "without a name",
            )

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


def _is_name(name: str) -> bool:
    return "/" not in name
