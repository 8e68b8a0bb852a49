"""Grammars in the engine: compiled beside the step loop, followed by each sequence, told as masks.

Logits are masked where tokens are chosen: in `eyas.engine.sampling.processors`, and on a GPU in
`eyas.engine.kernels.sampling.special`.
"""
