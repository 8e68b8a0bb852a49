"""Attention over latents (DeepSeek): absorbed and expanded, and the rows between its products."""
