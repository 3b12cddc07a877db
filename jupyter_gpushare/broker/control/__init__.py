"""The control loop and everything that changes state: effects, sessions, sizes, jobs."""
