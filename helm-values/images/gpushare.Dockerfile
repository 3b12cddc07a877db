# Broker, device helpers and seats: docker build -f images/gpushare.Dockerfile DIST, where DIST has the wheel of `make build`.
FROM python:3.13-slim
COPY jupyter_gpushare-*.whl /tmp/
RUN pip install --no-cache-dir jupyterhub==5.5.0 "$(ls /tmp/jupyter_gpushare-*-manylinux*_$(uname -m).whl)[kube,node,postgres]"
# Helpers and seats call the driver; the image never chooses GPUs.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Runs as root, because the driver lets only root suspend processes of other users.  The chart runs the broker as
# another user.
ENTRYPOINT ["gpushare"]
