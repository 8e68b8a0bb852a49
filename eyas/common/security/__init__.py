"""API keys and TLS: where they come from and what they prove."""
