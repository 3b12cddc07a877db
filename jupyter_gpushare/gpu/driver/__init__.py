"""Calls into the NVIDIA driver: NVML, CUDA checkpoint, time limits, enforcement levels."""
