"""Commands that prepare a server: API keys, and certificates for its services."""
