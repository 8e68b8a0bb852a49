"""Blocks that models are made of: linear, norm, rotary, attention, SwiGLU."""
