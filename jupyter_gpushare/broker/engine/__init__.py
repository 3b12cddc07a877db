"""The seam to a scheduler: its contract, the outlook on one snapshot, and the engine of one machine."""
