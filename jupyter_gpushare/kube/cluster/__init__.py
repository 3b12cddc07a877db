"""Kubernetes: a client of its API, the objects that we keep there, and the engine's view of them."""
