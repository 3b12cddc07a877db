"""Everything of Kubernetes: the engine that follows KAI-Scheduler, the spawner, seats, checks and verbs.

* `rules` decides which seat each lease needs and what follows from what KAI granted; pure, like `core`.
* `cluster` talks to the API server and to the device helpers of nodes.
* `engine` is the broker's engine: it asks `rules` and changes what is in `cluster`.
* `broker` puts these together from the traits of `settings`.
* `spawner` makes servers of pods, `pod` what a lease changes in one.
* `checks` examines a cluster, `command_line` is ``gpushare kube``.
* `node` runs on nodes: seats, the canary, the kubelet's list of pods.

No module outside imports this package.  They find it by name (`jupyter_gpushare.find_kube`), so that an
installation without this folder serves one machine.
"""
