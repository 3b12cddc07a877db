"""pytest plugin: JupyterHub's own tests use our spawner class in place of its own."""

import os

import jupyterhub.spawner

from jupyter_gpushare.hub import GPUShareSimpleSpawner


class Spawner(GPUShareSimpleSpawner):
    """Ours, with a folder of settings for Jupyter Server: as root it starts only when told to."""

    def get_env(self):
        return {**super().get_env(), "JUPYTER_CONFIG_DIR": os.environ["JUPYTER_CONFIG_DIR"]}


jupyterhub.spawner.SimpleLocalProcessSpawner = Spawner
