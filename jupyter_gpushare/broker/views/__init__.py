"""Read models: what pages, the API and sentences show about the cluster."""
