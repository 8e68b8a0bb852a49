"""The files that a training writes: its state, and draft heads as Hugging Face folders.

From a run's state a killed run goes on. It is written whole or not at all, and refused by a run of other
settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eyas.common.errors import ConfigError
from eyas.engine.checkpoint.pickled import load_saved
from eyas.train.heads.base import DraftHead
from eyas.train.model import LlamaShape

DTYPE = {"torch_dtype": "bfloat16"}


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One file. `settings`: plain values that a run must share with the one it continues, by flag."""

    path: Path
    settings: Mapping[str, Any]

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        torch.save({"settings": dict(self.settings), **state}, new)
        os.replace(new, self.path)

    def load(self, device: str) -> dict[str, Any]:
        """The state, on a device. Raises ConfigError for a file that is missing, broken or of another run."""
        try:
            state: Any = load_saved(self.path, device)
        except FileNotFoundError:
            raise ConfigError(f"--resume: there is no {self.path}", param="resume") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--resume: {self.path} cannot be read: {error}", param="resume") from error
        if not isinstance(state, dict) or "settings" not in state:
            raise ConfigError(f"--resume: {self.path} is no checkpoint of a run", param="resume")
        theirs = state.pop("settings")
        for flag, value in self.settings.items():
            if theirs.get(flag) != value:
                text = f"--{flag}: {value} here, and {theirs.get(flag)} in the run that {self.path} is of"
                raise ConfigError(text, param=flag)
        return state


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
