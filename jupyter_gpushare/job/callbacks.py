"""Callbacks that report the progress of a training.  Standard library only.

    from jupyter_gpushare.job import LightningProgress
    trainer = Trainer(callbacks=[LightningProgress()])

Each function returns an object of its library's callback class.  The program must have imported the
library; this module does not import it.  Only the first process reports: once a second, and at the start
and the end of each epoch.  The callbacks never fail a training, and do nothing outside a job.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from jupyter_gpushare.job.progress import progress

_EVERY_S = 1.0
# Variables in which launchers give a process its rank, for libraries that do not provide it.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK")


def LightningProgress() -> Any:
    """Return a callback for a Trainer of ``lightning`` or ``pytorch_lightning``.

    It reports epochs of ``max_epochs`` or steps of ``max_steps``, whichever ends the training first.

    Raises:
        ImportError: the program has imported neither library.
    """
    # A Trainer takes only callbacks of its own package, and a program may have imported both.
    found = (_base("lightning.pytorch", "Callback"), _base("pytorch_lightning", "Callback"))
    bases = tuple(base for base in found if base is not None)
    return _class(_Lightning, bases or _missing("lightning or pytorch_lightning"), LightningProgress)()


def TransformersProgress() -> Any:
    """Return a callback for a Trainer of ``transformers``; it reports ``global_step`` of ``max_steps``.

    Raises:
        ImportError: the program has not imported ``transformers``.
    """
    base = _base("transformers", "TrainerCallback")
    return _class(_Transformers, (base or _missing("transformers"),), TransformersProgress)()


def KerasProgress() -> Any:
    """Return a callback for ``fit`` of ``keras`` or ``tf_keras``; it reports epochs and parts of them.

    Raises:
        ImportError: the program has imported neither library.
    """
    found = (getattr(sys.modules.get(name), "callbacks", None) for name in ("keras", "tf_keras"))
    base = next(filter(None, (getattr(each, "Callback", None) for each in found)), None)
    return _class(_Keras, (base or _missing("keras"),), KerasProgress)()


class _Reporter:
    """Reports progress at most every `_EVERY_S`, except ``at_once``."""

    _reported_at = -math.inf
    _reported = (0.0, 0.0)

    def _report(self, done: float, total: float, *, at_once: bool = False) -> None:
        now = time.monotonic()
        # Hooks that run in threads may be called out of order.
        goes_back = total == self._reported[1] and done < self._reported[0]
        if not at_once and (goes_back or now - self._reported_at < _EVERY_S):
            return
        self._reported_at, self._reported = now, (done, total)
        progress(done, total)


class _Lightning(_Reporter):
    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._report_progress(trainer, 0.0, at_once=True)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        with suppress(Exception):
            batches = trainer.num_training_batches
            self._report_progress(trainer, (batch_idx + 1) / batches if batches else 0.0)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._report_progress(trainer, 1.0, at_once=True)

    def _report_progress(self, trainer: Any, of_epoch: float, *, at_once: bool = False) -> None:
        with suppress(Exception):
            if not trainer.is_global_zero:
                return
            epochs, steps = trainer.max_epochs or 0, trainer.max_steps or 0
            by_epochs = (trainer.current_epoch + min(1.0, of_epoch)) / epochs if epochs > 0 else 0.0
            by_steps = min(1.0, trainer.global_step / steps) if steps > 0 else 0.0
            total = steps if steps > 0 else epochs
            if total > 0:
                self._report(max(by_epochs, by_steps) * total, total, at_once=at_once)


class _Transformers(_Reporter):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report_progress(state, at_once=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report_progress(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report_progress(state, at_once=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report_progress(state, at_once=True)

    def _report_progress(self, state: Any, *, at_once: bool = False) -> None:
        with suppress(Exception):
            if state.is_world_process_zero and state.max_steps > 0:
                self._report(state.global_step, state.max_steps, at_once=at_once)


class _Keras(_Reporter):
    # Keras need not wait for this callback before the next batch.
    async_safe = True
    params: Any
    _epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_first = all(os.environ.get(name, "0") == "0" for name in _RANKS)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._report_progress(0.0, at_once=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with suppress(Exception):
            steps = self.params.get("steps")
            self._report_progress((batch + 1) / steps if steps else 0.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report_progress(1.0, at_once=True)

    def _report_progress(self, of_epoch: float, *, at_once: bool = False) -> None:
        with suppress(Exception):
            if self._is_first:
                self._report(self._epoch + min(1.0, of_epoch), self.params["epochs"], at_once=at_once)


def _base(module: str, name: str) -> type | None:
    """Return a class of a library; None if the program has not imported the library."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _missing(libraries: str) -> Any:
    raise ImportError(f"import {libraries} first: this callback is made for it and does not import it")


@cache
def _class(hooks: type, bases: tuple[type, ...], maker: Callable[[], Any]) -> type:
    """Return the callback class for a library; its objects are pickled as a call of ``maker``."""
    return type(
        maker.__name__, (hooks, *bases), {"__doc__": maker.__doc__, "__reduce__": lambda _: (maker, ())}
    )
