"""Start-up: an engine is specified, measured, loaded, put together and warmed here."""
