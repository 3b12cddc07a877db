"""Leases of one machine: files, journal, processes, device states, host memory."""
