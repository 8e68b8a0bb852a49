"""Training of the target model on packed rows, and its loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.train.recipe import TrainingRecipe, descend, optimisers, progress
from eyas.train.saving import TrainingCheckpoint
from tools.nano.data import split_bits
from tools.nano.model import NanoModel

logger = logging.getLogger(__name__)
REPORT_EVERY = 50
SAVE_EVERY = 250
USER_WEIGHT = 0.1  # the weight of tokens that users type; those of answers have weight 1


def report(title: str, step: int, loss: Tensor, start: float, recipe: TrainingRecipe) -> str:
    """Logs the state of the run; returns the line for the progress bar."""
    spent = time.time() - start
    rate = (step + 1) * recipe.rows * recipe.length / spent / 1e6
    line = f"loss {loss.item():.4f} {rate:.2f}M tokens/s"
    logger.info("%s step %d of %d, %s, %.0f s", title, step, recipe.steps, line, spent)
    return line


def next_token_loss(model: NanoModel, packed: Tensor) -> Tensor:
    """The weighted cross-entropy of one packed batch [rows, length + 1]."""
    ids, answer = split_bits(packed)
    hidden, _ = model(ids[:, :-1])
    loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = torch.where(answer[:, 1:].flatten(), 1.0, USER_WEIGHT)
    return (loss * weight).sum() / weight.sum()


class TargetRun:
    """A target on its way, in place. With a checkpoint that exists it goes on from there.

    `step`: how many are done. `history`: a line for each report.
    """

    def __init__(
        self, model: NanoModel, recipe: TrainingRecipe, checkpoint: TrainingCheckpoint | None = None
    ) -> None:
        """Raises ConfigError for a checkpoint of another run."""
        self.model, self._recipe, self._checkpoint = model, recipe, checkpoint
        self._device = model.embed_tokens.weight.device
        self._optimisers = optimisers(model, recipe, frozenset({"embed_tokens.weight"}))
        self.step, self._seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        if checkpoint is not None and checkpoint.path.exists():
            state = checkpoint.load(str(self._device))
            model.load_state_dict(state["model"])
            for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.step, self._seconds, self.history = state["step"], state["seconds"], state["history"]

    def train(self, stream: Iterator[Tensor]) -> None:
        """Goes on until the recipe's steps are done or the stream ends."""
        recipe, device = self._recipe, self._device
        objective = torch.compile(next_token_loss) if device.type == "cuda" else next_token_loss
        start, first = time.time() - self._seconds, self.step
        with progress("target") as bar:
            task = bar.add_task("", total=recipe.steps, note="", completed=first)
            for step, packed in zip(range(first, recipe.steps), stream, strict=False):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = objective(self.model, packed.to(device, non_blocking=True))
                descend(self.model, loss, self._optimisers, recipe, step)
                self.step = step + 1
                if step % REPORT_EVERY == 0 or self.step == recipe.steps:
                    bar.update(task, completed=self.step, note=report("target", step, loss, start, recipe))
                    self.history.append({"step": self.step, "loss": round(loss.item(), 5)})
                if self._checkpoint is not None and self.step % SAVE_EVERY == 0:
                    self._seconds = time.time() - start
                    self._checkpoint.save(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "step": self.step,
            "seconds": self._seconds,
            "history": self.history,
        }
