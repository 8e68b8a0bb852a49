"""Random small DFlash heads, in the layouts of their exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.unit.tiny import SeededWeights, write_folder

MASK = 250
BLOCK = 8


def write_tiny_dflash(
    folder: Path,
    target_folder: Path,
    *,
    layers: int = 2,
    reads: tuple[int, ...] = (2, 4, 6),
    draft_vocab: int | None = None,
    speculators: bool = False,
    **keys: Any,
) -> Path:
    """A head for the target in `target_folder` that drafts BLOCK - 1 tokens at once.

    `reads`: the target's layers before which it takes rows. With `draft_vocab` it has an lm_head of its own
    over that many of the target's ids. `speculators`: in the form of that library, else in z-lab's. `keys`:
    more of config.json.
    """
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    random = SeededWeights(3000)
    weights = {
        "fc.weight": random.matrix(hidden, len(reads) * hidden),
        "hidden_norm.weight": random.gain(hidden),
        "norm.weight": random.gain(hidden),
    }
    for i in range(layers):
        weights |= {f"layers.{i}.{name}": tensor for name, tensor in _layer(target, random).items()}
    if draft_vocab is not None:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(4))[:draft_vocab].sort().values
        weights["lm_head.weight"] = random.matrix(draft_vocab, hidden)
        weights["d2t"] = kept - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    own = {"mask_token_id": min(MASK, vocab - 6), "block_size": BLOCK}
    sizes = _sizes(target, layers)
    config: dict[str, Any]
    if speculators:
        told = {"speculators_model_type": "dflash", "draft_vocab_size": draft_vocab or vocab}
        nested = {"transformer_layer_config": sizes, "aux_hidden_state_layer_ids": list(reads)}
        config = {"architectures": ["DFlashSpeculator"], **told, **nested, **own}
    else:
        own["target_layer_ids"] = [layer - 1 for layer in reads]
        config = {"architectures": ["DFlashDraftModel"], "dflash_config": own, **sizes}
    return write_folder(folder, config | keys, weights)


def _layer(target: dict[str, Any], random: SeededWeights) -> dict[str, torch.Tensor]:
    """One of Qwen3."""
    hidden, ffn, dim = (target[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = target["num_attention_heads"] * dim, target["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": random.matrix(queries, hidden),
        "self_attn.k_proj.weight": random.matrix(keys, hidden),
        "self_attn.v_proj.weight": random.matrix(keys, hidden),
        "self_attn.o_proj.weight": random.matrix(hidden, queries),
        "self_attn.q_norm.weight": random.gain(dim),
        "self_attn.k_norm.weight": random.gain(dim),
        "input_layernorm.weight": random.gain(hidden),
        "post_attention_layernorm.weight": random.gain(hidden),
        "mlp.gate_proj.weight": random.matrix(ffn, hidden),
        "mlp.up_proj.weight": random.matrix(ffn, hidden),
        "mlp.down_proj.weight": random.matrix(hidden, ffn),
    }


def _sizes(target: dict[str, Any], layers: int) -> dict[str, Any]:
    """What config.json says of its layers."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {name: target[name] for name in (*same, "head_dim")} | {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


RANK = 16


def write_tiny_dspark(folder: Path, target_folder: Path, kind: str = "vanilla", **shape: Any) -> Path:
    """A DSpark head, in DeepSpec's form, with a Markov head of this kind. `shape`: as of the other writer."""
    write_tiny_dflash(folder, target_folder, **shape)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    hidden, vocab, random = config["hidden_size"], config["vocab_size"], SeededWeights(4000)
    outputs = weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else vocab
    weights |= {
        "markov_head.markov_w1.weight": 3 * random.matrix(vocab, RANK),
        "markov_head.markov_w2.weight": 3 * random.matrix(outputs, RANK),
        "confidence_head.proj.weight": random.matrix(1, hidden + RANK),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    if kind != "vanilla":
        rows, columns = (RANK, hidden + RANK) if kind == "gated" else (3 * RANK, hidden + 2 * RANK)
        name = "gate_proj" if kind == "gated" else "joint_proj"
        weights[f"markov_head.{name}.weight"] = random.matrix(rows, columns)
        weights[f"markov_head.{name}.bias"] = random.gain(rows) - 1
    told = {**config.pop("dflash_config"), "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    return write_folder(folder, config | told | {"markov_rank": RANK, "markov_head_type": kind}, weights)
