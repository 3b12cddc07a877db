"""Check a site's own spawner class: ``python -m jupyter_gpushare.hub.contract CONFIG``.

The command reads a JupyterHub configuration and checks its ``c.JupyterHub.spawner_class`` on made-up
servers.  It starts nothing, and neither the Hub nor the broker has to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyterhub.app import JupyterHub
from jupyterhub.spawner import LocalProcessSpawner, Spawner
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from jupyter_gpushare.core.model import Kind
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub import distinct
from jupyter_gpushare.hub.process import JobGrace
from jupyter_gpushare.hub.spawner import GPUShareMixin
from jupyter_gpushare.protocol.wire import JobSpec, SpawnGrant

_ENVIRONMENT = {"GPUSHARE_LEASE": "contract-1", "CUDA_VISIBLE_DEVICES": "GPU-1"}


def breaches(spawner_class: type, config: Any) -> Iterator[str]:
    """Yield each breach of the contract by a class, with its remedy."""
    if not issubclass(spawner_class, GPUShareMixin) or not issubclass(spawner_class, Spawner):
        name = spawner_class.__name__
        yield f"{name} gives no GPUs: write `class X(GPUShareMixin, {name})`."
        return
    try:
        spawner = distinct.sample(spawner_class, config, "")
    except Exception as error:
        yield f"{spawner_class.__name__} cannot be made with this configuration: {error}."
        return
    if complaint := distinct.check_class(spawner_class, config):
        yield complaint
    try:
        spawner.certificate()
    except GpuShareError as error:
        yield f"The broker cannot be verified: {error}."
        return
    for name in ("start", "get_env", "get_args", "run_post_stop_hook", "poll"):
        if not _reaches_mixin(spawner_class, name):
            yield (
                f"{spawner_class.__name__}.{name} does not reach GPUShareMixin: put the mixin before the "
                f"spawner class, and call super().{name} in classes before it."
            )
    if issubclass(spawner_class, LocalProcessSpawner) and not issubclass(spawner_class, JobGrace):
        yield (
            f"{spawner_class.__name__} kills training jobs before their grace period is over: write "
            "`class X(GPUShareMixin, JobGrace, ...)`, with JobGrace from jupyter_gpushare.hub."
        )
    for check in (_environment, _arguments, _uid):
        yield from check(lambda server: distinct.sample(spawner_class, config, server))


def _reaches_mixin(spawner_class: type, name: str) -> bool:
    """Return whether every class before the mixin that defines a method uses ``super`` in it."""
    for each in spawner_class.__mro__:
        method = each.__dict__.get(name)
        if each is GPUShareMixin:
            return True
        if method is not None and "super" not in method.__code__.co_names:
            return False
    return True


def _environment(create: Callable[[str], Any]) -> Iterator[str]:
    spawner = create("")
    if spawner.get_env().get("CUDA_VISIBLE_DEVICES") != "":
        yield "get_env shows GPUs to a server without a lease: CUDA_VISIBLE_DEVICES must be empty."
    spawner.take_grant(SpawnGrant(lease="contract-1", kind=Kind.BUILD, env=_ENVIRONMENT, devices=["GPU-1"]))
    found = spawner.get_env()
    lost = sorted(name for name, value in _ENVIRONMENT.items() if found.get(name) != value)
    if lost:
        yield f"get_env loses variables of a lease: {', '.join(lost)}; return what super().get_env() has."


def _arguments(create: Callable[[str], Any]) -> Iterator[str]:
    spawner = create("j0123456789-1")
    job = JobSpec(id="0123456789", attempt=1, name="n", command=["true"], cwd=None, env={}, grace_s=1.0)
    spawner.take_grant(
        SpawnGrant(lease="contract-1", kind=Kind.TRAIN, env=_ENVIRONMENT, devices=["GPU-1"], job=job)
    )
    # The lease is there for the device helper, which reads command lines.
    if arguments := [each for each in spawner.get_args() if not each.startswith("GPUSHARE_LEASE=")]:
        yield f"get_args gives a training job arguments of a notebook server: {arguments}."


def _uid(create: Callable[[str], Any]) -> Iterator[str]:
    try:
        uid = create("").server_uid()
    except Exception as error:
        if not hasattr(error, "jupyterhub_message"):  # a refusal for the user is allowed
            yield f"server_uid fails: {error!r}."
        return
    if type(uid) is not int or uid < 0:
        yield f"server_uid returns {uid!r}, not the number of the user that the server's processes run as."


def load(path: Path) -> Config:
    """Return the configuration that a file sets.

    Raises:
        FileNotFoundError: the file does not exist.
        Exception: the code in the file raises it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    loaded: Config = PyFileConfigLoader(path.name, str(path.parent.absolute())).load_config()
    return loaded


def hub_of(config: Config) -> JupyterHub:
    """Return a Hub with this configuration; it is not started."""
    return JupyterHub(config=config)


def main(path: str) -> int:
    """Return the exit code of the command line: 0 when the class keeps the contract."""
    hub = hub_of(load(Path(path)))
    found = list(breaches(hub.spawner_class, hub.config))
    for line in found:
        print(line)
    if not found:
        print(f"{hub.spawner_class.__name__} keeps the contract.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
