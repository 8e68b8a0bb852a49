"""Models: one file each, built from the shared blocks of `eyas.engine.layers`."""
