"""One machine's devices: inventory, samples, limits, suspend and resume.

Runs in the device helper, beside the NVIDIA driver.  It knows leases by name
only and no project, and imports nothing but the standard library, ``pynvml`` and
``psutil``, so that it runs on a bare GPU machine.
"""
