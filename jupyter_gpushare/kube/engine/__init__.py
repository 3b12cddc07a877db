"""The engine that follows KAI-Scheduler.

* `following` applies the rules: it turns KAI's grants into actions of leases.
* `changing` creates and deletes seats until they are the seats that leases need.
* `starting` admits a session: it waits for a connected seat, then for the units.
* `outlook` answers why leases wait and what is free; `kai` combines these parts.
"""
