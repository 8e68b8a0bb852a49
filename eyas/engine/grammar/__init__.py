"""Grammars in the engine: compiled beside the step loop, followed by each sequence, told as masks."""
