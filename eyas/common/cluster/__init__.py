"""Who is in a cluster: names, addresses, registries, and the roster of workers."""
