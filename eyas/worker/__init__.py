"""Puts processes together: a worker's front and engine, a gateway process, a local cluster."""
