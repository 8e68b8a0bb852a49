"""Rounds, rows and sums that go between GPUs, or between a GPU and a host."""
