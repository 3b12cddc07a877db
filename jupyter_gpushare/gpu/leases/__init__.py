"""Leases of one machine: their files, journal, processes, devices, seats and reserved host memory."""
