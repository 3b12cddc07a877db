"""Replay a trace against the policy: files in, figures out.

`core.planner` decides, as in the broker.  `traces` reads files, `synthetic`
generates load, `scenario` replays it, `metrics` measures, `report` prints, `run`
is the command line.
"""
