"""Command lines of other servers: their flags, and what each means here."""
