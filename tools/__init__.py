"""Rigs of those who work on Eyas: nothing here is installed with it."""
