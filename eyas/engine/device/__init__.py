"""A target engine's steps on one device, one step ahead of the host: tables, steps, graphs."""
