"""The mixer of a layer of Kimi Delta Attention (arXiv 2510.26692): its tensors, and its equation.

The delta rule with a decay for each element of a key. Decays, and the gates of what heads read, are products
of two factors, the first of which is in the product of queries, keys and values.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from eyas.engine.formats.projection import ProjectionT
from eyas.engine.layers.activations import softplus
from eyas.engine.layers.norm import Gain
from eyas.engine.layers.routing import sigmoid
from eyas.engine.models.delta_mixer import convolution
from eyas.engine.models.ops import recurrent
from eyas.engine.models.ops.base import Ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.shape import ChannelShape


class ChannelMixer(Generic[ProjectionT]):
    """A `Mixer`, whose tensors are those below `prefix`. `gain`: as of `DecoderLayer`."""

    def __init__(
        self, blocks: Blocks[ProjectionT], shape: ChannelShape, prefix: str, gain: Gain | None
    ) -> None:
        weights, heads, rank = blocks.weights, shape.value_heads, shape.rank
        keys, values = shape.key_heads * shape.key_size, heads * shape.value_size
        counts = {"q": keys, "k": keys, "v": values, "b": heads, "f": rank, "z": rank}
        names = [f"{prefix}.in_proj_{part}.weight" for part in counts]
        width = blocks.config.hidden_size if gain is None else gain.shape[0]
        self._first = blocks.loader(names).rows(names, list(counts.values()), width)
        self.norm = None if gain is None else blocks.norm_before(gain, self._first)
        sizes = {"f_b_proj": heads * shape.key_size, "g_b_proj": values}
        self._decays, self._gates = (
            blocks.loader([name]).whole(name, (size, rank))
            for name, size in ((f"{prefix}.{part}.weight", size) for part, size in sizes.items())
        )
        rate = weights.take(f"{prefix}.A_log", (1, 1, heads, 1), torch.float32).exp().neg()
        self._rates = rate.flatten().repeat_interleave(shape.key_size)
        self._bias = weights.take(f"{prefix}.dt_bias", (heads * shape.key_size,), torch.float32)
        self._gain = weights.take(f"{prefix}.norm.weight", (shape.value_size,))
        self._rule = DeltaRule(shape, convolution(weights, shape, prefix, "weight"))

    @property
    def projections(self) -> tuple[ProjectionT, ...]:
        """Its weights."""
        return self._first, self._decays, self._gates

    def attend(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> torch.Tensor:
        """-> what heads read of their states, normed and times the gate's sigmoid, [m, heads * size]."""
        shape = self._rule.shape
        counts = (shape.inputs, shape.value_heads, self._decays.shape[1], self._gates.shape[1])
        made = ops.product(read, self._first).split(counts, 1)
        inputs, shares, decays, gates = (part.contiguous() for part in made)
        steps = softplus(ops.product_of(decays, self._decays).float() + self._bias)
        numbers = torch.cat((steps * self._rates, sigmoid(shares.float())), 1)
        read_of_states = ops.recur(inputs, numbers, self._rule, layer)
        weights = sigmoid(ops.product_of(gates, self._gates).float())
        normed = recurrent.normed_heads(read_of_states, self._gain, ops.eps)
        return weights.mul_(normed).to(inputs.dtype)

    def keep(self, read: Any, layer: int, ops: Ops[Any, Any, Any]) -> None:
        """Keeps the rows."""
        self.attend(read, layer, ops)
