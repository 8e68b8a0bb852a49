"""Random small DFlash heads, in the layouts of their exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.unit.tiny import SeededWeights, write_folder

MASK = 250


def write_tiny_dflash(
    folder: Path,
    target_folder: Path,
    *,
    layers: int = 2,
    block: int = 8,
    reads: tuple[int, ...] = (2, 4, 6),
    draft_vocab: int | None = None,
    speculators: bool = False,
    seed: int = 0,
    **keys: Any,
) -> Path:
    """A head for the target in `target_folder` that drafts block - 1 tokens at once.

    `reads`: the target's layers before which it takes rows. With `draft_vocab` it has an lm_head of its own
    over that many of the target's ids. `speculators`: in the form of that library, else in z-lab's. `keys`:
    more of config.json.
    """
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hidden, ffn, vocab, dim = (
        target[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    heads = {"q": target["num_attention_heads"], "k": target["num_key_value_heads"]}
    random, mask = SeededWeights(seed + 3000), min(MASK, vocab - 6)
    weights = {
        "fc.weight": random.matrix(hidden, len(reads) * hidden),
        "hidden_norm.weight": random.gain(hidden),
        "norm.weight": random.gain(hidden),
    }
    for i in range(layers):
        for part in "qkv":
            rows = heads["q" if part == "q" else "k"] * dim
            weights[f"layers.{i}.self_attn.{part}_proj.weight"] = random.matrix(rows, hidden)
        weights |= {
            f"layers.{i}.self_attn.o_proj.weight": random.matrix(hidden, heads["q"] * dim),
            f"layers.{i}.self_attn.q_norm.weight": random.gain(dim),
            f"layers.{i}.self_attn.k_norm.weight": random.gain(dim),
            f"layers.{i}.input_layernorm.weight": random.gain(hidden),
            f"layers.{i}.post_attention_layernorm.weight": random.gain(hidden),
            f"layers.{i}.mlp.gate_proj.weight": random.matrix(ffn, hidden),
            f"layers.{i}.mlp.up_proj.weight": random.matrix(ffn, hidden),
            f"layers.{i}.mlp.down_proj.weight": random.matrix(hidden, ffn),
        }
    if draft_vocab is not None:
        kept = (
            torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        )
        weights["lm_head.weight"] = random.matrix(draft_vocab, hidden)
        weights["d2t"] = kept - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    layer = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    config: dict[str, Any]
    if speculators:
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": list(reads),
            "draft_vocab_size": draft_vocab or vocab,
            "block_size": block,
            "mask_token_id": mask,
        }
    else:
        own = {"mask_token_id": mask, "target_layer_ids": [layer - 1 for layer in reads]}
        config = {"architectures": ["DFlashDraftModel"], "block_size": block, "dflash_config": own, **layer}
    return write_folder(folder, config | {"torch_dtype": "float32"} | keys, weights)
