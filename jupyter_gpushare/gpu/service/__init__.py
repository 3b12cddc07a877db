"""The device helper process: verbs, sampler, socket server."""
