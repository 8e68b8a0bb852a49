"""Kernels one by one, each beside what this machine's memory and arithmetic allow: `eyas bench kernels`."""
