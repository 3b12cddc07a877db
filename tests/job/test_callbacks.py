"""The callbacks for trainers, with what calls them; `test_trainers.py` has the real libraries."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.job import KerasProgress, LightningProgress, TransformersProgress, callbacks

Told = list[tuple[float, float]]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    return clock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Told:
    reports: Told = []
    monkeypatch.setattr(callbacks, "progress", lambda done, total: reports.append((done, total)))
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return reports


def library(monkeypatch: pytest.MonkeyPatch, module: str, name: str = "Callback") -> type:
    """Put a library with one class for callbacks where a program has imported it."""
    made = ModuleType(module)
    base = type(name, (), {})
    setattr(made, name, base)
    package, _, part = module.partition(".")
    if part == "callbacks":  # an attribute of the package, whatever module it comes from
        vars(made)["callbacks"] = made
        module = package
    monkeypatch.setitem(sys.modules, module, made)
    return base


def lightning(**now: Any) -> Any:
    """A trainer of 2 epochs with 4 batches each."""
    usual = {"is_global_zero": True, "max_epochs": 2, "max_steps": -1, "num_training_batches": 4}
    return SimpleNamespace(**{**usual, "current_epoch": 0, "global_step": 0, **now})


@pytest.mark.parametrize("maker", [KerasProgress, LightningProgress, TransformersProgress])
def test_a_library_that_is_not_imported_is_named_and_stays_so(maker: Any) -> None:
    before = set(sys.modules)
    with pytest.raises(ImportError, match=r"^import .* first"):
        maker()
    assert set(sys.modules) == before


def test_a_callback_is_one_of_each_lightning_that_the_program_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = library(monkeypatch, "pytorch_lightning")
    assert isinstance(LightningProgress(), old)
    new = library(monkeypatch, "lightning.pytorch")
    both = LightningProgress()
    assert isinstance(both, old)
    assert isinstance(both, new)
    assert type(both) is type(LightningProgress())
    assert type(both).__name__ == "LightningProgress"
    assert type(pickle.loads(pickle.dumps(both))) is type(copy.deepcopy(both)) is type(both)


def test_lightning_reports_epochs_at_once_and_batches_once_a_second(
    monkeypatch: pytest.MonkeyPatch, told: Told, clock: Clock
) -> None:
    library(monkeypatch, "lightning.pytorch")
    callback = LightningProgress()
    callback.on_train_start(lightning(), None)
    for batch in range(4):
        clock.now += 0.4
        callback.on_train_batch_end(lightning(), None, None, None, batch)
    callback.on_train_epoch_end(lightning(), None)
    assert told == [(0, 2), (0.75, 2), (1, 2)]


@pytest.mark.parametrize(
    ("now", "right"),
    [
        ({"max_epochs": None, "max_steps": 100, "global_step": 25}, (25, 100)),
        ({"max_epochs": 10, "max_steps": 100, "global_step": 25, "current_epoch": 9}, (92.5, 100)),
        ({"max_epochs": 10, "current_epoch": 3, "num_training_batches": float("inf")}, (3, 10)),
        ({"max_epochs": 10, "current_epoch": 3, "num_training_batches": 0}, (3, 10)),
        ({"max_epochs": -1}, None),
        ({"max_epochs": None, "max_steps": None}, None),
        ({"is_global_zero": False}, None),
        ({"global_step": "?", "max_steps": 3}, None),
    ],
)
def test_what_lightning_reports_of_limits_and_ranks(
    monkeypatch: pytest.MonkeyPatch, told: Told, now: dict[str, Any], right: Any
) -> None:
    library(monkeypatch, "lightning.pytorch")
    LightningProgress().on_train_batch_end(lightning(**now), None, None, None, 0)
    assert told == ([] if right is None else [pytest.approx(right)])


def test_transformers_reports_steps_from_the_first_process(
    monkeypatch: pytest.MonkeyPatch, told: Told, clock: Clock
) -> None:
    assert library(monkeypatch, "transformers", "TrainerCallback") in type(TransformersProgress()).__mro__

    def train(**state: Any) -> None:
        callback = TransformersProgress()
        usual = {"global_step": 0, "max_steps": 40, "is_world_process_zero": True}
        now = SimpleNamespace(**{**usual, **state})
        assert callback.on_train_begin(None, now, None, model=None) is None
        for _ in range(2):
            clock.now += 0.7
            now.global_step += 1
            assert callback.on_step_end(None, now, None) is None
        callback.on_epoch_end(None, now, None)
        callback.on_train_end(None, now, None)

    train()
    assert told == [(0, 40), (2, 40), (2, 40), (2, 40)]
    told.clear()
    train(is_world_process_zero=False)
    train(max_steps=0)
    train(max_steps=None)
    assert told == []


def keras(**params: Any) -> Any:
    callback = KerasProgress()
    callback.params = {"epochs": 3, "steps": 20, **params}
    callback.on_train_begin()
    return callback


def test_keras_reports_epochs_with_the_part_of_the_present_one(
    monkeypatch: pytest.MonkeyPatch, told: Told, clock: Clock
) -> None:
    library(monkeypatch, "keras.callbacks")
    callback = keras()
    callback.on_epoch_begin(1)
    for batch in (4, 9, 8):  # threads may come in another order
        clock.now += 1.0
        callback.on_train_batch_end(batch)
    callback.on_epoch_end(1, {"loss": 0.1})
    assert told == [(1, 3), (1.25, 3), (1.5, 3), (2, 3)]


def test_keras_without_steps_reports_epochs_and_another_rank_nothing(
    monkeypatch: pytest.MonkeyPatch, told: Told, clock: Clock
) -> None:
    library(monkeypatch, "tf_keras.callbacks")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        callback = keras(steps=None)
        callback.on_epoch_begin(0)
        clock.now += 1.0
        callback.on_train_batch_end(7)
        callback.on_epoch_end(0)
    broken = KerasProgress()
    broken.on_epoch_begin(0)
    broken.on_train_batch_end(0)
    assert told == [(0, 3), (0, 3), (1, 3)]
