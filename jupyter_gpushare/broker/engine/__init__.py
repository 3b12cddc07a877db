"""The seam to a scheduler: the contract, the outlook on one snapshot, and the engine of one machine."""
