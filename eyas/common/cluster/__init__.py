"""The members of a cluster: names, addresses, registries, and the roster of workers."""
