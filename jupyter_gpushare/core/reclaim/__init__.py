"""Choose which leases to preempt for a waiting lease, and compute the cost."""
