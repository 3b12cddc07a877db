"""The job runner: what a training job's server runs instead of a notebook server.

``python -m jupyter_gpushare.job`` is started by the Hub's spawner with the
environment of a single-user server and ``GPUSHARE_JOB`` (`wire.JobSpec`).
`runner` has the order of events, `protocol.jobfiles` the place of the log; `progress` and
`callbacks` are for the user's own program.
"""

from jupyter_gpushare.job.callbacks import KerasProgress as KerasProgress
from jupyter_gpushare.job.callbacks import LightningProgress as LightningProgress
from jupyter_gpushare.job.callbacks import TransformersProgress as TransformersProgress
