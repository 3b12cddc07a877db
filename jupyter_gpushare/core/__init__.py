"""Decides: model, quota, order, placement, plan, replay.

No I/O, no clock, no log, no configuration: values in, values out, so that the
broker and the simulator run the very same rules.
"""
