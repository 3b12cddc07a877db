"""Checks that a cluster has what sessions need: for ``gpushare kube check`` and the start of a broker."""
