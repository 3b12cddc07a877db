"""Whether a cluster has what sessions need: ``gpushare kube check``, and the start of a broker."""
