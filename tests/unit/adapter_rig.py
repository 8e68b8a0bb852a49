"""Random adapters in PEFT's format, and models with an adapter's updates added to their weights.

It knows file formats only, nothing of Eyas: the sum of a weight and its update is written down here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HEAD = "lm_head.weight"


def is_turned(model: Path) -> bool:
    """Whether modules store their matrices as [columns, rows], as GPT-2's do."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return bool(config["model_type"] == "gpt2")


def stored_matrices(model: Path) -> dict[str, torch.Tensor]:
    """The linear modules of a folder's layers, and its output head, by their names."""
    weights = load_file(model / "model.safetensors")
    layers = re.compile(r"(^|\.)(layers|h)\.\d+\.|^midlayer\.")  # a head's
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.endswith(".weight") and weight.dim() == 2 and (layers.search(name) or name == HEAD)
    }


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    modules: Sequence[str] = (),
    size: float = 0.5,
    **config: Any,
) -> Path:
    """An adapter of all linear modules of the layers but for routers, or of those, of routers and of the
    output head whose names end with one of `modules`.

    `size`: of an update beside its weight, about. `config`: further fields of its adapter_config.json.
    """
    random = torch.Generator().manual_seed(seed)
    tensors, alpha = {}, config.get("lora_alpha", 2 * rank)
    for module, weight in stored_matrices(model).items():
        if not (module.endswith(tuple(modules)) if modules else not module.endswith(("lm_head", ".gate"))):
            continue
        rows, columns = weight.shape[::-1] if is_turned(model) else weight.shape
        for name, sizes in (("A", (rank, columns)), ("B", (rows, rank))):
            factor = torch.randn(*sizes, generator=random) / sizes[1] ** 0.5
            if name == "B":
                factor *= size * rank / alpha * weight.std() * columns**0.5
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = factor
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear"} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's updates in its weights, float32."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    scaling = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1.0)
    for name in [name for name in factors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = scaling * factors[name.replace(".lora_A.", ".lora_B.")].float() @ factors[name].float()
        weights[f"{module}.weight"] += update.t() if is_turned(model) else update
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


PROMPT = tuple(i * i % 13 + i % 4 for i in range(24))
PATIENCE_S = 200
