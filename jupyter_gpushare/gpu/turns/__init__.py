"""Shares of compute time: which lease of a device may launch when."""
