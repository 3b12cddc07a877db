from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from jupyter_gpushare.server.activity import Sample, is_due, report_of, take_sample
from jupyter_gpushare.server.ends import Ended, Ends
from jupyter_gpushare.server.kernels import MAX_KERNELS, Kernels, KernelState

NOW = 1_000.0
IDLE = KernelState("a", "python3", last_cell_at=NOW - 60)
BUSY = replace(IDLE, runs_cell=True, handles_request=True, cells=1)


NO_KERNELS = SimpleNamespace(list_kernel_ids=list)


def watched(*states: KernelState) -> SimpleNamespace:
    """What stands for `Kernels`: it has found ``states``."""
    return SimpleNamespace(sample=lambda _: list(states))


def seen(*states: KernelState, terminals: int = 0) -> Sample:
    return Sample(states, terminals)


def test_report_says_what_each_kernel_does_and_how_long_ago_its_last_cell_ended():
    asks = replace(IDLE, id="c", handles_request=True)
    found = take_sample(NO_KERNELS, None, watched(IDLE, replace(BUSY, id="b"), asks), Ends())
    report = report_of(found, {"a": "deep/train.ipynb"}, NOW)
    assert {
        each.id: (each.busy, each.handles_request, each.idle_s, each.name) for each in report.kernels
    } == {
        "a": (False, False, 60.0, "deep/train.ipynb"),
        "b": (True, True, 0.0, "python3"),
        "c": (False, True, 60.0, "python3"),
    }


def test_of_too_many_kernels_those_that_run_a_cell_are_reported():
    many = [replace(IDLE, id=f"k{n:04}") for n in range(999)]
    found = take_sample(NO_KERNELS, None, watched(*many, replace(BUSY, id="z")), Ends())
    assert len(found.kernels) == MAX_KERNELS
    assert found.any_busy()


def test_terminals_are_counted():
    terminals = SimpleNamespace(list=lambda: [{"name": "1"}, {"name": "2"}])
    assert take_sample(NO_KERNELS, terminals, Kernels(), Ends()).terminals == 2


def test_first_look_and_every_minute_are_reported():
    assert is_due(seen(), None, 0)
    assert not is_due(seen(), seen(), 59)
    assert is_due(seen(), seen(), 60)


def test_what_changes_the_state_of_a_kernel_is_reported_at_once():
    changes = [
        (seen(BUSY), seen(IDLE)),
        (seen(IDLE), seen(BUSY)),
        (seen(), seen(IDLE)),
        (seen(replace(BUSY, cells=2)), seen(BUSY)),
        (seen(replace(IDLE, handles_request=True)), seen(IDLE)),
    ]
    for now, before in changes:
        assert is_due(now, before, 0.1)


def test_cell_between_two_looks_a_terminal_and_a_busy_kernel_wait_five_seconds():
    for now, before in [
        (seen(replace(IDLE, cells=1, last_cell_at=NOW)), seen(IDLE)),
        (seen(terminals=1), seen()),
        (seen(BUSY), seen(BUSY)),
    ]:
        assert not is_due(now, before, 4.9)
        assert is_due(now, before, 5)


def test_idle_kernel_alone_is_no_reason_to_report():
    assert not is_due(seen(IDLE), seen(IDLE), 30)


def test_the_end_of_a_kernel_is_reported_at_once_and_only_once():
    killed = Ended("a", "died", -9, NOW - 4)
    reported = Sample((), 0, (killed,))
    assert is_due(reported, seen(), 0.1)
    assert not is_due(reported, reported, 30)
    (end,) = report_of(reported, {"a": "train.ipynb"}, NOW, seen()).ended
    assert (end.id, end.how, end.code, end.ago_s, end.name) == ("a", "died", -9, 4.0, "train.ipynb")
    assert report_of(reported, {}, NOW, reported).ended == []
    assert report_of(reported, {}, NOW).ended  # the last report was not accepted


def test_a_report_says_when_a_setting_may_end_a_kernel():
    found = Sample((IDLE, replace(IDLE, id="b")), 0, ends_in_s={"b": 90.5})
    assert [each.ends_in_s for each in report_of(found, {}, NOW).kernels] == [None, 90.5]
    later = replace(found, ends_in_s={"b": 80.5})
    assert not is_due(later, found, 30)  # time goes on for the broker too
