"""Priorities of requests: how far they reach, and what one is worth. Lower is earlier, as in vLLM."""

MOST_PRIORITY = 100  # and the least is its negative
PRIORITY_S = 1.0
"""Seconds of waiting that one unit is worth: so none waits for ever behind those that count more."""
