"""The embedded model's EAGLE-3 head, trained on packed rows beside the model as it was trained itself.

Heads for other targets, other kinds, checkpoints and measurements are the business of
`eyas.train.head_run`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from eyas.train.drafting import drafting_loss
from eyas.train.heads.base import TargetTensors
from eyas.train.heads.eagle3 import Eagle3Head
from eyas.train.model import LlamaShape
from eyas.train.recipe import TrainingRecipe, descend, optimisers, progress
from eyas.train.unroll import UnrollBatch, unrolled_step
from tools.nano.data import split_bits
from tools.nano.model import NanoModel
from tools.nano.target import REPORT_EVERY, report

UNROLL = 7
HEAD_INTERMEDIATE = 624


def head_shape(target: LlamaShape) -> LlamaShape:
    """The shape of the head for a target."""
    return replace(target, layers=1, intermediate=HEAD_INTERMEDIATE * target.hidden // 256)


def head_of(target: NanoModel) -> Eagle3Head:
    """A new head, with the target's whole vocabulary."""
    head = Eagle3Head(head_shape(target.config), len(target.config.captured))
    head.begin_as(TargetTensors(target.embed_tokens.weight, target.embed_tokens.weight, target.norm.weight))
    return head


@torch.no_grad()
def course_of(target: NanoModel, packed: Tensor) -> UnrollBatch:
    """The lesson of a packed batch [rows, length + 1] for a head. Texts that share a row see each other."""
    ids, answer = split_bits(packed)
    hidden, features = target(ids)
    return UnrollBatch(
        features=features,
        hidden=hidden,
        embeds=target.embed_tokens(ids),
        target_logits=target.logits(hidden),
        learnt=answer,
        positions=torch.arange(ids.shape[1], device=ids.device)[None],
    )


def train_head(head: Eagle3Head, target: NanoModel, stream: Iterator[Tensor], recipe: TrainingRecipe) -> None:
    """Trains the head in place; freezes the target."""
    device = head.fc.weight.device
    target.requires_grad_(False)
    opts = optimisers(head, recipe, frozenset({"lm_head.weight"}))
    step_of = torch.compile(unrolled_step, dynamic=False) if device.type == "cuda" else unrolled_step
    start = time.time()
    with progress("head") as bar:
        task = bar.add_task("", total=recipe.steps, note="")
        for step, packed in zip(range(recipe.steps), stream, strict=False):
            with torch.autocast(device.type, torch.bfloat16):
                course = course_of(target, packed.to(device, non_blocking=True))
                loss = drafting_loss(head, course, UNROLL, step_of)
            descend(head, loss, opts, recipe, step)
            if step % REPORT_EVERY == 0 or step == recipe.steps - 1:
                bar.update(task, completed=step + 1, note=report("head", step, loss, start, recipe))
