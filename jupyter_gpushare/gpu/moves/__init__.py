"""Suspend and resume the GPU state of a lease: steps, device memory for a restore, wake-up."""
