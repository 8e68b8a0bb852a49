"""What the device path cannot run: models whose equations or sizes no kernel of it computes, by name.

It knows specifications and the kernels' limits as numbers; it refuses to know torch.
"""

from __future__ import annotations

from eyas.engine.checkpoint.config import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
    Norms,
)

HEAD_DIMS = (16, 32, 64, 128, 256)
SIDE = 16
"""Of the smallest matrix instruction: all sides of a product are multiples of it."""

PARTS = {LatentSpec: "latent attention", ExpertsSpec: "experts"}
"""What users call the parts of a layer that no kernel computes."""


def refusal(config: ModelConfig, outputs: int) -> str:
    """What of a model, or of one rank's share of it, no kernel computes, by name; "": everything is computed.

    `outputs`: rows of the output head that the rank has.
    """
    if type(config) is not ModelConfig:
        return f"a model that is a {type(config).__name__}"
    if config.fp8_blocks:
        return "weights in FP8 blocks"
    sizes = {"hidden_size": config.hidden_size, "vocabulary rows": outputs}
    for layer in config.layers:
        if why := _layer_refusal(layer):
            return why
        sizes["intermediate_size"] = layer.feed_forward.width
        for name, size in sizes.items():
            if size % SIDE:
                return f"{name} {size} (a multiple of {SIDE} is needed)"
    return ""


def _layer_refusal(layer: LayerSpec) -> str:
    known = {"attention": AttentionSpec, "feed_forward": FeedForwardSpec, "norms": Norms}
    for part, kind in known.items():
        found = type(getattr(layer, part))
        if found is not kind:
            return PARTS.get(found) or f"layers whose {part.replace('_', '-')} is a {found.__name__}"
    norms, attention, mlp = layer.norms, layer.attention, layer.feed_forward
    if attention.head_dim not in HEAD_DIMS:
        return f"heads of {attention.head_dim} ({', '.join(map(str, HEAD_DIMS))} are served)"
    if mlp.activation not in ("silu", "gelu_tanh"):
        return f"the activation {mlp.activation}"
    if not norms.before_feed_forward:
        return "layers whose feed-forward reads rows without a norm"
    if bool(norms.after_attention) != bool(norms.after_feed_forward):
        return "layers with a norm after one of their halves"
    return ""
