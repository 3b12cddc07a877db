"""Rules for Kubernetes with KAI-Scheduler: what leases need from it, and what they do with its grants.

Each lease that needs capacity has a *seat*: a pod of ours that carries the GPU request, and that KAI
places and evicts.  `demands` returns the seat that each lease needs now, `reconcile` the changes to the
existing seats, and `follow` the actions of leases because of their seats.  KAI decides about capacity:
these rules choose neither a device nor a victim.
"""
