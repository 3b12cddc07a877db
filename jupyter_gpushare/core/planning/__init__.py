"""Rounds: `scheduler` has the rules of one, `sharing` adds guests, `planner` plans round after round."""
