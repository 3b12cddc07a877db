"""Kubernetes with KAI-Scheduler: what leases need from it, and what follows from what it granted.

Each lease that needs capacity has a *seat*: a pod of ours that carries the GPU request, and that KAI
places and evicts.  `demands` says which seat each lease needs now; `reconcile` says how the seats
there are differ from that; `follow` says what leases do because of their seats.  KAI decides about
capacity: nothing here chooses a device or a victim.
"""
