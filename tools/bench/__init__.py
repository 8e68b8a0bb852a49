"""Measurements of a gateway alone, and of the benchmark's own client."""
