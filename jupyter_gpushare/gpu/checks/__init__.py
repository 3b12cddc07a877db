"""Checks of devices and processes: self-tests, health, watchdog."""
