"""Find the modules for Kubernetes by name, because an installation for one machine may lack them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from jupyter_gpushare.errors import GpuShareError

PACKAGE = "jupyter_gpushare.kube"


def is_installed() -> bool:
    """Return whether this installation has the folder ``kube``."""
    found = importlib.util.find_spec(PACKAGE)
    return found is not None and found.origin is not None  # a folder with only an old cache has no origin


def find_kube(module: str) -> ModuleType:
    """Return a module of the folder ``kube``, such as ``broker`` or ``node.seat``.

    Raises:
        GpuShareError: the folder, or a package that the module needs, is not installed; the text says what
            to install.
    """
    if not is_installed():
        raise GpuShareError(
            "this installation has no folder jupyter_gpushare/kube, which Kubernetes needs: "
            'pip install --force-reinstall "jupyter-gpushare[kube]"'
        )
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        raise GpuShareError(
            'Kubernetes needs packages that are missing here (%1): pip install "jupyter-gpushare[kube]"',
            error,
        ) from error
