"""A cluster on one machine: its processes planned, started, kept running and ended."""
