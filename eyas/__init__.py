"""Eyas: a disaggregated server of large language models."""

__version__ = "0.1.0"
