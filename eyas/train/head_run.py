"""One training of one head: batches, descent, measurements on the way, checkpoints.

Where the texts come from, and what becomes of the head, is the business of `eyas.train.head_command`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from eyas.common.errors import ConfigError
from eyas.train.acceptance import ByDepth, count_chains
from eyas.train.drafting import drafting_loss, step_for
from eyas.train.heads.base import DraftHead
from eyas.train.heads.table import head_kind
from eyas.train.packing import PackedBatch, PackedBatches, TrainingExample
from eyas.train.recipe import TrainingRecipe, descend, optimisers, progress
from eyas.train.saving import TrainingCheckpoint
from eyas.train.teacher import TeacherModel
from eyas.train.unroll import UnrollBatch
from eyas.train.updates import learn_updates

logger = logging.getLogger(__name__)
DEPTH = 5  # of the chains that are measured
APART = frozenset({"lm_head.weight", "mask_hidden"})  # they are no hidden matrices

Line = dict[str, Any]


@dataclass(frozen=True)
class HeadSettings:
    """The settings that determine a head, beside its texts. `unroll`: steps of the training-time test.

    `draft_vocab`: outputs, where the kind has a vocabulary of its own; None: the target's. `begin`: the
    folder of a head whose tensors it begins with; None: it begins anew. `updates`: the rank of updates of
    that head's layers, which alone are learnt; 0: the head is.
    """

    kind: str
    recipe: TrainingRecipe
    unroll: int
    seed: int
    draft_vocab: int | None = None
    begin: Path | None = None
    updates: int = 0


@dataclass(frozen=True)
class RunIntervals:
    """The numbers of steps after which the head is measured, and the run's state is saved."""

    measured: int
    saved: int


@dataclass(frozen=True)
class TrainingTexts:
    """The texts to learn, and those held out for measurements."""

    learnt: Sequence[TrainingExample]
    heldout: Sequence[TrainingExample]


@dataclass
class RunProgress:
    """The progress of a run: steps done, seconds spent, and a line for each measurement."""

    step: int = 0
    seconds: float = 0.0
    history: list[Line] = field(default_factory=list)


class HeadRun:
    """A head on its way. `resume` goes on from the checkpoint; `train` goes to the end."""

    def __init__(
        self,
        settings: HeadSettings,
        teacher: TeacherModel,
        texts: TrainingTexts,
        checkpoint: TrainingCheckpoint,
    ) -> None:
        """Raises ConfigError if the target cannot have such a head."""
        self._settings, self._teacher, self._texts = settings, teacher, texts
        self._checkpoint = checkpoint
        self._device = torch.device(teacher.placement.device)
        kind = head_kind(settings.kind)
        self._taps = kind.taps(teacher.config)
        stored = {} if settings.begin is None else load_file(settings.begin / "model.safetensors")
        if "d2t" in stored:
            token_map: Tensor | None = stored["d2t"] + torch.arange(len(stored["d2t"]))
        else:
            token_map = frequent(texts.learnt, settings.draft_vocab, teacher.config.vocab_size)
        torch.manual_seed(settings.seed)
        self.head = kind.head_for(teacher.config, teacher.ends, token_map).to(self._device)
        if stored:
            begin_with(self.head, stored)
        if settings.updates:
            check_whole(self.head, stored)
            learn_updates(self.head, settings.updates)
        self._optimisers = optimisers(self.head, settings.recipe, APART)
        self._step_of = step_for(self.head)
        if self._device.type == "cuda":
            self._step_of = torch.compile(self._step_of, dynamic=False)
        self.progress = RunProgress()

    def resume(self) -> None:
        """Loads the checkpoint. Raises ConfigError if there is none, or it is of another run."""
        state = self._checkpoint.load(str(self._device))
        self.head.load_state_dict(state["head"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = RunProgress(state["step"], state["seconds"], state["history"])

    def train(self, pace: RunIntervals, tell: Callable[[Line], None]) -> None:
        """Goes on to the last step. `tell` is called with every measurement."""
        recipe, done = self._settings.recipe, self.progress
        batches = PackedBatches(self._texts.learnt, recipe.rows, recipe.length, self._settings.seed)
        began = time.monotonic() - done.seconds
        with progress(self._settings.kind) as bar:
            task = bar.add_task("", total=recipe.steps, note="", completed=done.step)
            for batch in batches.start(done.step):
                if done.step >= recipe.steps:
                    break
                loss = self._learn(batch)
                done.step += 1
                done.seconds = time.monotonic() - began
                bar.update(task, completed=done.step)
                last = done.step == recipe.steps
                if last or done.step % pace.measured == 0:
                    line = self._measured(loss)
                    tell(line)
                    bar.update(task, note=described(line))
                if last or done.step % pace.saved == 0:
                    self.save()

    def save(self) -> None:
        """Writes the checkpoint."""
        self._checkpoint.save(
            {
                "step": self.progress.step,
                "seconds": self.progress.seconds,
                "history": self.progress.history,
                "head": self.head.state_dict(),
                "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            }
        )

    def measure(self) -> ByDepth:
        """Chains over the texts that are held out."""
        counts, recipe = ByDepth(), self._settings.recipe
        self.head.eval()
        for batch in PackedBatches(self._texts.heldout, recipe.rows, recipe.length, seed=0).once():
            with self._precision(), torch.no_grad():
                course, best = self._course(batch.to(self._device))
                count_chains(self.head, course, best, DEPTH, counts)
        self.head.train()
        return counts

    def _learn(self, batch: PackedBatch) -> Tensor:
        step = self.progress.step
        torch.manual_seed(self._settings.seed * 1_000_003 + step)  # so noise is the same after a resume
        with self._precision():
            course, _ = self._course(batch.to(self._device))
            loss = drafting_loss(self.head, course, self._settings.unroll, self._step_of)
        descend(self.head, loss, self._optimisers, self._settings.recipe, step)
        return loss

    @torch.no_grad()
    def _course(self, batch: PackedBatch) -> tuple[UnrollBatch, Tensor]:
        """The lesson of a batch, and the target's first choice after each token, int64 [B, L]."""
        teacher, token_map = self._teacher, self.head.token_map
        observed = teacher.observe(batch, self._taps)
        target_logits = teacher.logits(observed.hidden)
        best, possible = target_logits.argmax(-1), None
        if token_map is not None:
            target_logits, possible = target_logits[..., token_map], torch.isin(best, token_map)
        course = UnrollBatch(
            features=observed.tapped if self._taps else observed.hidden,
            hidden=observed.hidden,
            embeds=F.embedding(batch.ids, teacher.ends.embedding),
            target_logits=target_logits,
            learnt=batch.answer,
            positions=batch.positions,
            segments=batch.segments,
            possible=possible,
        )
        return course, best

    def _measured(self, loss: Tensor) -> Line:
        done = self.progress
        line: Line = {"step": done.step, "loss": round(loss.item(), 5), "seconds": round(done.seconds, 1)}
        if self._texts.heldout:
            line |= self.measure().figures()
        done.history.append(line)
        kind, steps = self._settings.kind, self._settings.recipe.steps
        logger.info("%s step %d of %d, %s", kind, done.step, steps, described(line))
        return line

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 where the target computes in it."""
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


@torch.no_grad()
def begin_with(head: DraftHead, stored: Mapping[str, Tensor]) -> None:
    """Copies the tensors that both have; layers that are new begin by adding nothing.

    Raises ConfigError if they have none in common.
    """
    own = head.state_dict()
    shared = {name for name in own if name in stored and own[name].shape == stored[name].shape}
    if not shared & {name for name, _ in head.named_parameters()}:
        raise ConfigError("--begin-with: no tensor of it is one of this head", param="begin-with")
    for name, parameter in head.named_parameters():
        if name in shared:
            parameter.copy_(stored[name])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()


def check_whole(head: DraftHead, stored: Mapping[str, Tensor]) -> None:
    """Raises ConfigError unless `stored` has all that the head learns: updates are of that head alone."""
    for name, parameter in head.named_parameters():
        if name not in stored or stored[name].shape != parameter.shape:
            there = list(stored[name].shape) if name in stored else "not there"
            text = f"its {name} is {there}, and a head for this target has {list(parameter.shape)}"
            raise ConfigError(f"--begin-with: {text}: it can have no --updates here", param="begin-with")


def described(line: Line) -> str:
    """A measurement for people."""
    length = line.get("acceptance_length")
    return f"loss {line['loss']:.4f}" + (f", acceptance length {length:.2f}" if length else "")


def frequent(examples: Sequence[TrainingExample], count: int | None, vocab: int) -> Tensor | None:
    """The `count` ids that answers use most, ascending: int64 [count]; None: all ids are wanted.

    Ids that no answer uses fill up, the lowest first. Raises ConfigError for more ids than there are.
    """
    if count is None or count == vocab:
        return None
    if count > vocab:
        raise ConfigError(
            f"--draft-vocab: {count} is more than the target's {vocab} ids", param="draft-vocab"
        )
    used: Counter[int] = Counter()
    for example in examples:
        used.update(example.ids[example.answer].tolist())
    often = np.argsort([-used[token] for token in range(vocab)], kind="stable")[:count]
    return torch.from_numpy(np.sort(often))
