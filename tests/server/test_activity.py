from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from traitlets import HasTraits, Unicode

from jupyter_gpushare.server.activity import MAX_KERNELS, Runs, Seen, is_due, look, report_of

NOW = datetime(2031, 5, 6, 14, 0, tzinfo=UTC)


def kernels(**busy: bool):
    """A kernel manager with a kernel per keyword, each last active a minute ago."""
    found = {
        name: SimpleNamespace(
            execution_state="busy" if is_busy else "idle",
            last_activity=NOW - timedelta(minutes=1),
            kernel_name="python3",
        )
        for name, is_busy in busy.items()
    }
    return SimpleNamespace(list_kernel_ids=lambda: list(found), get_kernel=found.__getitem__)


def seen(*, terminals: int = 0, at: datetime = NOW, **busy: bool) -> Seen:
    return Seen(tuple((name, is_busy, at, "python3", 0) for name, is_busy in busy.items()), terminals)


def test_report_says_what_each_kernel_does_and_how_long_it_is_idle():
    report = report_of(look(kernels(a=False, b=True), None, Runs()), {"a": "deep/train.ipynb"}, NOW)
    by_id = {kernel.id: (kernel.busy, kernel.idle_s, kernel.name) for kernel in report.kernels}
    assert by_id == {"a": (False, 60.0, "deep/train.ipynb"), "b": (True, 0.0, "python3")}


def test_clock_set_back_makes_no_negative_idle_time():
    report = report_of(look(kernels(a=False), None, Runs()), {}, NOW - timedelta(hours=1))
    assert report.kernels[0].idle_s == 0.0


def test_of_too_many_kernels_the_busy_ones_are_reported():
    many = {f"k{n:04}": n == 999 for n in range(1_000)}
    found = look(kernels(**many), None, Runs())
    assert len(found.kernels) == MAX_KERNELS
    assert found.any_busy()


def test_terminals_are_counted():
    terminals = SimpleNamespace(list=lambda: [{"name": "1"}, {"name": "2"}])
    assert look(kernels(), terminals, Runs()).terminals == 2


def test_first_look_and_every_minute_are_reported():
    assert is_due(seen(), None, 0)
    assert not is_due(seen(), seen(), 59)
    assert is_due(seen(), seen(), 60)


def test_turning_busy_or_idle_or_going_is_reported_at_once():
    assert is_due(seen(a=True), seen(a=False), 0.1)
    assert is_due(seen(a=False), seen(a=True), 0.1)
    assert is_due(seen(), seen(a=False), 0.1)


def test_cell_between_two_looks_a_terminal_and_a_busy_kernel_wait_five_seconds():
    later = seen(a=False, at=NOW + timedelta(seconds=2))
    for now, before in [
        (later, seen(a=False)),
        (seen(terminals=1), seen()),
        (seen(a=True), seen(a=True)),
    ]:
        assert not is_due(now, before, 4.9)
        assert is_due(now, before, 5)


def test_idle_kernel_alone_is_no_reason_to_report():
    assert not is_due(seen(a=False), seen(a=False), 30)


class Kernel(HasTraits):
    execution_state = Unicode("busy")
    last_activity = NOW
    kernel_name = "python3"


def test_another_cell_of_a_busy_kernel_is_reported_at_once():
    kernel, runs, listed = Kernel(), Runs(), ["k"]
    manager = SimpleNamespace(list_kernel_ids=lambda: listed, get_kernel=lambda _: kernel)
    first = look(manager, None, runs)
    kernel.execution_state = "idle"
    kernel.execution_state = "busy"
    second = look(manager, None, runs)
    assert is_due(second, first, 0.1)
    assert report_of(second, {}, NOW).kernels[0].runs == 2  # it was busy when it was first seen
    assert not is_due(look(manager, None, runs), second, 0.1)
    listed.clear()
    assert look(manager, None, runs).kernels == ()
    kernel.execution_state = "idle"
    kernel.execution_state = "busy"  # counted no more: it has ended
    assert runs._counts == {}
