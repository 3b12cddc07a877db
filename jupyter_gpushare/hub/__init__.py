"""Inside JupyterHub: the spawners and the size picker of the spawn page.

`GPUShareMixin` goes before any spawner class of the site:
``class X(GPUShareMixin, SystemdSpawner)``.
"""

from jupyter_gpushare.hub.local import GPUShareLocalSpawner, GPUShareSimpleSpawner
from jupyter_gpushare.hub.spawner import GPUShareMixin

__all__ = ["GPUShareLocalSpawner", "GPUShareMixin", "GPUShareSimpleSpawner"]
