"""DeepSeek-V2 and V3 (R1, V3.1; Kimi-K2): latent attention, and experts above the first, dense layers."""

from __future__ import annotations

from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint import values
from eyas.engine.checkpoint.config import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.models import keys

METHODS: dict[str, tuple[str, int]] = {
    "greedy": ("softmax", 0),
    "group_limited_greedy": ("softmax", 1),
    "noaux_tc": ("sigmoid", 2),
}
"""Of each topk_method: the scores, and how many of a group's best say how good it is (0: no groups)."""


def describe(raw: values.Raw, folder: Path) -> ModelConfig:
    """`q_lora_rank` null is a projection of one matrix. Of V2 the routing is softmax, of V3 sigmoid.

    `attention_bias` stands for biases of the products before the inner norms, and of o.
    """
    if raw.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"config.json of {folder}: moe_layer_freq {raw['moe_layer_freq']} is not supported")
    return keys.decoder(raw, folder, layers(raw, latents(raw), _experts(raw)))


def layers(raw: values.Raw, attention: AttentionSpec, experts: ExpertsSpec) -> list[LayerSpec]:
    """One per layer, of which the first, by `first_k_dense_replace`, are dense."""
    first, dense = values.whole(raw, "first_k_dense_replace"), keys.feed_forward(raw)
    return [LayerSpec(attention, experts if i >= first else dense) for i in range(keys.count(raw))]


def latents(raw: values.Raw) -> LatentSpec:
    """Scores are widened by yarn's factor twice, once for queries and once for keys; cos and sin are not."""
    scaling = keys.rope_scaling(raw)
    rope = keys.read_rope(raw, scaling)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    plain, rotated, latent = (values.whole(raw, name, least=1, most=keys.MOST_HEADS) for name in names)
    widened = keys.yarn_scale(rope.factor, values.number(scaling, "mscale_all_dim", 0.0))
    bias = values.switch(raw, "attention_bias", False)
    return LatentSpec(
        num_heads=values.whole(raw, "num_attention_heads", least=1, most=keys.MOST_HEADS),
        num_kv_heads=1,
        head_dim=latent + rotated,
        rope=rope,
        scale=(plain + rotated) ** -0.5 * widened**2,
        kv_rank=latent,
        query_rank=0
        if raw["q_lora_rank"] is None
        else values.whole(raw, "q_lora_rank", most=keys.MOST_COLUMNS),
        plain_dim=plain,
        value_dim=values.whole(raw, "v_head_dim", least=1, most=keys.MOST_HEADS),
        adjacent=values.switch(raw, "rope_interleave", True),
        qkv_bias=bias,
        output_bias=bias,
    )


def _experts(raw: values.Raw) -> ExpertsSpec:
    """The experts; what a config.json of transformers leaves out follows from the version."""
    newer = raw["architectures"][0] == "DeepseekV3ForCausalLM"
    method = raw.get("topk_method") or ("noaux_tc" if newer else "greedy")
    scoring = raw.get("scoring_func")
    if not isinstance(method, str) or method not in METHODS or scoring not in (None, METHODS[method][0]):
        raise ConfigError(f"topk_method {method!s:.60} with scoring_func {scoring!s:.60} is not supported")
    normalised = values.switch(raw, "norm_topk_prob", newer)
    if normalised and not newer:
        raise ConfigError("norm_topk_prob of DeepSeek-V2 is not supported")
    return _chosen_by(method, raw, normalised=normalised)


def corrected_experts(raw: values.Raw) -> ExpertsSpec:
    """DeepSeek-V3's, of a family whose config.json has some of its keys, and no name for the method."""
    usual = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    normalised = values.switch(raw, "norm_topk_prob", False)
    return _chosen_by("noaux_tc", usual | dict(raw), normalised=normalised)


def _chosen_by(method: str, raw: values.Raw, *, normalised: bool) -> ExpertsSpec:
    scores, best = METHODS[method]
    width = keys.width_of(raw, "moe_intermediate_size")
    return ExpertsSpec(
        width=width,
        activation=keys.feed_forward(raw).activation,
        experts=values.whole(raw, "n_routed_experts", most=keys.MOST_HEADS),
        per_row=values.whole(raw, "num_experts_per_tok"),
        scores=scores,
        normalised=normalised,
        scale=values.number(raw, "routed_scaling_factor"),
        corrected=method == "noaux_tc",
        groups=values.whole(raw, "n_group") if best else 1,
        topk_groups=values.whole(raw, "topk_group") if best else 1,
        group_best=best or 1,
        shared_width=width * values.whole(raw, "n_shared_experts", 0, most=keys.MOST_LAYERS),
    )
