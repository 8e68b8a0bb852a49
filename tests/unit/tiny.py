"""Random-weight models small enough for unit tests, written as real Hugging Face folders.

It knows file formats only (config.json and safetensors), nothing of Eyas, so that a mistake in the
loader cannot hide here. SeededWeights are scaled so that every block matters and greedy outputs vary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EOS_TOKEN_ID = 2


class SeededWeights:
    """Seeded float32 weights: matrices keep the scale of their input, norm gains scatter around 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) / columns**0.5

    def gain(self, size: int) -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=self._generator)


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    vocab: int = 256


def write_tiny_llama(
    folder: Path, *, tied: bool = True, rope: dict[str, Any] | None = None, seed: int = 0, **sizes: int
) -> Path:
    """A Llama folder; `rope` is config.json's `rope_parameters` (default: plain, theta 10000).

    `sizes` are fields of `Sizes`. Take layers >= 7 where an EAGLE-3 head is involved, so that its three
    captured layers differ.
    """
    size = Sizes(**sizes)
    hidden, ffn, vocab = size.hidden, size.ffn, size.vocab
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    random = SeededWeights(seed)
    weights = {"model.embed_tokens.weight": random.matrix(vocab, hidden)}
    for i in range(size.layers):
        block = {
            "input_layernorm": random.gain(hidden),
            "self_attn.q_proj": random.matrix(queries, hidden),
            "self_attn.k_proj": random.matrix(keys, hidden),
            "self_attn.v_proj": random.matrix(keys, hidden),
            "self_attn.o_proj": random.matrix(hidden, queries),
            "post_attention_layernorm": random.gain(hidden),
            "mlp.gate_proj": random.matrix(ffn, hidden),
            "mlp.up_proj": random.matrix(ffn, hidden),
            "mlp.down_proj": random.matrix(hidden, ffn),
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in block.items()}
    weights["model.norm.weight"] = random.gain(hidden)
    if not tied:
        weights["lm_head.weight"] = random.matrix(vocab, hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    return write_folder(folder, config, weights)


def write_tiny_pair(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """`target` and `head` in a folder: a Llama of four layers, and an EAGLE-3 head that names three of them.

    Steps of an engine take half as long as with the eight that a head needs which names none.
    """
    target = write_tiny_llama(folder / "target", layers=4, **sizes)
    return target, write_tiny_eagle3(folder / "head", target, reads=(1, 2, 3))


def write_tiny_eagle3(
    folder: Path,
    target_folder: Path,
    *,
    draft_vocab: int | None = None,
    seed: int = 0,
    reads: tuple[int, ...] = (),
) -> Path:
    """An EAGLE-3 head for the target in `target_folder`, in the layout of the official checkpoints.

    `reads`: the layers of the target before which it takes rows; none: it does not say.

    With `draft_vocab` it has its own lm_head over a random, ascending subset of the target's ids, and
    d2t (offsets); without, it shares the target's lm_head.
    """
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hidden, ffn, vocab = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    queries = target["num_attention_heads"] * target["head_dim"]
    keys = target["num_key_value_heads"] * target["head_dim"]
    random = SeededWeights(seed + 1000)
    weights = {
        "fc.weight": random.matrix(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": random.gain(hidden),
        "midlayer.hidden_norm.weight": random.gain(hidden),
        "midlayer.self_attn.q_proj.weight": random.matrix(queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random.matrix(keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random.matrix(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random.matrix(hidden, queries),
        "midlayer.post_attention_layernorm.weight": random.gain(hidden),
        "midlayer.mlp.gate_proj.weight": random.matrix(ffn, hidden),
        "midlayer.mlp.up_proj.weight": random.matrix(ffn, hidden),
        "midlayer.mlp.down_proj.weight": random.matrix(hidden, ffn),
        "norm.weight": random.gain(hidden),
    }
    if draft_vocab is not None:
        generator = torch.Generator().manual_seed(seed + 2000)
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["lm_head.weight"] = random.matrix(draft_vocab, hidden)
        weights["d2t"] = kept - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if reads:
        config["eagle_aux_hidden_state_layer_ids"] = list(reads)
    return write_folder(folder, config, weights)


def write_tiny_eagle(
    folder: Path, target_folder: Path, *, layers: int = 1, bias: bool = True, seed: int = 0
) -> Path:
    """An EAGLE-1/2 head for the target in `target_folder`, in the layout of the official checkpoints."""
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hidden, ffn = target["hidden_size"], target["intermediate_size"]
    queries = target["num_attention_heads"] * target["head_dim"]
    keys = target["num_key_value_heads"] * target["head_dim"]
    random = SeededWeights(seed + 3000)
    weights = {"fc.weight": random.matrix(hidden, 2 * hidden)}
    if bias:
        weights["fc.bias"] = random.gain(hidden) - 1.0
    for i in range(layers):
        block = {
            "self_attn.q_proj": random.matrix(queries, hidden),
            "self_attn.k_proj": random.matrix(keys, hidden),
            "self_attn.v_proj": random.matrix(keys, hidden),
            "self_attn.o_proj": random.matrix(hidden, queries),
            "post_attention_layernorm": random.gain(hidden),
            "mlp.gate_proj": random.matrix(ffn, hidden),
            "mlp.up_proj": random.matrix(ffn, hidden),
            "mlp.down_proj": random.matrix(hidden, ffn),
        }
        if i > 0:
            block["input_layernorm"] = random.gain(hidden)
        weights |= {f"layers.{i}.{name}.weight": tensor for name, tensor in block.items()}
    taken = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: target[name] for name in taken} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bias": bias,
        "torch_dtype": "float32",
    }
    return write_folder(folder, config, weights)


def edit(
    folder: Path,
    tensors: dict[str, torch.Tensor | None] | None = None,
    rename: Callable[[str], str] = str,
    **config: Any,
) -> Path:
    """The folder with other tensors (None: without them), under other names, and with other keys."""
    told = json.loads((folder / "config.json").read_text()) | config
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    return write_folder(folder, told, {rename(name): t for name, t in weights.items() if t is not None})


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
