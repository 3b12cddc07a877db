# Servers and jobs: docker build -f images/lab.Dockerfile DIST, where DIST has the wheel of `make build`.
# Any image of yours will do that has JupyterLab 4, the Hub's version of JupyterHub, and this package in the python
# that `python3` is; a job imports jupyter_gpushare.job from it.  Needs no CUDA: the runtime brings the driver, and
# frameworks bring the rest.
ARG BASE=quay.io/jupyter/base-notebook:latest
FROM ${BASE}
COPY --chown=${NB_UID} jupyter_gpushare-*.whl /tmp/
RUN pip install --no-cache-dir jupyterhub==5.5.0 /tmp/jupyter_gpushare-*-manylinux*_$(uname -m).whl
