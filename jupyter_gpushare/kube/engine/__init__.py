"""The engine that follows KAI-Scheduler: `kai`, the start of a session (`start`), answers (`outlook`)."""
