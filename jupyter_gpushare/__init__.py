"""JupyterHub on shared GPUs: fractions that hold, idle GPUs that are lent, nothing lost."""

__version__ = "0.1.0.dev0"
