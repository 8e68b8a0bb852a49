"""Limits of callers: keys, quotas, and their turns where much waits."""
