"""The client of ``kubernetes_asyncio`` without its classes for every object and every part of the API.

Importing any module of that package imports its 700 models and 60 APIs too: 55 MiB and 1.4 s (36.1), half of
what a broker takes.  The broker reads JSON and uses none of them.  So three packages are empty stand-ins
while the modules below are imported.  They leave `sys.modules` afterwards: whoever else imports
``kubernetes_asyncio`` in this process gets all of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["ApiClient", "Configuration", "load_kube_config"]

_ROOT = "kubernetes_asyncio"


@contextmanager
def _without_models() -> Iterator[None]:
    found = importlib.util.find_spec(_ROOT)
    if found is None or not found.submodule_search_locations:
        yield  # the import says what is missing
        return
    folder, before = found.submodule_search_locations[0], _taken_out()
    for part in ("", ".client", ".client.models"):
        module = sys.modules[_ROOT + part] = ModuleType(_ROOT + part)
        module.__path__ = [folder + part.replace(".", "/")]
    try:
        yield
    finally:
        _taken_out()
        sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
    """Remove the package and its modules from those that are imported, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == _ROOT]
    return {name: sys.modules.pop(name) for name in names}


with _without_models():
    from kubernetes_asyncio import client
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration

    vars(client).update(ApiClient=ApiClient, Configuration=Configuration)
    from kubernetes_asyncio.config.kube_config import load_kube_config
