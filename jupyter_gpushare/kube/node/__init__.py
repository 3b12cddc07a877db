"""What runs on a node: seats, the canary, and the kubelet's list of pods for the device helper.

Like `jupyter_gpushare.gpu` it needs the standard library and the driver only; `pod_resources` also gRPC.
"""
