"""Speculation: drafters, the trees that they grow, and the verdict on them."""
