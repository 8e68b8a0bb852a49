"""Observation of a gateway: metrics, traces, the console, and the canary."""
