"""Replay traces with the scheduler of the broker, and measure the result.

`core.planning.planner` decides, as in the broker.  `traces` reads files, `synthetic`
generates load, `scenario` replays it, `metrics` measures, `report` prints, `run`
is the command line.
"""
