"""Durable state and observations: registry, store, records, policy, usage."""
