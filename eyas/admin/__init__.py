"""What an operator makes before a server starts: API keys, and certificates for its services."""
