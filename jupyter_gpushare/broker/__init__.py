"""The broker: the one process that decides, remembers and answers.

* It starts in `app`, restarted by `respawn`, as `policy` was configured.
* It decides in `loop`: a `snapshot` for `core.plan`, and `effects` for what was planned.
  `balance` and `lending` keep count between rounds; `forecast` looks ahead beside them.
* It remembers in `book`: `records` on disk (`store`, `tables`, `migrations`), measurements
  (`live`, `machine`) beside them, the log (`decisions`) and sums of use (`usage`).
* It answers through `handlers` (`access` says who asks, `listener`, `peers` and `rates` keep
  bounds): `spawning` for the Hub, `desk` for people and jobs (`job_request`), within `terms`.
* What it shows comes from `views`: `moment` works it out, `facts` are for sentences, `history`
  and `overview` look back, `pages` is the page for admins, `metrics` and `openapi` are for machines.
"""
