"""Decide who gets which GPU: model, quota, order, placement, plan, replay.

This package takes values and returns values.  It has no I/O, clock, log or configuration, so the broker and
the simulator run the same rules.
"""
