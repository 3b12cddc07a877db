"""The broker: the one process that decides, stores and answers.

* `app` reads the configuration and starts everything; `respawn` restarts it when it ends.
* `http` answers requests: `handlers`, `routes` (their table), `pages`, `metrics`; `access` identifies
  callers, `listener` enforces limits.
* `views` turns records and measurements into answers.
* `control` acts: `observer` measures, `loop` decides and reconciles, `effects` carries out;
  `sessions`, `job_starts` and `page_queue` serve the Hub's spawner, `sizes` running servers,
  `own_sessions` the owners of sessions, `requests` people with jobs, and `job_reports` the jobs' runners.
* `engine` is the seam to a scheduler: its `contract`, the `outlook` on a snapshot, and the planner of
  `core` behind both (`local`).
* `state` holds the `registry` of leases and jobs, the database (`store`) and measurements.
"""
