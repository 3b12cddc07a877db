"""Scheduling rounds: `scheduler` has the rules, `sharing` adds guests, `planner` runs one round per plan."""
