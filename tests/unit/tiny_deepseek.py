"""DeepSeek models with every branch of the family and weights that hide no mistake, stored by transformers.

Default weights (gains 1, correction 0, deviation 0.02) make most mistakes invisible: a wrong rotation, scale
or norm then moves logits by less than rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.tiny_mtp import nextn_prefix

Tensors = dict[str, torch.Tensor]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
RAGGED: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2560,
    "rope_interleave": True,
    "rope_parameters": YARN,
    "num_nextn_predict_layers": 0,
    "eos_token_id": None,
}
"""Sides that are no multiples of a block of 128: 160 rows of kv_a, 192 columns of q_b."""

WHOLE = RAGGED | {
    "vocab_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
"""The published sizes of a head."""

SMALL = RAGGED | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
"""As quick as other tests' models."""


def write_tiny_deepseek(folder: Path, sizes: dict[str, Any] = SMALL, shift: float = 0.0) -> Any:
    """Stores a DeepSeek-V3; gives transformers' model, float32, eager. `shift`: added to every correction."""
    model = _random(sizes, shift)
    model.save_pretrained(folder)
    return model


def write_tiny_nextn_deepseek(folder: Path, sizes: dict[str, Any] = SMALL) -> tuple[Any, Any, Tensors]:
    """The same with a NextN layer like its last, and its copies of both ends, behind the model's own.

    Gives transformers' model; a model of it that is the NextN layer alone, with the norm behind it and the
    same output head; and what joins: enorm [hidden], hnorm [hidden], eh_proj [hidden, 2 * hidden].
    """
    target = write_tiny_deepseek(folder, sizes)
    dense = int(sizes["first_k_dense_replace"] == sizes["num_hidden_layers"])
    layer = _random(sizes | {"num_hidden_layers": 1, "first_k_dense_replace": dense}, seed=1)
    return target, layer, add_nextn(folder, target, layer)


def add_nextn(folder: Path, target: Any, layer: Any) -> Tensors:
    """Stores a model's only layer as the NextN layer of the folder's `target`; gives what joins.

    The model's output head becomes the target's.
    """
    layer.lm_head.weight = target.lm_head.weight
    layer.save_pretrained(folder / "layer")
    parts, prefix = load_file(folder / "layer" / "model.safetensors"), nextn_prefix(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {n.replace("model.layers.0", prefix): t for n, t in parts.items() if ".layers.0." in n}
    hidden, generator = target.config.hidden_size, torch.Generator().manual_seed(2)
    join = {name: torch.rand(hidden, generator=generator) + 0.5 for name in ("enorm", "hnorm")}
    join["eh_proj"] = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    shared = {"shared_head.norm": parts["model.norm.weight"], "shared_head.head": stored["lm_head.weight"]}
    shared["embed_tokens"] = stored["model.embed_tokens.weight"]
    stored |= {f"{prefix}.{name}.weight": tensor.clone() for name, tensor in (join | shared).items()}
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    return join


def _random(sizes: dict[str, Any], shift: float = 0.0, seed: int = 0) -> Any:
    config = transformers.DeepseekV3Config(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                wider = 2.0 if ".q_b_proj." in name or ".kv_b_proj." in name else 1.0
                weight.normal_(std=wider * weight.shape[-1] ** -0.5)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=0.3).add_(shift)
    return model


FEW = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
V3 = SMALL | FEW | {"vocab_size": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1}
