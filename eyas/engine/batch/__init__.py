"""The nouns of a step: sequences, their rows, drafts and pages, and the tables that kernels read."""
