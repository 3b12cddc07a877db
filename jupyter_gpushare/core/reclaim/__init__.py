"""Choose which leases to preempt, for which waiting lease, and at what cost."""
