"""Layers with a state: the gated delta rule behind its convolution, for few rows and for prompts."""
