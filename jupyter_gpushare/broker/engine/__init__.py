"""The seam to a scheduler: what the broker asks, what is known about a snapshot, and the engine of one machine."""
