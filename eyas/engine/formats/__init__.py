"""Formats of weights: a file each, behind one interface."""
