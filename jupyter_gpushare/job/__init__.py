"""The job runner: what a training job's server runs instead of a notebook server.

``python -m jupyter_gpushare.job`` is started by the Hub's spawner with the
environment of a single-user server and ``GPUSHARE_JOB`` (`wire.JobSpec`).
`runner` tells the order of things, `jupyter_gpushare.protocol.jobfiles` where the log is, `progress` is for
the user's own program.
"""
