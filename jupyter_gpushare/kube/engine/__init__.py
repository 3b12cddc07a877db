"""The engine that follows KAI-Scheduler.

* `following` asks the rules what leases do because of what KAI granted.
* `changing` makes and deletes seats, so that they are those that leases need.
* `starting` admits a session: its seat, until that is connected, and its units.
* `outlook` answers why leases wait and what is free; `kai` puts all together.
"""
