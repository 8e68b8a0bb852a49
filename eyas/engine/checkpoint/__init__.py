"""Reads a model's folder: its configuration, and its tensors on their way to a device."""
