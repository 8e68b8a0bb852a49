"""The recipe of a training: Muon for the matrices, AdamW for the rest, linear cooldown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingRecipe:
    """The length and speed of training.

    `rows`, `length`: the shape of a batch in tokens. `rate`: the peak learning rate. `warmup`, `cooldown`:
    shares of the steps. `decay`: the weight decay. `clip`: the largest gradient norm.
    """

    steps: int
    rows: int
    length: int
    rate: float = 4e-3
    warmup: float = 0.02
    cooldown: float = 0.5
    decay: float = 0.01
    clip: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens that the whole run consumes."""
        return self.steps * self.rows * (self.length + 1)

    def scale(self, step: int) -> float:
        """The learning rate at this step as a share of the peak."""
        done = step / self.steps
        return min(1.0, (step + 1) / max(1, int(self.warmup * self.steps)), (1 - done) / self.cooldown)


def optimisers(model: nn.Module, recipe: TrainingRecipe, head: frozenset[str]) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW for norms and for the parameters named in `head`; of what is learnt."""
    learnt = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learnt if p.ndim == 2 and name not in head]
    rest = [p for name, p in learnt if p.ndim != 2 or name in head]
    muon = torch.optim.Muon(
        matrices, lr=recipe.rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"
    )
    if not rest:
        return [muon]
    return [muon, torch.optim.AdamW(rest, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)]


def descend(
    model: nn.Module, loss: Tensor, opts: list[torch.optim.Optimizer], recipe: TrainingRecipe, step: int
) -> None:
    """One optimiser step for this loss, at the rate of the schedule."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = recipe.rate * recipe.scale(step)
        opt.step()
        opt.zero_grad(set_to_none=True)


def progress(title: str) -> Progress:
    """A progress bar that also shows the loss and the tokens per second."""
    return Progress(
        TextColumn(title), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
