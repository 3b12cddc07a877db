"""The part inside JupyterHub: the spawners, and the size picker of the spawn page.

A site puts `GPUShareMixin` before its own spawner class: ``class X(GPUShareMixin, SystemdSpawner)``.
A class that runs local processes also needs `JobGrace`, after the mixin.
"""

from jupyter_gpushare.hub.local import GPUShareLocalSpawner, GPUShareSimpleSpawner
from jupyter_gpushare.hub.process import JobGrace
from jupyter_gpushare.hub.spawner import GPUShareMixin

__all__ = ["GPUShareLocalSpawner", "GPUShareMixin", "GPUShareSimpleSpawner", "JobGrace"]
