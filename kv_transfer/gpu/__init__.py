"""Memory of GPUs that several processes map: the driver's calls, allocations, and how they are handed over."""
