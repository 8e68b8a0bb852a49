"""Models and draft heads: a file for each family, a line in a table, and a decoder that runs them all."""
