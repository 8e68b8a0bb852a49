"""The MTP head: one whole decoder layer behind the join of a feature and the next token.

Tensors as MiMo names them, `model.mtp_layers.0.*`; the hidden state comes first in the join, and the
embedding at position 0 counts as zeros (MiMo technical report, arXiv 2505.07608, section 3).
"""

from __future__ import annotations

from torch import Tensor, nn

from eyas.train.heads.base import (
    Attend,
    DraftHead,
    Ends,
    Lesson,
    SharedOutput,
    initialise,
    joined,
    rotation,
    soft_cross_entropy,
)
from eyas.train.model import GroupedAttention, LlamaShape, Mlp, Norm


class MtpLayer(nn.Module):
    """Norms, join, decoder layer and final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.token_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.hidden_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = GroupedAttention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)
        self.final_layernorm = Norm(shape.hidden, shape.norm_eps)

    def forward(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embeds, hidden [batch, rows, hidden] -> the state after the final norm, [batch, rows, hidden]."""
        x = self.input_proj(joined(self.hidden_layernorm(hidden), self.token_layernorm(embeds)))
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        x = x + self.self_attn.join(attend(q, k, v))
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed: Tensor = self.final_layernorm(x)
        return normed


class Stack(nn.Module):
    """The place of the layer in MiMo's names."""

    def __init__(self, layer: MtpLayer) -> None:
        super().__init__()
        self.mtp_layers = nn.ModuleList([layer])


class MtpHead(DraftHead):
    """Its state is the hidden state after the final norm: the target's, then its own."""

    def __init__(self, shape: LlamaShape, ends: Ends) -> None:
        """`ends`: the target's, of which it uses the output head, and whose final norm it begins with."""
        super().__init__(shape)
        self.model = Stack(MtpLayer(shape))
        initialise(self)
        self._layer.final_layernorm.weight.data.copy_(ends.gain)
        self.output = SharedOutput(ends)

    @property
    def _layer(self) -> MtpLayer:
        layer = self.model.mtp_layers[0]
        assert isinstance(layer, MtpLayer)
        return layer

    def enter(self, features: Tensor) -> Tensor:
        """They are what the head works on."""
        return features

    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next state of each pair."""
        embeds = embeds * (positions != 0)[..., None]
        state = self._layer(embeds, state, rotation(self.shape, positions), attend)
        return state

    def logits(self, state: Tensor) -> Tensor:
        """By the target's output head."""
        scores: Tensor = self.output(state)
        return scores

    def loss(self, state: Tensor, lesson: Lesson) -> Tensor:
        """The soft cross-entropy."""
        return soft_cross_entropy(self.logits(state), lesson.wanted)
