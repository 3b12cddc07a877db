"""Inside JupyterHub: the spawners and the size picker of the spawn page.

`GPUShareMixin` goes before any spawner class of the site:
``class X(GPUShareMixin, SystemdSpawner)``; `JobGrace` beside it goes before one of local processes.
"""

from jupyter_gpushare.hub.local import GPUShareLocalSpawner, GPUShareSimpleSpawner
from jupyter_gpushare.hub.process import JobGrace
from jupyter_gpushare.hub.spawner import GPUShareMixin

__all__ = ["GPUShareLocalSpawner", "GPUShareMixin", "GPUShareSimpleSpawner", "JobGrace"]
