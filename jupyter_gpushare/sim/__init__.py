"""Replay traces with the scheduler of the broker, and measure the result.

`core.planning.planner` decides, as in the broker.  `traces` reads files, `synthetic`
generates load, `scenario` replays it, `metrics` measures it, `report` prints the
figures, and `run` is the command line.
"""
