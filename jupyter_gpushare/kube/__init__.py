"""Kubernetes support: the engine that follows KAI-Scheduler, the spawner, seats, checks and commands.

* `rules` decides which seat each lease needs and which actions follow from KAI's grants; pure, like `core`.
* `cluster` talks to the API server and to the device helpers of nodes.
* `engine` is the broker's engine: it applies `rules` and makes changes through `cluster`.
* `broker` builds these parts from the traits of `settings`.
* `spawner` runs servers in pods; `pod` adds to a pod what its lease needs.
* `checks` examines a cluster; `command_line` is ``gpushare kube``.
* `node` runs on nodes: seats, the canary, the kubelet's list of pods.

No module outside imports this package.  `jupyter_gpushare.find_kube` finds it by name, so an installation
without this folder still serves one machine.
"""
