"""Backends carry out decisions: `base` has the contracts, `local` drives one machine, `hub` the Hub."""
