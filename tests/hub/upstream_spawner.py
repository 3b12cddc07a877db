"""A pytest plugin with which JupyterHub's own tests use our spawner class."""

import os

import jupyterhub.spawner

from jupyter_gpushare.hub import GPUShareSimpleSpawner


class Spawner(GPUShareSimpleSpawner):
    """Our spawner, with a settings folder that lets Jupyter Server start as root."""

    def get_env(self):
        return {**super().get_env(), "JUPYTER_CONFIG_DIR": os.environ["JUPYTER_CONFIG_DIR"]}


jupyterhub.spawner.SimpleLocalProcessSpawner = Spawner
