"""One machine's devices: what they are, what is used, suspend and resume, limits.

This room runs in the device helper, beside the driver.  It knows leases by
name only and no project, and it imports nothing but the standard library,
``pynvml`` and ``psutil``, so that it runs on a bare GPU machine.
"""
