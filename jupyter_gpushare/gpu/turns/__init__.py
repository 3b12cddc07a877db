"""Shares of compute time: which lease of a device launches when."""
