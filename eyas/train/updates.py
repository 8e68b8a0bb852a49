"""Updates of a head's layers for an adapter of its target: an engine adds them for the adapter's rows.

The head itself stays as it is. Of each linear module of its layers two factors are learnt, A and B, and they
are written as PEFT writes an adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from eyas.engine.ipc.adapter_messages import ADAPTER_FILES
from eyas.train.heads.base import DraftHead
from eyas.train.saving import write_json

_LAYERS = (".self_attn.", ".mlp.")
"""Parts of the names of modules that an engine updates."""


class LearntUpdate(nn.Module):
    """W [n, k] becomes W + B A, with A [rank, k] and B [n, rank], which begins as zeros."""

    def __init__(self, matrix: Tensor, rank: int) -> None:
        super().__init__()
        n, k = matrix.shape
        self.down = nn.Parameter(torch.randn(rank, k, device=matrix.device) / k**0.5)
        self.up = nn.Parameter(torch.zeros(n, rank, device=matrix.device))

    def forward(self, matrix: Tensor) -> Tensor:
        """The matrix with the update."""
        return matrix + self.up @ self.down


def learn_updates(head: DraftHead, rank: int) -> None:
    """From now on nothing of the head is learnt but updates of that rank."""
    head.requires_grad_(False)
    for name, module in list(head.named_modules()):
        if isinstance(module, nn.Linear) and any(part in f".{name}." for part in _LAYERS):
            parametrize.register_parametrization(module, "weight", LearntUpdate(module.weight, rank))


def updates_of(head: DraftHead) -> Iterator[tuple[str, LearntUpdate]]:
    """The update that is learnt of each module, by its name."""
    for name, module in head.named_modules():
        if isinstance(module, LearntUpdate):
            yield name.removesuffix(".parametrizations.weight.0"), module


def save_updates(head: DraftHead, rank: int, folder: Path) -> None:
    """Writes an adapter's folder `draft`."""
    tensors = {}
    for name, update in updates_of(head):
        for factor, stored in (("A", update.down), ("B", update.up)):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = stored.detach().cpu().bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = ADAPTER_FILES
    write_json(folder / config, {"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / weights)
