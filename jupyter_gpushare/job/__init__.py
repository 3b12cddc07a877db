"""The job runner, which a training job's server runs instead of a notebook server.

The Hub's spawner starts ``python -m jupyter_gpushare.job`` with the environment of a
single-user server and ``GPUSHARE_JOB`` (`wire.JobSpec`).  `runner` describes the order of
events, `protocol.jobfiles` the files of a job.  `progress` and `callbacks` are for the
user's program.
"""

from jupyter_gpushare.job.callbacks import KerasProgress as KerasProgress
from jupyter_gpushare.job.callbacks import LightningProgress as LightningProgress
from jupyter_gpushare.job.callbacks import TransformersProgress as TransformersProgress
