"""Seeded histories of hosts and guests: allocations, frees, kills, moves, and helpers that die anywhere.

GPUSHARE_TEST_GUESTS=1000 pytest tests/gpu/test_guest_histories.py -s --timeout 0
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.gpu.moves.guests import Guests
from jupyter_gpushare.protocol.helper import EventKind
from tests.gpu.guests_model import GIB, Paper, history

HISTORIES = int(os.environ.get("GPUSHARE_TEST_GUESTS", "15"))


@pytest.mark.long_form
def test_no_history_denies_a_host_or_loses_a_guest(tmp_path: Path) -> None:
    left = kills = asks = ended = 0
    for seed in range(HISTORIES):
        with pytest.MonkeyPatch.context() as patch:
            paper = history(seed, tmp_path / str(seed), patch)
        assert not paper.faults, f"seed {seed}: {paper.faults}"
        leaves = [more for kind, more in paper.events if kind is EventKind.GUEST]
        left, kills, asks = left + len(leaves), kills + paper.kills, asks + paper.asks
        ended += sum(more["fields"]["ended"] == "true" for more in leaves)
    assert left > HISTORIES // 2
    print(f"\n{HISTORIES} histories: {left} guests left, {ended} of them ended; {kills} helpers killed")


def faults(folder: Path) -> list[str]:
    for seed in range(200):
        with pytest.MonkeyPatch.context() as patch:
            if found := history(seed, folder / str(seed), patch).faults:
                return found
    return []


@pytest.mark.parametrize("looks_again", [True, False])
def test_the_second_look_of_the_library_is_needed(tmp_path: Path, looks_again: bool) -> None:
    """The host has read that nothing is kept when its guest comes, and writes what it took after that."""
    paper = Paper(random.Random(0), tmp_path, looks_again=looks_again)
    paper.pace, paper.quiet = 0.0, True
    for name, asked in (("host", paper.asked("host")), ("guest", paper.asked("guest", "host", 20 * GIB))):
        host = next(iter(paper.programs.values()), None)
        if host is not None:
            host.asked = 60 * GIB
            paper.step(host)
        paper.guests.set_limit(asked, 1)
        paper.start_program(name)
    host, guest = paper.programs.values()
    paper.step(host)
    paper.step(host)
    guest.asked = 10 * GIB
    for _ in range(4):
        paper.step(guest)
    assert bool(paper.faults) is not looks_again
    assert (host.step, host.wants) == (("", 1) if looks_again else ("call", 0))


@pytest.mark.parametrize(("name", "without"), [("_used_bytes", 0), ("_shows", False)])
def test_the_looks_of_the_helper_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, without: Any
) -> None:
    """At the account of the host before a pair, and at what a guest that has ended left."""
    monkeypatch.setattr(Guests, name, lambda *_: without)
    assert faults(tmp_path)


def test_a_pair_is_watched_from_the_moment_that_its_guest_begins_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would sleep until the next pair, and the host would wait for ever."""
    paper = Paper(random.Random(0), tmp_path)
    paper.pace, paper.quiet = 0.0, True
    paper.guests.set_limit(paper.asked("host"), 1)
    paper.start_program("host")
    assert not paper.guests.poll()
    asleep = replace(paper.asked("guest", "host", 20 * GIB), suspended=True)
    paper.guests.set_limit(asleep, 1)
    assert not paper.guests.poll()
    guest, seen, resume = paper.registry.get("guest"), [], paper.mover.resume
    monkeypatch.setattr(
        paper.mover, "resume", lambda *words: (seen.append(paper.guests.poll()), resume(*words))[1]
    )
    assert guest is not None
    assert paper.guests.resume(guest, 0.0, ()).done
    assert seen == [True]
