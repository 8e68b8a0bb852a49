"""The training-time test: a head's steps over one batch, each fed by what the step before it made.

Query t of step k sees the true pairs up to t and, of the steps 1 to k, those at t: true features up to t,
then k of its own (EAGLE-3, section 3.2). With one step it is plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.train.heads.base import ChainHead, DraftHead, TrainingBatch

ALIGNED, LONG = 16, 128  # pairs

Made = tuple[Tensor, Tensor]
"""The keys and values of a step in one layer, [batch, heads, rows, dim] each."""

Step = Callable[..., tuple[Tensor, list[Made], Tensor]]


@dataclass(frozen=True)
class UnrollBatch:
    """A batch of B rows with L tokens each, and what the target says of it.

    `features` [B, L, width]; `hidden` [B, L, hidden]: after the final norm; `embeds` [B, L, hidden];
    `target_logits` [B, L, outputs]: of the head's outputs; `learnt` bool [B, L]: tokens to be predicted;
    `positions` int64 [B or 1, L]; `segments` int [B, L]: which text each token is of (None: one per row);
    `possible` bool [B, L]: the target's first choice after the token is among the head's outputs (None: all).
    """

    features: Tensor
    hidden: Tensor
    embeds: Tensor
    target_logits: Tensor
    learnt: Tensor
    positions: Tensor
    segments: Tensor | None = None
    possible: Tensor | None = None

    def rows(self, unroll: int) -> int:
        """Pairs per row whose steps all have a token to predict; of long rows a multiple of 16, which a GPU's
        masks are aligned to.
        """
        rows = self.learnt.shape[1] - unroll - 1
        return rows if rows < LONG else rows - rows % ALIGNED

    def counted(self, step: int, rows: int) -> Tensor:
        """Bool [B, rows]: pairs whose token of this step is to be predicted, in the text that they are of."""
        token = slice(2 + step, 2 + step + rows)
        counted = self.learnt[:, token]
        if self.segments is not None:
            counted = counted & (self.segments[:, token] == self.segments[:, :rows])
        return counted

    def lesson(self, step: int, rows: int) -> TrainingBatch:
        """The inputs and answers of one step."""
        ahead = slice(1 + step, 1 + step + rows)
        learnt, mask = self.counted(step, rows), None
        if self.possible is not None:
            learnt = learnt & self.possible[:, ahead]
        if self.segments is not None:
            own = self.segments[:, :rows]
            mask = (own[:, :, None] == own[:, None]).tril()[:, None]
        return TrainingBatch(
            embeds=self.embeds[:, ahead],
            positions=self.positions[:, :rows] + step,
            mask=mask,
            target_logits=self.target_logits[:, ahead],
            hidden=self.hidden[:, ahead],
            learnt=learnt,
        )


@dataclass(frozen=True)
class UnrolledKv:
    """Keys and values of the steps so far in one layer: the true rows, and those of the self-fed steps.

    `keys`, `values`: [batch, heads, rows, dim]. `own_keys`, `own_values`: [batch, heads, rows, room, dim].
    `used` bool [room] says which of them exist: so all later steps have one shape and compile once.
    """

    keys: Tensor
    values: Tensor
    own_keys: Tensor
    own_values: Tensor
    used: Tensor

    @staticmethod
    def of(steps: list[Made], room: int) -> UnrolledKv:
        """Gathers the keys and values of the steps so far; the first step has the true rows."""
        (keys, values), own = steps[0], steps[1:]
        used = torch.arange(room, device=keys.device) < len(own)
        if not room:
            none = keys[:, :, :, None][:, :, :, :0]
            return UnrolledKv(keys, values, none, none, used)
        blank = [torch.zeros_like(keys)] * (room - len(own))
        stacks = [torch.stack([step[i] for step in own] + blank, 3) for i in (0, 1)]
        return UnrolledKv(keys, values, stacks[0], stacks[1], used)


def unrolled_attention(q: Tensor, k: Tensor, v: Tensor, past: UnrolledKv, mask: Tensor | None) -> Tensor:
    """Attention of a self-fed step: row t sees the true rows up to t, then its own rows of earlier steps.

    `mask`: which true rows each query sees, as in `TrainingBatch`.
    """
    length = q.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ past.keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    own = (q[:, :, :, None] * past.own_keys).sum(-1).masked_fill(~past.used, -torch.inf)
    itself = (q * k).sum(-1, keepdim=True)
    weights = (torch.cat((scores, own, itself), -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
    split = weights.split((length, past.used.shape[0], 1), -1)
    seen: Tensor = split[0] @ past.values + (split[1][..., None] * past.own_values).sum(3) + split[2] * v
    return seen


def unrolled_step(
    head: ChainHead, state: Tensor, lesson: TrainingBatch, past: list[UnrolledKv]
) -> tuple[Tensor, list[Made], Tensor]:
    """One step; returns the next state, the step's keys and values in each layer, and its mean loss.

    `past`: of each layer; [] in the first step.
    """
    made: list[Made] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        made.append((k, v))
        if past:
            return unrolled_attention(q, k, v, past[len(made) - 1], lesson.mask)
        return F.scaled_dot_product_attention(q, k, v, lesson.mask, is_causal=lesson.mask is None)

    state = head(lesson.embeds, state, lesson.positions, attend)
    return state, made, mean_loss(head, state, lesson)


def mean_loss(head: DraftHead, state: Tensor, lesson: TrainingBatch) -> Tensor:
    """Over the pairs that count."""
    learnt = lesson.learnt.flatten().float()
    return (head.loss(state, lesson) * learnt).sum() / learnt.sum().clamp(min=1)


def unrolled(
    head: ChainHead, course: UnrollBatch, unroll: int, step_of: Step = unrolled_step
) -> Iterator[tuple[Tensor, Tensor]]:
    """(states [B, rows, hidden], mean loss) of each step, the first of which is fed by the target."""
    rows = course.rows(unroll)
    state = head.enter(course.features[:, :rows])
    steps: list[list[Made]] = []
    for step in range(unroll):
        past = [UnrolledKv.of(list(layer), unroll - 2) for layer in zip(*steps, strict=True)]
        state, made, loss = step_of(head, state, course.lesson(step, rows), past)
        steps.append(made)
        yield state, loss
