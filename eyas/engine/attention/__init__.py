"""Attention over the paged pool: one seam (`base`), one backend a file."""
