"""Guests in the simulator: both models, the words of the command, and what is unchanged without them."""

from __future__ import annotations

import json

import pytest

from jupyter_gpushare.cli import main
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.sim.sharing import CYCLES, MEMORY, by_turns, side_by_side
from jupyter_gpushare.sim.traces import read_pairs
from tests.core.build import train

TABLE = """gpu,job_a,job_b,rate_a,rate_b
v100,small,small,0.95,0.95
v100,small,large,0.99,0.5
v100,large,small,0.5,1.2
v100,large,large,0,0
"""


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Runs ``gpushare simulate jobs`` on 300 made-up jobs; returns (exit code, figures or errors)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.csv").write_text(TABLE)
    main(["simulate", "make", "jobs", "load.csv", "--count=300", "--gpus=16", "--load=1.1", "--seed=5"])
    capsys.readouterr()

    def call(words):
        try:
            code = main(["simulate", "jobs", "load.csv", "--gpus", "16", "--json", *words.split()])
        except SystemExit as stop:
            code = stop.code
        seen = capsys.readouterr()
        return code, json.loads(seen.out) if code == 0 else seen.err

    return call


FIGURES = "avg_completion_s", "p95_completion_s", "p95_queue_s", "preemptions_per_job", "rounds", "decisions"


@pytest.mark.parametrize("share", ["", "--share off"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (4671.624, 17488.97, 2067.538, 0.3167, 811, 490)),
        ("--progress 0.5,0.3 --preempt-cost 30", (4965.311, 19735.888, 1782.757, 0.3667, 1491, 520)),
        (
            "--order las --checkpoint sigterm --grace 30 --weights 1,3",
            (4167.718, 15471.728, 2416.242, 0.3633, 828, 518),
        ),
    ],
)
def test_without_guests_the_figures_are_those_from_before_there_were_any(simulate, words, expected, share):
    code, found = simulate(f"{words} {share}")
    assert code == 0
    assert tuple(found[name] for name in FIGURES) == expected
    assert "hosts" not in found


@pytest.mark.parametrize(
    "words", ["--share on", "--share on --gaps 0.3", "--share on --pair-table pairs.csv"]
)
def test_guests_are_counted(simulate, words):
    code, found = simulate(words)
    assert code == 0
    assert found["unfinished"] == 0
    assert found["hosts"] > 0
    assert 0.4 < found["host_speed_p95"] <= 1
    assert 0 < found["guest_time_percent"] < 100
    assert found["pairs_parted"] > 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--gaps 0.5", "--gaps and --pair-table need --share on"),
        ("--share off --pair-table pairs.csv", "--gaps and --pair-table need --share on"),
        ("--share on --gaps 0.5 --pair-table pairs.csv", "are two models: give one"),
        ("--share on --pair-table load.csv", "load.csv, row 1: the header has"),
        ("--share on --gaps 1", "'1' is not a number between 0 and 1"),
        ("--share on --gaps 0", "'0' is not a number above 0"),
        ("--share maybe", "'maybe' is not known"),
    ],
)
def test_words_that_do_not_go_together_are_refused(simulate, words, complaint):
    code, errors = simulate(words)
    assert code == 2
    assert complaint in errors


def test_a_table_without_a_pair_is_refused(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text(TABLE.replace("v100,large,small,0.5,1.2\n", ""))
    with pytest.raises(InvalidRequest, match="no row has 'large' beside 'small'"):
        read_pairs(path)


def test_turns_give_a_guest_the_gaps_of_its_host():
    sharing = by_turns(0.5)
    found = {sharing.speeds(train(f"h{n}", 1000), train("g", 1000)) for n in range(50)}
    assert {host for host, _ in found} == {keeps for _, keeps, _ in CYCLES}
    for _, guest in found:
        assert 0.5 < guest < 1  # it has gaps of its own, in which it needs nothing
    uses = [sharing.uses(f"j{n}") for n in range(200)]
    assert MEMORY[0] <= min(uses) < 0.2
    assert 0.8 < max(uses) <= MEMORY[1]
    assert uses == [by_turns(0.5).uses(f"j{n}") for n in range(200)]
    assert uses != [by_turns(0.5, seed=1).uses(f"j{n}") for n in range(200)]
    assert len({sharing.key(f"j{n}") for n in range(200)}) == 200


def test_a_table_gives_each_pair_its_measured_speeds(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text(TABLE)
    sharing = side_by_side(read_pairs(path))
    small, large = (train("x", 1000, pair_key=name) for name in ("small", "large"))
    assert sharing.speeds(small, large) == (0.99, 0.5)
    assert sharing.speeds(large, small) == (0.5, 1.0)
    assert {row[:2] for row in sharing.parted} == {("large", "large")}
    assert {sharing.key(f"j{n}") for n in range(50)} == {"small", "large"}
