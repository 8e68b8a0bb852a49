"""Products of rows with weights, few rows or many, and what rides along: norms, RoPE, activations."""
