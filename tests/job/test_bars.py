"""The progress of a job from the bars that libraries print: the share of its whole work, or none."""

from __future__ import annotations

import time

import pytest

from jupyter_gpushare.job.bars import Bars

STEPS = "it/s"


def line(done: float | str, total: float | str, rate: str = STEPS, name: str = "") -> str:
    """A bar as tqdm draws it."""
    return f"{name}  5%|█▌        | {done}/{total} [00:10<00:12,  4.50{rate}]"


def tqdm(total: int, rate: str = STEPS, name: str = "") -> str:
    """A bar from its start to its end, left on the screen."""
    return "".join(f"\r{line(n, total, rate, name)}" for n in range(total + 1)) + "\n"


def inner(total: int, *, stays: bool = False) -> str:
    """A bar below another one; one that stays overwrites that at its end."""
    drawn = "".join(f"\n\r{line(n, total)}\x1b[A" for n in range(total + 1))
    return drawn + (f"\r{line(total, total)}\n" if stays else f"\n\r{' ' * 40}\x1b[A")


def fast(epoch: int, epochs: int, steps: int) -> str:
    """An epoch of fastprogress."""
    bars = (f"\rEpoch {epoch}/{epochs} : |██--| 50.00% [{n}/{steps} 00:00<00:00]" for n in range(steps + 1))
    return f"█\b█\b\r{''.join(bars)}\rEpoch {epoch}/{epochs} :      \r"


def keras(steps: int) -> str:
    """The steps of an epoch of Keras 3, or of an evaluation or a prediction."""
    bar = "\x1b[32m━━\x1b[0m\x1b[37m━━━\x1b[0m \x1b[1m4s\x1b[0m 200ms/step - loss: 0.7900"
    return "".join(f"\r\x1b[1m{n:2}/{steps}\x1b[0m {bar}" for n in range(1, steps + 1)) + "\n"


def shown(printed: str, *, every: int = 1 << 20, step_s: float = 0.0) -> list[tuple[float, float] | None]:
    """What is read after each piece, without repetitions."""
    bars, found = Bars(), []
    data = printed.encode()
    for at in range(0, len(data), every):
        bars.feed(data[at : at + every], at * step_s)
        if not found or found[-1] != bars.progress:
            found.append(bars.progress)
    return found


OUTER = "".join(f"\r{line(n, 4)}{inner(3)}" for n in range(5)) + f"\r{line(4, 4)}\n"
FOLD = f"\r{line(0, 5)}Epoch 1/3\n{keras(20)}Epoch 2/3\n{keras(20)}Epoch 3/3\n{keras(20)}"
CASES = {
    "one": (tqdm(60), (60, 60)),
    "one with text between": (f"\r{line(1, 9)}\nloss 0.1\n\r{line(2, 9)}", (2, 9)),
    "a line without an end": (f"\r{line(45, 100)}", (45, 100)),
    "no rate": ("\r 1%| | 1/9 [00:01<?]\r 22%|##  | 2/9 [00:02<00:07]", (2, 9)),
    "seconds per step": (f"\r{line(3, 9, 's/it')}", (3, 9)),
    "thousands of steps": (f"\r{line('1.2k', '10.0k', 'kit/s')}", (1200, 10000)),
    "with a loss": ("\r10%|#| 1/10 [00:01<00:09, 1.00s/it, loss=0.1, at=[1, 2]]", (1, 10)),
    "epochs as unit": (f"\r{line(3, 9, ' epochs/s')}", (3, 9)),
    "bytes": (tqdm(20, "GB/s"), None),
    "bytes that are counted": (f"\r{line('1.56G', '2.60G', 'GB/s')}", None),
    "bytes without a rate": ("\r50%|#####     | 1.30G/2.60G [00:10<00:10]", None),
    "examples": (tqdm(20, " examples/s"), None),
    "seconds per example": (f"\r{line(3, 9, 's/ examples')}", None),
    "tokens": (tqdm(20, "tokens/s"), None),
    "no total": ("\r45it [00:10,  4.50it/s]", None),
    "more than all": ("\r|####| 9/3 [00:01<00:00]", None),
    "no time": ("\r|####| 2/3 [a]", None),
    "no bar": ("epoch 3/10 [loss 0.1]\nEpoch 3/10\nstep 3 of 10\n", None),
    "no text": ("\x00", None),
    "download, data set, training": (tqdm(26, "GB/s") + tqdm(30, " examples/s") + OUTER, (4, 4)),
    "training, then an upload": (tqdm(9) + tqdm(20, "MB/s"), (9, 9)),
    "an epoch each": (tqdm(20) * 3, None),
    "epochs and validation": ((tqdm(20) + tqdm(5)) * 3, None),
    "a different bar at the end": (tqdm(20) + tqdm(5), None),
    "inside": (OUTER, (4, 4)),
    "inside, and stays": (f"\r{line(1, 4)}{inner(3, stays=True)}\r{line(2, 4)}", (2, 4)),
    "inside, and as long as the outer one": (f"\r{line(1, 4)}{inner(4, stays=True)}\r{line(2, 4)}", None),
    "inside, in the same line": (
        "".join(f"\r{line(n, 4)}{tqdm(3)}" for n in range(3)) + f"\r{line(3, 4)}",
        (3, 4),
    ),
    "at once, in the same line": ("".join(f"\r{line(n, 40)}\r{line(n, 30)}" for n in range(9)), None),
    "folds around epochs": (FOLD, None),
    "folds around epochs, the second": (FOLD + f"\r{line(1, 5)}Epoch 1/3\n{keras(20)}\r", (1, 5)),
    "predictions inside epochs": (f"Epoch 1/3\n{keras(20)}{tqdm(9)}", None),
    "predictions inside epochs that go on": (f"Epoch 1/3\n{keras(20)}{tqdm(9)}Epoch 2/3\n", (1, 3)),
    "a program that crashed, and another": (f"\r{line(5, 9)}Traceback\n{tqdm(7)}", None),
    "over a line that was cleared": (f"\r{line(2, 3)}\r{' ' * 40}\r\r{line(1, 9)}\n", None),
    "inside what counts bytes": (f"\r{line(1, 4, 'MB/s')}{inner(3)}\r{line(2, 4, 'MB/s')}", None),
    "inside twice": (f"\r{line(1, 4)}\n\n\r{line(1, 3)}\x1b[A\x1b[A\r{line(2, 4)}", (2, 4)),
    "several processes": (
        "".join(f"\r{line(n, 90)}\r{line(max(0, n - 1), 90)}" for n in range(31)),
        (30, 90),
    ),
    "progressbar2": (
        "  0% (0 of 40) |    | Elapsed Time: 0:00:00\n  8% (3 of 40) |##  | ETA: 0:01:00\n",
        (3, 40),
    ),
    "alive-progress": ("|████████| 40/40 [100%] in 0.8s (49.63/s) \n", (40, 40)),
    "rich": ("Training ━━━━━━━━━━━━ 100% 0:00:00\nepochs ━━━━━━━━━━ 30/30 0:00:00\n", None),
    "fastprogress": (fast(1, 3, 10) + "epoch 0 done\n" + fast(2, 3, 10), (2, 3)),
    "fastprogress with validation": (fast(1, 3, 10) + fast(1, 3, 3) + fast(2, 3, 10), (1, 3)),
    "fastprogress twice": (fast(1, 1, 10) * 2, None),
    "fastprogress without epochs": ("\r|██--| 50.00% [5/10 00:01<00:01]\r", (5, 10)),
    "keras": (
        "Epoch 1/3\n" + keras(20) + "Epoch 2/3\n" + keras(20).partition("\r\x1b[1m11/")[0] + "\n",
        (1.5, 3),
    ),
    "keras 2": ("Epoch 2/3\n 5/20 [=====>...............] - ETA: 4s - loss: 0.7\b\b\b\r", (1.25, 3)),
    "keras in short": ("Epoch 1/3\n20/20 - 4s - loss: 0.7\nEpoch 2/3\n", (1, 3)),
    "keras, predictions between": ("Epoch 1/3\n" + keras(20) + keras(7) + "Epoch 2/3\n" + keras(20), (1, 3)),
    "keras, an evaluation at the end": (
        "".join(f"Epoch {n}/3\n{keras(20)}" for n in (1, 2, 3)) + keras(9),
        (3, 3),
    ),
    "keras, a second fit": (
        "Epoch 1/3\n" + keras(20) + "Epoch 2/3\n" + keras(20) + "Epoch 1/3\n" + keras(20),
        None,
    ),
    "keras, only a prediction": (keras(20), None),
    "epochs from 0": ("Epoch 0/24\n" + keras(20), None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("every", [1 << 20, 64, 7, 1])
def test_what_a_bar_shows_does_not_depend_on_how_the_output_is_cut(case: str, every: int) -> None:
    printed, right = CASES[case]
    assert shown(printed, every=every)[-1] == right


def test_an_inner_bar_never_replaces_the_outer_one() -> None:
    """Nor does it withdraw it for a moment, wherever the output is cut."""
    for every in range(1, 90):
        assert [each for each in shown(OUTER, every=every) if each is not None and each[1] != 4] == []
        assert shown(OUTER, every=every)[1:].count(None) == 0


def test_a_bar_counts_while_it_runs_and_is_withdrawn_when_another_one_follows() -> None:
    assert shown(tqdm(3) + tqdm(2), every=1)[1:] == [(0, 3), (1, 3), (2, 3), (3, 3), None]


def test_a_bar_after_others_counts_once_it_has_run_three_times_as_long() -> None:
    """A bar of loading, 4 s; then the training, a step each second."""
    bars, at_s = Bars(), 0.0

    def see(done: int, total: int) -> tuple[float, float] | None:
        nonlocal at_s
        bars.feed(f"\r{line(done, total)}".encode(), at_s)
        at_s += 1.0
        return bars.progress

    assert [see(n, 3) for n in range(4)] == [(n, 3) for n in range(4)]
    training = [see(n, 100) for n in range(100)]
    # A line that is not ended may yet be one below.
    assert training == [(3, 3), *[None] * 13, *((n, 100) for n in range(14, 100))]
    # Epochs of equal bars never last longer than those before them, nor does what is between.
    later = {see(n, total) for _ in range(9) for total in (20, 5) for n in range(total + 1)}
    assert later == {None, (99, 100)}


@pytest.mark.parametrize(
    "piece", [b"\r", b"x", b"\x1b[A\x1b[", b"| 1/2 [00:", b"|        ", b"\ra/b", b"\r| 1/2 [00:01<00:01]"]
)
def test_memory_and_work_are_bounded(piece: bytes) -> None:
    """Of 4 MiB of anything, and of 20,000 single bytes of a line without an end."""
    bars, data = Bars(), piece * ((64 << 10) // len(piece))
    began_at = time.process_time()
    for _ in range(64):
        bars.feed(data, 0.0)
    for _ in range(20_000):
        bars.feed(piece[:1], 0.0)
    assert time.process_time() - began_at < 20
    assert len(bars._rest) <= 2048


def test_a_program_with_a_thousand_bars_is_remembered_in_part() -> None:
    printed = (
        "".join(f"\r{line(1, 5000)}\n\r{line(1, n)}\x1b[A" for n in range(2, 1000)) + f"\r{line(2, 5000)}"
    )
    bars = Bars()
    bars.feed(printed.encode(), 0.0)
    assert bars.progress == (2, 5000)
    assert len(bars._ignored) <= 64


@pytest.mark.parametrize(
    ("printed", "read"),
    [
        (b"\rEpoch 1/10:  80%|####  | 80/100 [00:10<00:02, 9.00it/s]", None),
        (b"Epoch 1/10\n\r  80%|####  | 80/100 [00:10<00:02, 9.00it/s]", None),
        (b"Epoch 0/9\n----------\n\r  80%|####  | 80/100 [00:10<00:02, 9.00it/s]\n", None),
        (b"Epoch [1/10]\n\r  80%|####  | 80/100 [00:10<00:02, 9.00it/s]\n", None),
        (b"\rEpoch 2/10:  20%|####  | 2/10 [00:10<00:02, 9.00s/it]", (2.0, 10.0)),
        (b"Epoch 1/1\n\r  80%|####  | 80/100 [00:10<00:02, 9.00it/s]", (80.0, 100.0)),
        (b"Epoch 1/3\n 1/20 \xe2\x94\x81 4s 200ms/step\nEpoch 9/3\n", (0.05, 3.0)),
        (b"\rExecuting:  50%|####  | 5/10 [00:10<00:02, 9.00s/cell]", (5.0, 10.0)),
    ],
)
def test_a_bar_of_one_of_many_epochs_is_no_progress(printed: bytes, read: tuple[float, float] | None) -> None:
    bars = Bars()
    bars.feed(printed, 0.0)
    assert bars.progress == read
