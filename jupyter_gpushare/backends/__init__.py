"""Carry out decisions: `base` has the contracts, `local` the devices of one machine, `hub` the Hub."""
