"""Chooses the worker of a request: what is known of the workers, and the policies over it."""
