"""The adaptive timeout: what a session's own pauses teach."""

from __future__ import annotations

from jupyter_gpushare.core.idle import PauseHistory, adaptive_timeout_s, eligible_at
from jupyter_gpushare.sim.traces import read_cells
from tests import traces
from tests.core.build import NOW, build, cluster

NOTEBOOKS = "notebooks_adobe_june2021_60s"
HOUR = 3600.0


def test_short_pauses_teach_nothing():
    past = PauseHistory()
    for _ in range(100):
        past = past.after(pause_s=300, busy_s=60)
    assert past == PauseHistory(busy_s=60)


def test_an_owner_with_many_recent_breaks_keeps_the_gpus_for_longer():
    steady, coming = PauseHistory(busy_s=60), PauseHistory()
    for _ in range(20):
        coming = coming.after(0.3 * HOUR, 60)
    assert adaptive_timeout_s(coming, 8) > adaptive_timeout_s(steady, 8)


def test_a_break_counts_half_after_a_day():
    once = PauseHistory().after(0.3 * HOUR, 0)
    assert once == PauseHistory(breaks=1)
    assert once.after(300, 24 * HOUR - 300) == PauseHistory(breaks=0.5, busy_s=24 * HOUR - 300)
    assert once.after(24 * HOUR, 0) == PauseHistory(breaks=1.5)
    assert once.after(600, 0).breaks < 1  # not a break yet


def test_after_a_long_cell_the_owner_stays_away():
    assert adaptive_timeout_s(PauseHistory(busy_s=5 * HOUR), 8) < adaptive_timeout_s(
        PauseHistory(busy_s=60), 8
    )


def test_the_more_a_session_holds_the_sooner_it_is_lent_within_bounds():
    assert adaptive_timeout_s(PauseHistory(), 8) < adaptive_timeout_s(PauseHistory(), 4)
    assert adaptive_timeout_s(PauseHistory(), 0.25) == 4 * HOUR
    assert adaptive_timeout_s(PauseHistory(), 64) == 600
    assert adaptive_timeout_s(PauseHistory(), 8, price_gpu_s=20_000) < adaptive_timeout_s(PauseHistory(), 8)


def test_a_session_with_a_timeout_of_its_own_keeps_to_it():
    assert eligible_at(build("nb", 500, "0", idle_s=0, idle_timeout_s=77.0), cluster().settings) == NOW + 77


def test_few_cells_are_delayed_and_nearly_all_idle_time_can_be_lent(tmp_path):
    """With a job waiting at all times; the best fixed timeout per size lends 94.0 % of the public trace."""
    path = traces.public(NOTEBOOKS) if traces.FOLDER else traces.made_up(NOTEBOOKS, tmp_path)
    cells, delayed, idle, lent = 0, 0, 0.0, 0.0
    for session in read_cells(path):
        first = session.cells[0]
        past, end = PauseHistory(), first.submit_at
        for cell in session.cells:
            pause_s = max(0.0, cell.submit_at - end)
            beyond_s = pause_s - adaptive_timeout_s(past, session.gpus)
            cells, delayed, idle = cells + 1, delayed + (beyond_s > 0), idle + pause_s * session.gpus
            lent += max(0.0, beyond_s) * session.gpus
            past = past.after(pause_s, cell.duration_s)
            end = max(end, cell.submit_at + cell.duration_s)
    assert delayed / cells <= 0.075
    # Made-up pauses are shorter: log-normal, and none lasts a night.
    assert lent / idle >= (0.944 if traces.FOLDER else 0.2)
    assert not traces.FOLDER or cells == 30_909
