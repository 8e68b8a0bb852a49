"""Decoders that have no file here: transformers computes them, over Eyas' pages."""
