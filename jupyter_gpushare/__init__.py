"""JupyterHub on shared GPUs: fractions that hold, idle GPUs that are lent, nothing lost."""

from __future__ import annotations

from importlib import import_module as _load
from typing import Any

__version__ = "0.1.0"


def progress(done: float, total: float | None = None) -> bool:
    """Report the progress of a training job, in any unit; return whether the report was delivered.

    Training programs call this; outside a job it does nothing.  It imports nothing heavy.

    Raises:
        ValueError: a number is negative or not finite.
    """
    return bool(_load("jupyter_gpushare.job.progress").progress(done, total))


def load_ipython_extension(shell: Any) -> None:
    """Register ``%gpu``, ``%gpujob`` and ``%%gpujob``; the first use of one imports them."""
    for name in ("gpu", "gpujob"):
        shell.magics_manager.register_lazy(name, "jupyter_gpushare.cli.magics")
