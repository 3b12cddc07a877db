"""Suspend and resume leases: steps, device memory for a restore, wake-up, guests, evictions."""
