"""Replays a trace against the policy: files in, `core.replay` in between, figures out.

The decisions are `core.plan`'s, the same that the broker carries out; nothing
here decides.  `traces` reads files, `synthetic` makes load, `metrics` measures,
`report` prints, `run` is the command line.
"""
