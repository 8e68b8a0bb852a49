"""Memory of GPUs that several processes map: the driver's calls, and how allocations are handed over."""
