"""The client of ``kubernetes_asyncio``, imported without the package's models and APIs.

Importing any module of the package also imports its 700 models and 60 APIs.  They take 55 MiB and 1.4 s
(version 36.1), half of what a broker takes, and the broker uses none of them: it reads JSON.  So three
packages are empty stand-ins while the modules below are imported.  Afterwards all modules are removed from
`sys.modules`, so that other code in this process can import the complete package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["ApiClient", "Configuration", "KubeConfigLoader", "KubeConfigMerger", "remove_files"]

_ROOT = "kubernetes_asyncio"


@contextmanager
def _without_models() -> Iterator[None]:
    found = importlib.util.find_spec(_ROOT)
    if found is None or not found.submodule_search_locations:
        yield  # the import raises the error
        return
    folder, before = found.submodule_search_locations[0], _remove_modules()
    for part in ("", ".client", ".client.models"):
        module = sys.modules[_ROOT + part] = ModuleType(_ROOT + part)
        module.__path__ = [folder + part.replace(".", "/")]
    try:
        yield
    finally:
        _remove_modules()
        sys.modules.update(before)


def _remove_modules() -> dict[str, ModuleType]:
    """Remove the package and its modules from `sys.modules`, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == _ROOT]
    return {name: sys.modules.pop(name) for name in names}


with _without_models():
    from kubernetes_asyncio import client
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration

    vars(client).update(ApiClient=ApiClient, Configuration=Configuration)
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger
    from kubernetes_asyncio.config.kube_config import _cleanup_temp_files as remove_files
