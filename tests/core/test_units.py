"""Unit pools: examples, and the rules for any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jupyter_gpushare.core.units import EVERY_EXIT, Exit, Occupant, Pool, Presence, UnitPlacement

FOUR = ("a", "b", "c", "d")
RESTARTS = frozenset({Exit.RESTART})


def on(lease: str, gpus: str, presence: Presence = Presence.AWAKE, **more: object) -> Occupant:
    return Occupant(lease=lease, gpus=tuple(gpus), presence=presence, **more)  # type: ignore[arg-type]


def owner(lease: str, gpus: str, presence: Presence = Presence.ASLEEP) -> Occupant:
    return on(lease, gpus, presence, claims=True, exit=Exit.PARK)


def pool(*occupants: Occupant, per_gpu: int = 1, gpus: tuple[str, ...] = FOUR) -> Pool:
    return Pool(gpus, per_gpu, occupants)


def test_a_guest_takes_unclaimed_units_first():
    assert pool(owner("o", "ab")).place(1, keeps=False) == UnitPlacement(("c",))
    assert pool(owner("o", "ab")).place(3, keeps=False) == UnitPlacement(("a", "c", "d"))
    half = pool(owner("o", "a"), owner("p", "a"), on("g", "b"), per_gpu=2, gpus=("a", "b"))
    assert half.place(1, keeps=False) == UnitPlacement(("b",))
    assert half.put(on("h", "b")).place(1, keeps=False) == UnitPlacement(("a",))


def test_a_guest_waits_for_units_that_are_being_released():
    full = pool(on("x", "a", Presence.LEAVING), on("y", "b", Presence.ARRIVING), gpus=("a", "b"))
    assert full.place(1, keeps=False) is None
    assert full.without(("x",)).place(1, keeps=False) == UnitPlacement(("a",))


def test_a_return_displaces_one_guest_for_each_of_its_units():
    lent = pool(owner("o", "ab"), on("g", "bc"), on("h", "d"))
    assert lent.bring_back("o") == UnitPlacement(("a", "b"), ("g",))
    assert pool(owner("o", "ab")).bring_back("o") == UnitPlacement(("a", "b"))
    assert lent.bring_back("unknown") is None


def test_one_guest_of_a_shared_gpu_is_displaced_and_rather_one_that_restarts():
    shared = pool(
        owner("o", "a"), on("parks", "a", exit=Exit.PARK), on("restarts", "a"), per_gpu=2, gpus=("a",)
    )
    assert shared.bring_back("o") == UnitPlacement(("a",), ("restarts",))
    assert shared.without(("restarts",)).bring_back("o") == UnitPlacement(("a",))


def test_a_guest_that_cannot_leave_any_more_is_displaced_last():
    stuck = pool(owner("o", "a"), on("stuck", "a", exit=Exit.NONE), gpus=("a",))
    assert stuck.bring_back("o") == UnitPlacement(("a",), ("stuck",))
    both = pool(
        owner("o", "a"), on("stuck", "a", exit=Exit.NONE), on("parks", "a", exit=Exit.PARK), per_gpu=2
    )
    assert both.bring_back("o") == UnitPlacement(("a",), ("parks",))


def test_a_guest_returns_where_it_displaces_only_what_it_may():
    parked = on("g", "a", Presence.ASLEEP, exit=Exit.PARK)
    assert pool(parked, on("x", "a")).bring_back("g", RESTARTS) == UnitPlacement(("a",), ("x",))
    assert pool(parked, on("x", "a")).bring_back("g", frozenset()) is None
    assert pool(parked, on("x", "a", exit=Exit.PARK)).bring_back("g", RESTARTS) is None
    assert pool(parked, owner("o", "a", Presence.AWAKE)).bring_back("g", RESTARTS) is None


def test_a_claim_gets_unclaimed_units_and_displaces_their_guests():
    filled = pool(owner("o", "ab"), on("g", "c"), on("h", "d"))
    assert filled.place(1, keeps=True) == UnitPlacement(("c",), ("g",))
    assert filled.without(("h",)).place(1, keeps=True) == UnitPlacement(("d",))
    assert filled.place(3, keeps=True) is None


def test_what_cannot_leave_is_never_put_on_a_claimed_unit():
    claimed = pool(owner("o", "abc"))
    assert claimed.place(1, keeps=True) == UnitPlacement(("d",))
    assert claimed.put(on("stuck", "d", exit=Exit.NONE)).place(1, keeps=True) is None
    assert claimed.put(on("stuck", "d", exit=Exit.NONE)).place(1, keeps=False) == UnitPlacement(("a",))


def test_units_are_free_once_no_other_lease_has_memory_there():
    waits = pool(owner("o", "a", Presence.ARRIVING), on("g", "a", Presence.LEAVING))
    assert not waits.is_free("o")
    assert waits.without(("g",)).is_free("o")
    assert waits.with_presence("g", Presence.ASLEEP).is_free("o")
    assert not waits.is_free("unknown")


def test_a_pool_without_a_gpu_that_works_takes_nothing():
    assert pool(gpus=()).place(1, keeps=False) is None
    assert pool(gpus=()).place(1, keeps=True) is None


class Node(RuleBasedStateMachine):
    """A pool under a scheduler that only counts: it grants while granted units are below all units."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool((), 1)
        self.granted: dict[str, int] = {}  # units, by lease
        self.size: dict[str, int] = {}
        self.claim: dict[str, tuple[str, ...]] = {}
        self.restarting: list[str] = []  # displaced, granted, without units
        self.numbers = iter(range(10**6))

    @initialize(gpus=st.integers(1, 8), per_gpu=st.sampled_from([1, 2, 4, 8]))
    def begin(self, gpus: int, per_gpu: int) -> None:
        self.pool = Pool(tuple(f"gpu{n}" for n in range(gpus)), per_gpu)

    # ---- the scheduler ---------------------------------------------------------

    def can_grant(self, units: int) -> bool:
        return sum(self.granted.values()) + units <= len(self.pool.gpus) * self.pool.per_gpu

    def leases(self, *presences: Presence, **wanted: object) -> list[str]:
        return [
            x.lease
            for x in self.pool.occupants
            if x.presence in presences and all(getattr(x, key) == value for key, value in wanted.items())
        ]

    def displace(self, placement: UnitPlacement, units: int) -> None:
        """What displaced guests do, and that there are few, and none with a claim."""
        assert len(placement.displaced) <= units
        for lease in placement.displaced:
            guest = self.pool.of(lease)
            assert guest is not None
            assert not guest.claims
            assert guest.exit is not Exit.NONE
            if guest.presence is Presence.ARRIVING:
                self.pool = self.pool.with_presence(lease, Presence.ASLEEP)
                del self.granted[lease]
            else:
                self.pool = self.pool.with_presence(lease, Presence.LEAVING)
                if guest.exit is Exit.RESTART:
                    self.restarting.append(lease)

    # ---- events ----------------------------------------------------------------

    @rule(units=st.integers(1, 4), claims=st.booleans(), exit_=st.sampled_from(Exit))
    def start(self, units: int, claims: bool, exit_: Exit) -> None:
        units = units if self.pool.per_gpu == 1 else 1
        if not self.can_grant(units):
            return
        keeps = claims or exit_ is Exit.NONE
        lease = f"x{next(self.numbers)}"
        placement = self.pool.place(units, keeps=keeps)
        if placement is None:
            unclaimed = sum(self.pool.claimed(gpu) < self.pool.per_gpu for gpu in self.pool.gpus)
            is_leaving = self.leases(Presence.LEAVING) or self.restarting
            assert unclaimed < units if keeps else is_leaving, "granted, and there are no units"
            return
        self.displace(placement, units)
        presence = Presence.ARRIVING if keeps else Presence.AWAKE
        assert keeps or not placement.displaced
        self.pool = self.pool.put(
            Occupant(lease=lease, gpus=placement.gpus, presence=presence, claims=claims, exit=exit_)
        )
        self.granted[lease] = self.size[lease] = units
        if claims:
            self.claim[lease] = placement.gpus

    @precondition(lambda self: self.leases(Presence.AWAKE, exit=Exit.PARK))
    @rule(data=st.data())
    def lose_the_grant(self, data: st.DataObject) -> None:
        """An idle owner, or a guest that the scheduler evicts, is parked."""
        lease = data.draw(st.sampled_from(self.leases(Presence.AWAKE, exit=Exit.PARK)))
        self.pool = self.pool.with_presence(lease, Presence.LEAVING)

    @precondition(lambda self: self.leases(Presence.ASLEEP))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases(Presence.ASLEEP)))
        mine = self.pool.of(lease)
        assert mine is not None
        if not self.can_grant(self.size[lease]):
            return
        placement = self.pool.bring_back(lease, EVERY_EXIT if mine.claims else RESTARTS)
        if placement is None:
            assert not mine.claims, "a granted return gets its own units"
            return
        assert placement.gpus == mine.gpus
        self.displace(placement, self.size[lease])
        self.pool = self.pool.with_presence(lease, Presence.ARRIVING)
        self.granted[lease] = self.size[lease]

    @precondition(lambda self: self.leases(Presence.LEAVING))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.leave_now(data.draw(st.sampled_from(self.leases(Presence.LEAVING))))

    def leave_now(self, lease: str) -> None:
        if lease in self.restarting:
            self.pool = self.pool.without((lease,))
        else:
            self.pool = self.pool.with_presence(lease, Presence.ASLEEP)
            del self.granted[lease]

    @rule()
    def follow(self) -> None:
        """Use what is free: units of arrivals, and others for what restarts."""
        for lease in self.leases(Presence.ARRIVING):
            if self.pool.is_free(lease):
                self.pool = self.pool.with_presence(lease, Presence.AWAKE)
        for lease in [x for x in self.restarting if self.pool.of(x) is None]:
            if (placement := self.pool.place(self.size[lease], keeps=False)) is not None:
                self.pool = self.pool.put(on_units(lease, placement))
                self.restarting.remove(lease)

    @precondition(lambda self: self.pool.occupants)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([x.lease for x in self.pool.occupants]))
        self.pool = self.pool.without((lease,))
        for table in (self.granted, self.claim):
            table.pop(lease, None)
        if lease in self.restarting:
            self.restarting.remove(lease)

    @rule(data=st.data())
    def become_guaranteed(self, data: st.DataObject) -> None:
        """A quota grows: a guest gets a claim on its own units, where they are unclaimed."""
        guests = [
            x
            for x in self.pool.occupants
            if x.exit is Exit.PARK
            and not x.claims
            and all(self.pool.claimed(gpu) < self.pool.per_gpu for gpu in x.gpus)
        ]
        if guests:
            guest = data.draw(st.sampled_from(guests))
            self.pool = self.pool.put(on_units(guest.lease, UnitPlacement(guest.gpus), guest))
            self.claim[guest.lease] = guest.gpus

    # ---- rules -----------------------------------------------------------------

    @invariant()
    def a_unit_has_one_awake_lease_and_one_claim(self) -> None:
        for gpu in self.pool.gpus:
            in_use = [x for x in self.pool.on(gpu) if x.presence in (Presence.AWAKE, Presence.LEAVING)]
            assert len(in_use) <= self.pool.per_gpu
            assert self.pool.claimed(gpu) <= self.pool.per_gpu

    @invariant()
    def a_lease_with_a_claim_is_on_its_claim(self) -> None:
        for lease, gpus in self.claim.items():
            mine = self.pool.of(lease)
            assert mine is not None
            assert mine.claims
            assert mine.gpus == gpus

    @invariant()
    def awake_units_are_granted(self) -> None:
        awake = [x for x in self.pool.occupants if x.presence is not Presence.ASLEEP]
        assert all(len(x.gpus) == self.granted[x.lease] for x in awake)
        assert sum(self.granted.values()) <= len(self.pool.gpus) * self.pool.per_gpu

    def teardown(self) -> None:
        """Once all that leaves has left, all that was granted has its units."""
        for lease in self.leases(Presence.LEAVING):
            self.leave_now(lease)
        self.follow()
        assert not self.leases(Presence.ARRIVING)
        assert not self.restarting


def on_units(lease: str, placement: UnitPlacement, before: Occupant | None = None) -> Occupant:
    """A lease that restarted, or a guest that has a claim now."""
    if before is None:
        return Occupant(lease=lease, gpus=placement.gpus, presence=Presence.AWAKE)
    return Occupant(lease=lease, gpus=placement.gpus, presence=before.presence, claims=True, exit=before.exit)


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("per_gpu", [1, 2, 4, 8])
def test_every_unit_can_be_lent_and_returned(per_gpu):
    gpus = FOUR
    owners = [owner(f"o{n}", gpus[n // per_gpu]) for n in range(4 * per_gpu)]
    lent = pool(*owners, per_gpu=per_gpu)
    for n in range(4 * per_gpu):
        placement = lent.place(1, keeps=False)
        assert placement is not None
        lent = lent.put(on(f"g{n}", placement.gpus[0]))
    assert lent.place(1, keeps=False) is None
    for each in owners:
        placement = lent.bring_back(each.lease)
        assert placement is not None
        assert len(placement.displaced) == 1
        lent = lent.without(placement.displaced).with_presence(each.lease, Presence.AWAKE)
    assert {x.lease for x in lent.occupants} == {x.lease for x in owners}
