"""Writes draft heads as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eyas.train.heads.base import DraftHead
from eyas.train.model import LlamaShape

DTYPE = {"torch_dtype": "bfloat16"}


def sizes_of(config: LlamaShape) -> dict[str, object]:
    """The sizes as config.json has them."""
    return {
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes one JSON object, for people and programs."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_tensors(module: nn.Module, prefix: str, folder: Path) -> None:
    """Writes what a module keeps, real numbers in bfloat16."""
    tensors = {prefix + name: _stored(tensor) for name, tensor in module.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def save_trained(head: DraftHead, described: dict[str, object], folder: Path) -> None:
    """Writes a head of any kind; `described`: what config.json says beside its sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json", {**described, "tie_word_embeddings": False, **sizes_of(head.shape), **DTYPE}
    )
    save_tensors(head, "", folder)
