# Servers and jobs: docker build -f images/lab.Dockerfile DIST, where DIST has the wheel of `make build`.
# You can use any image with JupyterLab 4, the Hub's version of JupyterHub, and this package for the Python of
# `python3`, from which a job imports jupyter_gpushare.job.  The image needs no CUDA: the runtime provides the
# driver, and frameworks bring the rest.
ARG BASE=quay.io/jupyter/base-notebook:latest
FROM ${BASE}
COPY --chown=${NB_UID} jupyter_gpushare-*.whl /tmp/
RUN pip install --no-cache-dir jupyterhub==5.5.0 /tmp/jupyter_gpushare-*-manylinux*_$(uname -m).whl
