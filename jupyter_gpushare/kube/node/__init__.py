"""The parts that run on a node: seats, the canary, and the kubelet's list of pods for the device helper.

Like `jupyter_gpushare.gpu` they need only the standard library and the driver; `pod_resources` also
needs gRPC.
"""
