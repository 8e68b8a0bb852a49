"""Launches kernels, and compiles them before they are needed."""
