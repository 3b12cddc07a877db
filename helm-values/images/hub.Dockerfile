# The Hub of the chart with our spawner: docker build -f images/hub.Dockerfile DIST, where DIST has the wheel of `make build`.
FROM quay.io/jupyterhub/k8s-hub:4.4.0
USER root
COPY jupyter_gpushare-*.whl /tmp/
# All packages of the image keep their versions, except tornado, where a newer version has a fix.
RUN pip freeze | grep -v '^tornado==' > /tmp/kept.txt \
 && pip install --no-cache-dir -c /tmp/kept.txt "$(ls /tmp/jupyter_gpushare-*-manylinux*_$(uname -m).whl)[kube]"
USER 1000
