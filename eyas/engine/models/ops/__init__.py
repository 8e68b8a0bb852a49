"""The verbs of a layer on a GPU, and the ways to compute them."""
