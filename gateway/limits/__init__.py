"""What callers may use: keys, quotas, and their turns where much waits."""
