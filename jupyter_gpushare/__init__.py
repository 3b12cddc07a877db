"""JupyterHub on shared GPUs: fractions that hold, idle GPUs that are lent, nothing lost."""

from __future__ import annotations

from importlib import import_module as _load
from typing import Any

__version__ = "0.1.0"


def progress(done: float, total: float | None = None) -> bool:
    """Report how far a training job is, in any unit; True when it was taken.

    For training programs; outside a job nothing happens.  Nothing heavy is imported.

    Raises:
        ValueError: a number that is negative or not finite.
    """
    return bool(_load("jupyter_gpushare.job.progress").progress(done, total))


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook ``%gpu``, ``%gpujob`` and ``%%gpujob``; imported by the first that is used."""
    for name in ("gpu", "gpujob"):
        shell.magics_manager.register_lazy(name, "jupyter_gpushare.cli.magics")
