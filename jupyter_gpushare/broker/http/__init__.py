"""The HTTP surface of the broker: routes, pages, access control, metrics, connection limits."""
