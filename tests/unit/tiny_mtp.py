"""Random MTP heads in the forms in which they are published: beside the target's layers, and alone.

Like `tests.unit.tiny` it knows file formats only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.tiny import write_tiny_llama

MIMO = "model.mtp_layers.0"
THETA = 640000.0

Tensors = dict[str, torch.Tensor]


def write_tiny_mimo(folder: Path, *, seed: int = 0, stages: int = 1, **sizes: int) -> Path:
    """A MiMo folder: a Llama with biases of q, k and v, and MTP layers that the target does not have."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    write_tiny_llama(folder, tied=False, rope=rope, seed=seed, **sizes)
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed + 3000)
    for name in [
        name for name in stored if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        bias = 0.3 * torch.randn(stored[name].shape[0], generator=generator)
        stored[name.replace(".weight", ".bias")] = bias
    join = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    for stage in range(stages):
        stored |= _head(stored, f"model.mtp_layers.{stage}", join, generator)
    change = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    return _rewrite(folder, change | {"num_nextn_predict_layers": stages}, stored)


def write_tiny_nextn(folder: Path, *, seed: int = 0, stages: int = 1, **sizes: int) -> Path:
    """A Llama folder with NextN layers behind the model's own, and their copies of both ends."""
    write_tiny_llama(folder, tied=False, seed=seed, **sizes)
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed + 3000)
    for stage in range(stages):
        prefix = nextn_prefix(folder, stage)
        stored |= _head(stored, prefix, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), generator)
        stored[f"{prefix}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
        stored[f"{prefix}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    return _rewrite(folder, {"num_nextn_predict_layers": stages}, stored)


def export_nextn(folder: Path, target: Path) -> Path:
    """The NextN layer of `target` in a folder of its own, as layer 0 of one."""
    prefix = nextn_prefix(target)
    stored = {
        name.replace(prefix, "model.layers.0"): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if name.startswith(prefix)
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((target / "config.json").read_text())
    change = {"architectures": ["LlamaForCausalLMNextN"], "num_hidden_layers": 1}
    return _rewrite(folder, change, stored)


def nextn_prefix(folder: Path, stage: int = 0) -> str:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return f"model.layers.{layers + stage}"


def _head(target: Tensors, prefix: str, join: tuple[str, ...], generator: torch.Generator) -> Tensors:
    """One more layer like the target's first, and what joins (`join`: both norms, matrix, last norm)."""
    hidden = target["model.norm.weight"].shape[0]
    shapes = {
        name.replace("model.layers.0", prefix): tensor.shape
        for name, tensor in target.items()
        if name.startswith("model.layers.0.")
    }
    for name in join:
        shapes[f"{prefix}.{name}.weight"] = torch.Size([hidden, 2 * hidden][: 2 if "proj" in name else 1])
    return {name: _noise(name, shape, generator) for name, shape in shapes.items()}


def _noise(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    return 0.3 * noise if name.endswith(".bias") else 1.0 + 0.2 * noise


def _rewrite(folder: Path, change: dict[str, Any], tensors: Tensors) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
