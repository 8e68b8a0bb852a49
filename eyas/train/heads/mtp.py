"""The MTP head: one whole decoder layer behind the join of a feature and the next token.

Tensors as MiMo names them, `model.mtp_layers.0.*`; the hidden state comes first in the join, and the
embedding at position 0 counts as zeros (MiMo technical report, arXiv 2505.07608, section 3).
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.config import ModelConfig, NormNames
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.layers.rotary import tables
from eyas.train.heads.base import (
    Attend,
    ChainHead,
    DraftHead,
    SharedOutput,
    TargetTensors,
    TrainingBatch,
    initialise,
    joined,
    shape_for,
    soft_cross_entropy,
)
from eyas.train.model import GroupedAttention, LlamaShape, SwigluMlp, TrainedNorm

UNROLL = 4


def taps(target: ModelConfig) -> tuple[int, ...]:
    """Taps none: the feature has passed the final norm."""
    return ()


def head_for(target: ModelConfig, ends: TargetTensors, token_map: Tensor | None) -> MtpHead:
    """A new head, whose layer is of the kind of the target's last one.

    Raises ConfigError, by name, for a layer that no equation here trains.
    """
    layer = target.layers[-1]
    attention = layer.attention
    plain = {
        "norms on heads": not attention.head_norms,
        "a bias of its attention's output": not attention.output_bias,
        "a sliding window": not attention.window,
        "capped scores": not attention.soft_cap,
        "scores with a scale of their own": attention.scale == attention.head_dim**-0.5,
        "norms after its halves": layer.norms == NormNames(),
        "an offset of its norms": not target.norm_offset,
        f"the activation {layer.feed_forward.activation}": layer.feed_forward.activation == "silu",
    }
    if strange := [what for what, holds in plain.items() if not holds]:
        raise ConfigError(f"--target: an MTP head is a layer of its target, and its last has {strange[0]}")
    shape = dataclasses.replace(shape_for(target), qkv_bias=attention.qkv_bias)
    return MtpHead(shape, ends, attention.rope)


def described(head: DraftHead, unroll: int) -> dict[str, object]:
    """The fields of config.json beside the sizes."""
    return {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}


class TrainedMtpLayer(nn.Module):
    """Norms, join, decoder layer and final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.token_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.hidden_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.self_attn = GroupedAttention(shape, shape.hidden)
        self.post_attention_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)
        self.mlp = SwigluMlp(shape.hidden, shape.intermediate)
        self.final_layernorm = TrainedNorm(shape.hidden, shape.norm_eps)

    def forward(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embeds, hidden [batch, rows, hidden] -> the state after the final norm, [batch, rows, hidden]."""
        x = self.input_proj(joined(self.hidden_layernorm(hidden), self.token_layernorm(embeds)))
        q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
        x = x + self.self_attn.join(attend(q, k, v))
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed: Tensor = self.final_layernorm(x)
        return normed


class MimoStack(nn.Module):
    """The place of the layer in MiMo's names."""

    def __init__(self, layer: TrainedMtpLayer) -> None:
        super().__init__()
        self.mtp_layers = nn.ModuleList([layer])


class MtpHead(ChainHead):
    """An MTP head. Its state is the hidden state after the final norm: the target's, then its own."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, ends: TargetTensors, rope: RopeConfig) -> None:
        """`ends`: the target's, of which it uses the output head, and whose final norm it begins with.

        `rope`: the target's, as its layer serves with it.
        """
        super().__init__(shape)
        for name, table in zip(("cos", "sin"), tables(rope, shape.head_dim, shape.context), strict=True):
            self.register_buffer(name, table.repeat(1, 2), persistent=False)
        self.model = MimoStack(TrainedMtpLayer(shape))
        initialise(self)
        self._layer.final_layernorm.weight.data.copy_(ends.gain)
        self.output = SharedOutput(ends)

    @property
    def _layer(self) -> TrainedMtpLayer:
        layer = self.model.mtp_layers[0]
        assert isinstance(layer, TrainedMtpLayer)
        return layer

    def enter(self, features: Tensor) -> Tensor:
        """The features that the head works on."""
        return features

    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next state of each pair."""
        embeds = embeds * (positions != 0)[..., None]
        rope = self.cos[positions][:, None], self.sin[positions][:, None]
        state = self._layer(embeds, state, rope, attend)
        return state

    def logits(self, state: Tensor) -> Tensor:
        """Logits of the target's output head."""
        scores: Tensor = self.output(state)
        return scores

    def loss(self, state: Tensor, lesson: TrainingBatch) -> Tensor:
        """The soft cross-entropy."""
        return soft_cross_entropy(self.logits(state), lesson.target_logits)
