"""Access to the operating system: processes, memory, cgroups, containers, device files.

Imports nothing of the leases.
"""
