"""Training of the target model: Muon for the matrices, AdamW for the rest, linear cooldown.

This file knows the optimisers, the schedule and the loss; it does not know how text is made or stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from eyas.train.data import split_bits
from eyas.train.model import Nano

logger = logging.getLogger(__name__)
REPORT_EVERY = 50
USER_WEIGHT = 0.1  # the weight of tokens that users type; those of answers have weight 1


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train.

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


def optimisers(model: nn.Module, recipe: Recipe, head: frozenset[str]) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW for norms and for the parameters named in `head`."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name not in head]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or name in head]
    muon = torch.optim.Muon(
        matrices, lr=recipe.rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(rest, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)]


def descend(
    model: nn.Module, loss: Tensor, opts: list[torch.optim.Optimizer], recipe: Recipe, step: int
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


def report(title: str, step: int, loss: Tensor, begun: float, recipe: Recipe) -> str:
    """Logs the state of the run; returns the line for the progress bar."""
    spent = time.time() - begun
    rate = (step + 1) * recipe.rows * recipe.length / spent / 1e6
    line = f"loss {loss.item():.4f} {rate:.2f}M tokens/s"
    logger.info("%s step %d of %d, %s, %.0f s", title, step, recipe.steps, line, spent)
    return line


def next_token_loss(model: Nano, packed: Tensor) -> Tensor:
    """The weighted cross-entropy of one packed batch [rows, length + 1]."""
    ids, answer = split_bits(packed)
    hidden, _ = model(ids[:, :-1])
    loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = torch.where(answer[:, 1:].flatten(), 1.0, USER_WEIGHT)
    return (loss * weight).sum() / weight.sum()


def train_target(model: Nano, stream: Iterator[Tensor], recipe: Recipe) -> None:
    """Trains in place until the recipe's steps are done or the stream ends."""
    device = model.embed_tokens.weight.device
    opts = optimisers(model, recipe, frozenset({"embed_tokens.weight"}))
    objective = torch.compile(next_token_loss) if device.type == "cuda" else next_token_loss
    begun = time.time()
    with progress("target") as bar:
        task = bar.add_task("", total=recipe.steps, note="")
        for step, packed in zip(range(recipe.steps), stream, strict=False):
            with torch.autocast(device.type, torch.bfloat16):
                loss = objective(model, packed.to(device, non_blocking=True))
            descend(model, loss, opts, recipe, step)
            if step % REPORT_EVERY == 0 or step == recipe.steps - 1:
                bar.update(task, completed=step + 1, note=report("target", step, loss, begun, recipe))
