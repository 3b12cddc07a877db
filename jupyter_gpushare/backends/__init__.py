"""Carries decisions out.  `base` is the contract, `local` one machine without a cluster manager."""
