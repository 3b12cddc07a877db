"""Mutants: one line of the product changed, to see whether the tests notice (`make mutants`)."""
