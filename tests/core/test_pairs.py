"""Which pairs stay together on one GPU, by the counters of both; what lies about them do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from jupyter_gpushare.core.pairs import (
    ALONE_S,
    KEEPS,
    MAX_PARTED,
    PARTED_S,
    PAYS,
    REVIEW_S,
    TRIAL_S,
    Because,
    PairDecision,
    PairVerdict,
    Parted,
    Rates,
    Reading,
    judge,
)

EVERY_S = 5
CALLS_PER_STEP = 400
Speed = Callable[[float], float]  # by seconds since the guest came (below 0: before)


def at(speed: float) -> Speed:
    return lambda since_s: speed


@dataclass
class Job:
    """A job with true counters, and what it says instead; the lease's `Rates` see only that."""

    alone: float = 10.0  # steps/s
    says: Callable[[Reading, float], Reading] = lambda reading, since_s: reading
    every: float = 1.0  # steps that it reports at once

    def __post_init__(self) -> None:
        self.rates = Rates()
        self.steps = 0.0

    def run(self, from_s: float, until_s: float, companion: str, speed: Speed) -> None:
        """Run at a part of its speed alone."""
        now = from_s
        while now < until_s:
            now += EVERY_S
            self.steps += EVERY_S * self.alone * speed(now)
            done = self.steps // self.every * self.every
            reading = Reading(at=now, done=done, total=1e9, work=int(self.steps * CALLS_PER_STEP))
            self.rates.add(self.says(reading, now), companion)


def silent(reading: Reading, since_s: float) -> Reading:
    return replace(reading, done=None)


def unknown_work(reading: Reading, since_s: float) -> Reading:
    return replace(reading, work=-1)


def together(
    host: Job,
    guest: Job,
    host_speed: float | Speed,
    guest_speed: float | Speed,
    *,
    for_s: float = TRIAL_S,
    guest_known: bool = False,
    alone_s: float = 3600.0,
) -> PairVerdict:
    """The verdict after ``for_s`` of a pair; the guest came at 0, and may have run alone before."""
    speeds = [at(s) if isinstance(s, float) else s for s in (host_speed, guest_speed)]
    host.run(-alone_s, 0, "", lambda s: speeds[0](s) if not isinstance(host_speed, float) else 1.0)
    if guest_known:
        guest.run(-alone_s, 0, "", at(1.0))
    guest.rates.interrupt()
    host.run(0, for_s, "guest", speeds[0])
    guest.run(0, for_s, "host", speeds[1])
    return judge(host.rates, guest.rates, 0.0, for_s)


def decided(verdict: PairVerdict) -> tuple[PairDecision, Because]:
    return verdict.decision, verdict.why


KEPT = PairDecision.KEEP, Because.IT_PAYS
SLOWED = PairDecision.PART, Because.HOST_SLOWED

# -- what is true


@pytest.mark.parametrize("says", [lambda reading, since_s: reading, silent, unknown_work])
@pytest.mark.parametrize(("speed", "expected"), [(1.0, KEPT), (0.92, KEPT), (0.88, SLOWED), (0.4, SLOWED)])
def test_a_pair_stays_while_the_host_keeps_its_speed(says, speed, expected):
    verdict = together(Job(says=says), Job(), speed, 0.3)
    assert decided(verdict) == expected
    assert verdict.host == pytest.approx(speed, abs=0.005)
    assert verdict.guest is None
    assert verdict.next_at == TRIAL_S + REVIEW_S


def test_nothing_is_decided_before_the_trial_is_over():
    verdict = together(Job(), Job(), 0.2, 0.3, for_s=TRIAL_S - EVERY_S)
    assert decided(verdict) == (PairDecision.UNDECIDED, Because.TRIAL)
    assert verdict.next_at == TRIAL_S


@pytest.mark.parametrize(
    ("host", "guest", "expected"),
    [
        (0.95, 0.5, KEPT),
        (0.95, 0.16, KEPT),
        (0.95, 0.14, (PairDecision.PART, Because.GAINS_TOO_LITTLE)),
        (0.88, 0.9, SLOWED),
    ],
)
def test_both_together_have_to_gain_where_the_guest_is_known(host, guest, expected):
    verdict = together(Job(), Job(), host, guest, guest_known=True)
    assert decided(verdict) == expected
    assert verdict.guest == pytest.approx(guest, abs=0.005)


def test_a_pair_that_stays_is_judged_again_by_its_last_ten_minutes():
    host, guest = Job(), Job()
    verdict = together(host, guest, lambda s: 0.95 if 0 < s < TRIAL_S else 0.85 if s > 0 else 1.0, 0.3)
    assert verdict.decision is PairDecision.KEEP
    host.run(TRIAL_S, TRIAL_S + REVIEW_S, "guest", at(0.85))
    guest.run(TRIAL_S, TRIAL_S + REVIEW_S, "host", at(0.3))
    verdict = judge(host.rates, guest.rates, 0.0, verdict.next_at)
    assert decided(verdict) == SLOWED
    assert verdict.host == pytest.approx(0.85, abs=0.01)


def test_the_companion_before_counts_for_nothing():
    host, guest = Job(), Job()
    assert together(host, Job(), 0.5, 0.3).decision is PairDecision.PART
    host.run(TRIAL_S, 2 * TRIAL_S, "", at(1.0))
    host.run(2 * TRIAL_S, 3 * TRIAL_S, "another", at(1.0))
    guest.run(2 * TRIAL_S, 3 * TRIAL_S, "host", at(0.3))
    assert decided(judge(host.rates, guest.rates, 2 * TRIAL_S, 3 * TRIAL_S)) == KEPT


# -- evidence


def test_a_host_that_was_not_watched_alone_for_ten_minutes_is_not_known():
    host = Job()
    verdict = together(host, Job(), 1.0, 0.3, alone_s=ALONE_S - EVERY_S)
    assert not host.rates.is_known
    assert decided(verdict) == (PairDecision.PART, Because.HOST_UNKNOWN)
    assert not verdict.is_remembered
    host = Job()
    assert together(host, Job(), 0.5, 0.3, alone_s=ALONE_S + 3 * EVERY_S).is_remembered
    assert host.rates.is_known


@pytest.mark.parametrize("speed", [0.97, 0.85])
@pytest.mark.parametrize("step_s", [1, 5, 10])
def test_progress_in_long_steps_is_measured_from_step_to_step(step_s, speed):
    verdict = together(Job(every=10.0 * step_s, says=unknown_work), Job(), speed, 0.3)
    assert verdict.host == pytest.approx(speed, abs=0.06)
    assert verdict.decision is (PairDecision.KEEP if speed > KEEPS else PairDecision.PART)


@pytest.mark.parametrize(("speed", "expected"), [(0.97, KEPT), (0.8, SLOWED)])
def test_progress_in_steps_that_are_too_long_gives_way_to_work(speed, expected):
    assert decided(together(Job(every=3_000.0), Job(), speed, 0.3)) == expected
    blind = Job(every=3_000.0, says=unknown_work)
    assert decided(together(blind, Job(), speed, 0.3)) == (PairDecision.PART, Because.HOST_SILENT)


@pytest.mark.parametrize(
    "says",
    [
        lambda r, s: replace(r, total=2e9) if s > 60 else r,  # another total
        lambda r, s: replace(r, done=r.done / 2) if s > 60 else r,  # it begins again
        lambda r, s: replace(r, done=None) if s > 60 else r,  # withdrawn
        lambda r, s: replace(r, attempt=2) if s > 60 else r,
        lambda r, s: replace(r, done=float("nan")),
        lambda r, s: replace(r, done=2.0, total=1.0),
        lambda r, s: replace(r, total=0.0),
        lambda r, s: replace(r, total=float("inf")),
    ],
)
@pytest.mark.parametrize(("speed", "expected"), [(0.97, KEPT), (0.8, SLOWED)])
def test_progress_that_is_none_gives_way_to_work(says, speed, expected):
    assert decided(together(Job(says=says), Job(), speed, 0.3)) == expected


def test_time_in_which_a_job_does_not_run_counts_for_nothing():
    host = Job()
    host.run(-3600, -1800, "", at(1.0))
    host.run(-900, 0, "", at(1.0))  # nobody said that it had slept
    host.run(0, 90, "guest", at(0.95))
    host.rates.interrupt()
    host.run(600, 690, "guest", at(0.95))
    host.rates.add(Reading(at=690.0, done=0.0, total=1e9), "guest")  # no time passed
    assert host.rates.kept == pytest.approx(0.95, abs=0.01)


def test_a_helper_that_starts_again_counts_work_from_nothing():
    host = Job(says=silent)
    host.run(-3600, -1200, "", at(1.0))
    host.steps = 0.0
    host.run(-1200, 0, "", at(1.0))
    host.run(0, TRIAL_S, "guest", at(0.95))
    assert host.rates.kept == pytest.approx(0.95, abs=0.01)


def pauses(every_s: float, for_s: float, speed: float) -> Speed:
    """Speed of a host that pauses by itself, from 60 s on in its trial, and has ``speed`` in between."""
    return lambda s: 0.0 if (s - 65) % every_s < for_s else speed if s > 0 else 1.0


@pytest.mark.parametrize("says", [lambda reading, since_s: reading, silent, unknown_work])
@pytest.mark.parametrize(("every_s", "for_s"), [(600, 45), (1_200, 60), (60, 10), (3_000, 90)])
@pytest.mark.parametrize(("speed", "expected"), [(0.97, KEPT), (0.8, SLOWED)])
def test_a_pause_of_the_hosts_own_is_not_held_against_the_guest(says, every_s, for_s, speed, expected):
    """A naive rule parts the pair: the trial has a pause of 45 s in 180 s, the average is one in 600 s."""
    host, guest, story = Job(says=says), Job(), pauses(every_s, for_s, speed)
    assert decided(together(host, guest, story, 0.3)) == expected
    host.run(TRIAL_S, TRIAL_S + REVIEW_S, "guest", story)
    guest.run(TRIAL_S, TRIAL_S + REVIEW_S, "host", at(0.3))
    assert decided(judge(host.rates, guest.rates, 0.0, TRIAL_S + REVIEW_S)) == expected


def test_pauses_that_the_guest_makes_are_no_pauses_of_the_host():
    """The host pauses alone as well, but not for so long, or not so often."""
    own = pauses(600, 20, 0.97)
    assert decided(together(Job(), Job(), lambda s: 0.0 if 60 < s < 120 else own(s), 0.3)) == SLOWED
    often = lambda s: 0.0 if s > 0 and s % 60 < 20 else own(s)
    assert decided(together(Job(), Job(), often, 0.3)) == SLOWED


# -- lies: what a naive rule makes of them, and what this one does


def naive(host: list[Reading], guest: list[Reading]) -> bool:
    """Whether a pair stays by a rule that believes: progress of the last ten minutes against that since."""

    def ratio(readings: list[Reading]) -> float | None:
        before = [r for r in readings if -ALONE_S <= r.at <= 0 and r.done is not None]
        since = [r for r in readings if r.at > 0 and r.done is not None]
        if len(before) < 2 or len(since) < 2 or before[-1].done == before[0].done:
            return None
        rates = [(x[-1].done - x[0].done) / (x[-1].at - x[0].at) for x in (before, since)]
        return rates[1] / rates[0]

    kept, gets = ratio(host), ratio(guest)
    if kept is None:  # by its work, whatever that says
        before = [r for r in host if -ALONE_S <= r.at <= 0]
        since = [r for r in host if r.at > 0]
        works = [(x[-1].work - x[0].work) / (x[-1].at - x[0].at) for x in (before, since)]
        kept = works[1] / works[0] if works[0] > 0 else 1.0
    return kept >= KEEPS and (gets is None or kept + gets >= PAYS)


class Liar(Job):
    """A job that keeps what it said."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.said: list[Reading] = []
        says = self.says

        def note(reading: Reading, since_s: float) -> Reading:
            self.said.append(says(reading, since_s))
            return self.said[-1]

        self.says = note


def freezes(reading: Reading, since_s: float) -> Reading:
    """It reports the same progress over and over once the guest is there, but for a jump at the end."""
    frozen = 36_000.0
    return replace(reading, done=min(reading.done, frozen) if since_s < TRIAL_S else frozen + 1_790)


def test_a_host_that_stops_reporting_is_judged_by_its_work():
    """A naive rule sees no progress, and keeps a pair that hurts; or no speed, and parts one that pays."""
    stops = lambda r, s: replace(r, done=min(r.done, 36_000.0))
    host, guest = Liar(says=stops), Liar()
    assert decided(together(host, guest, 0.97, 0.3)) == KEPT
    assert not naive(host.said, guest.said)
    host, guest = Liar(says=freezes), Liar()
    assert decided(together(host, guest, 0.6, 0.3)) == SLOWED
    assert naive(host.said, guest.said)
    for speed, expected in ((0.97, KEPT), (0.6, SLOWED)):
        withdraws = lambda r, s: replace(r, done=None) if s > 0 else r
        assert decided(together(Job(says=withdraws), Job(), speed, 0.3)) == expected
    blind = lambda r, s: replace(stops(r, s), work=-1)
    assert decided(together(Job(says=blind), Job(), 0.97, 0.3)) == (PairDecision.PART, Because.HOST_SILENT)


def test_a_host_that_reports_faster_than_it_works_is_judged_by_its_work():
    def faster(reading: Reading, since_s: float) -> Reading:
        return replace(reading, done=36_000.0 + 10.0 * since_s) if since_s > 0 else reading

    host, guest = Liar(says=faster), Liar()
    assert decided(together(host, guest, 0.6, 0.3)) == SLOWED
    assert naive(host.said, guest.said)
    assert decided(together(Liar(says=faster), Liar(), 0.97, 0.3)) == KEPT


def test_a_guest_that_computes_nothing_leaves_after_it_had_time_to_begin():
    """A naive rule keeps it: it harms nobody."""
    host, guest = Liar(), Liar(says=silent)
    verdict = together(host, guest, 1.0, 0.0)
    assert decided(verdict) == (PairDecision.UNDECIDED, Because.GUEST_STARTS)
    assert verdict.next_at == REVIEW_S
    host, guest = Liar(), Liar(says=silent)
    verdict = together(host, guest, 1.0, 0.0, for_s=REVIEW_S)
    assert decided(verdict) == (PairDecision.PART, Because.GUEST_IDLE)
    assert naive(host.said, guest.said)
    late = together(Job(), Job(), 1.0, lambda s: 0.3 if s > 300 else 0.0, for_s=REVIEW_S)
    assert decided(late) == KEPT


@pytest.mark.parametrize("guest_known", [True, False])
def test_a_guest_that_reports_progress_without_work_computes_nothing(guest_known):
    def pretends(reading: Reading, since_s: float) -> Reading:
        return replace(reading, done=40_000.0 + 5.0 * since_s) if since_s > 0 else reading

    host, guest = Liar(), Liar(says=pretends)
    verdict = together(host, guest, 1.0, 0.0, for_s=REVIEW_S, guest_known=guest_known)
    assert decided(verdict) == (PairDecision.PART, Because.GUEST_IDLE)
    assert naive(host.said, guest.said)


def test_a_guest_whose_work_is_not_known_is_judged_by_its_progress():
    assert decided(together(Job(), Job(says=unknown_work), 1.0, 0.3, for_s=REVIEW_S)) == KEPT
    idle = together(Job(), Job(says=unknown_work), 1.0, 0.0, for_s=REVIEW_S)
    assert decided(idle) == (PairDecision.PART, Because.GUEST_IDLE)
    dark = Job(says=lambda r, s: replace(r, work=-1, done=None))
    assert decided(together(Job(), dark, 1.0, 0.3, for_s=REVIEW_S)) == KEPT


def test_a_host_that_is_slow_for_the_ten_minutes_before_is_measured_by_its_last_hour():
    def slow(since_s: float) -> float:
        return 0.6 if since_s > -ALONE_S else 1.0

    host, guest = Liar(), Liar()
    verdict = together(host, guest, slow, 0.3)
    assert decided(verdict) == SLOWED
    assert verdict.host == pytest.approx(0.6, abs=0.01)
    assert naive(host.said, guest.said)


def test_a_host_that_still_loads_its_data_when_it_is_watched_is_measured_by_what_comes_after():
    verdict = together(Job(), Job(), lambda s: 0.1 if s < -450 else 1.0 if s < 0 else 0.8, 0.3, alone_s=900.0)
    assert verdict.host == pytest.approx(0.8, abs=0.02)


def test_a_host_that_counts_up_in_jumps_is_measured_from_jump_to_jump():
    """Alone one jump more falls out of the window than beside the guest: a naive rule sees no loss."""

    def jumps(reading: Reading, since_s: float) -> Reading:
        step = 4_000 if since_s <= 0 else 1
        return replace(reading, done=reading.done // step * step)

    host, guest = Liar(says=jumps), Liar()
    verdict = together(host, guest, 0.8, 0.3, alone_s=3_500.0)
    assert naive(host.said, guest.said)
    assert decided(verdict) == SLOWED
    assert verdict.host == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("speed", "expected"), [(0.97, KEPT), (0.6, SLOWED)])
def test_work_that_is_inflated_does_not_overrule_progress(speed, expected):
    def inflates(reading: Reading, since_s: float) -> Reading:
        return replace(reading, work=reading.work * 3) if since_s > 0 else reading

    assert decided(together(Job(says=inflates), Job(), speed, 0.3)) == expected


def test_inflated_work_of_the_host_does_not_make_up_for_a_guest_that_gains_nothing():
    """A naive rule adds three times the host's speed to nearly nothing, and keeps the guest."""

    def inflates(reading: Reading, since_s: float) -> Reading:
        work = reading.work + max(0, int(since_s * 3 * 10 * CALLS_PER_STEP))
        return replace(reading, done=None, work=work)

    host, guest = Liar(says=inflates), Liar()
    verdict = together(host, guest, 0.95, 0.02, guest_known=True)
    assert decided(verdict) == (PairDecision.PART, Because.GAINS_TOO_LITTLE)
    assert verdict.host == 1.0
    assert naive(host.said, guest.said)


# -- pairs in virtual time, with noise


def noise(random: Random, sigma: float) -> Callable[[], float]:
    """Factor of the speed in each interval; neighbours are alike, as in real training."""
    level = 0.0

    def draw() -> float:
        nonlocal level
        level = 0.7 * level + random.gauss(0.0, sigma * (1 - 0.7**2) ** 0.5)
        return max(0.0, 1.0 + level)

    return draw


def lives(seed: int, factor: float, sigma: float, *, until_s: float = 1_800.0) -> float:
    """How long a pair stays together whose host keeps ``factor`` of its speed, at most ``until_s``."""
    random = Random(f"{seed} {factor}")
    host, guest, wave = Job(alone=random.uniform(0.5, 50)), Job(), noise(random, sigma)
    if random.random() < 0.3:
        host.says = silent
    host.run(-random.uniform(700, 2_500), 0, "", lambda s: wave())
    due, now = 0.0, 0.0
    while now < until_s:
        host.run(now, now + 30, "guest", lambda s: factor * wave())
        guest.run(now, now + 30, "host", at(0.4))
        now += 30
        if now >= due:
            verdict = judge(host.rates, guest.rates, 0.0, now)
            if verdict.decision is PairDecision.PART:
                return now
            due = verdict.next_at
    return until_s


@pytest.mark.parametrize(
    ("sigma", "factor", "in_trial", "in_half_an_hour"),
    [
        (0.05, 0.3, range(40, 41), range(40, 41)),
        (0.05, 0.8, range(40, 41), range(40, 41)),
        (0.05, 0.86, range(36, 41), range(38, 41)),
        (0.05, 0.95, range(2), range(2)),
        (0.05, 1.0, range(1), range(1)),
        (0.1, 0.8, range(40, 41), range(40, 41)),
        (0.1, 0.86, range(32, 41), range(36, 41)),
        (0.1, 0.95, range(10), range(14)),  # false: near the bound noise decides
        (0.1, 1.0, range(2), range(2)),
    ],
)
def test_pairs_that_hurt_part_within_four_minutes_and_pairs_that_pay_stay(
    sigma, factor, in_trial, in_half_an_hour
):
    """How many of 40 pairs part; a speed varies by 5 or 10 % from one 5 s to the next."""
    ends = [lives(seed, factor, sigma) for seed in range(40)]
    assert sum(end <= 240 for end in ends) in in_trial
    assert sum(end < 1_800 for end in ends) in in_half_an_hour


# -- parted pairs


def test_a_parted_pair_is_not_tried_for_a_day():
    parted = Parted()
    parted.add("ada: train", "bo: train", 100.0)
    parted.add("", "bo: train", 100.0)
    parted.add("ada: train", "", 100.0)
    pairs = parted.pairs(100.0)
    assert pairs == {("ada: train", "bo: train")}
    assert parted.pairs(100.0 + PARTED_S - 1) is pairs
    assert parted.pairs(100.0 + PARTED_S) == frozenset()
    assert parted.rows() == []


def test_the_table_is_bounded_and_the_oldest_go_first():
    parted = Parted()
    for n in range(MAX_PARTED):
        parted.add("host", f"g{n}", n)
    parted.add("host", "g0", MAX_PARTED)  # again: it is the newest now
    parted.add("host", "new", MAX_PARTED + 1)
    assert len(parted.pairs(0.0)) == MAX_PARTED
    assert ("host", "g1") not in parted.pairs(0.0)
    assert {("host", "g0"), ("host", "new")} <= parted.pairs(0.0)


def test_the_table_is_stored_as_rows():
    parted = Parted()
    parted.add("a", "b", 5.0)
    parted.add("c", "d", 1.0)
    assert Parted(parted.rows()).pairs(5.0) == parted.pairs(5.0)
    many = Parted([("a", str(n), float(n)) for n in range(MAX_PARTED + 5)])
    assert len(many.pairs(0.0)) == MAX_PARTED
    assert ("a", "4") not in many.pairs(0.0)
