"""The steps of heads that draft all depths in one pass, over one batch: below some of its pairs in training.

DFlash's blocks see both ways and are its only rows. Of P-EAGLE the first drafts are EAGLE-3's, below every
pair, and rows of deeper ones see the certain rows' keys and values, then those of their own block before them
(arXiv 2602.01469, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.train.block_attention import BlockView, Kv, block_attention
from eyas.train.heads.base import BlockHead, MaskedHead, TrainingBatch
from eyas.train.unroll import UnrollBatch, mean_loss

ROWS_PER_BLOCK = 8
"""Of a text, in training: so blocks have about as many rows as the text."""

BlockStep = Callable[..., tuple[Tensor, Tensor]]


def drafted_below(
    head: BlockHead | MaskedHead, course: UnrollBatch, unroll: int, step_of: BlockStep
) -> Iterator[tuple[Tensor, Tensor]]:
    """(states [B, A, hidden], mean loss) of each draft below A pairs: drawn ones, or all out of training.

    In training the first of a P-EAGLE head is of all pairs.
    """
    rows = course.rows(unroll)
    places = _places(course, rows, draw=head.training)
    first = course.lesson(0, rows)
    causal = isinstance(head, MaskedHead)
    made = [
        step_of(head, course.features[:, :rows], first, part, _view(course, part, rows, causal), unroll)
        for part in places.split(-(-rows // ROWS_PER_BLOCK), 1)
    ]
    certain, states = made[0][0], torch.cat([below for _, below in made], 1)
    free = unroll - states.shape[2]  # drafts of the certain rows themselves
    if free:
        yield certain, mean_loss(head, certain, first)
    for step in range(free, unroll):
        state = states[:, :, step - free]
        yield state, mean_loss(head, state, _picked(course.lesson(step, rows), places))


def block_step(
    head: BlockHead, features: Tensor, first: TrainingBatch, places: Tensor, view: BlockView, unroll: int
) -> tuple[Tensor, Tensor]:
    """The pairs' states, and those of all drafts below the pairs at places [B, A]: [B, A, unroll, hidden]."""
    roots = _of(first.embeds, places).unsqueeze(2)
    masks = head.mask_embedding.to(roots.dtype).expand(*places.shape, unroll, -1)
    pairs = head.enter(features)
    return pairs, head(pairs, torch.cat((roots, masks), 2), view)[:, :, 1:]


def masked_step(
    head: MaskedHead, features: Tensor, first: TrainingBatch, places: Tensor, view: BlockView, unroll: int
) -> tuple[Tensor, Tensor]:
    """The states of all pairs, the first drafts, [B, rows, hidden], and of deeper ones below those at places
    [B, A]: [B, A, unroll - 1, hidden].
    """
    made: list[Kv] = []

    def certain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made.append((k.transpose(1, 2), v.transpose(1, 2)))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, first.mask, is_causal=first.mask is None)

    shallow = head(first.embeds, head.enter(features), first.positions, certain)
    count, far = unroll - 1, iter(made)
    if not count:
        return shallow, shallow.new_empty(*places.shape, 0, shallow.shape[-1])

    def below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2).unflatten(1, (-1, count)) for part in (q, k, v))
        return block_attention(q, (k, v), next(far), view).flatten(1, 2).transpose(1, 2)

    embeds = head.mask_embedding.to(shallow.dtype).expand(len(places), places.shape[1] * count, -1)
    state = head.mask_state().expand_as(embeds)
    deep = head(embeds, state, view.places(count).flatten(1), below)
    return shallow, deep.unflatten(1, (-1, count))


def _places(course: UnrollBatch, rows: int, *, draw: bool) -> Tensor:
    """The pairs below which is drafted, int64 [B, A]: all, or some that count."""
    if draw:
        chances = course.counted(0, rows).float() + 1e-6
        return chances.multinomial(-(-rows // ROWS_PER_BLOCK)).sort().values
    return torch.arange(rows, device=course.features.device).expand(course.learnt.shape[0], -1)


def _view(course: UnrollBatch, places: Tensor, rows: int, causal: bool) -> BlockView:
    """The blocks behind these pairs."""
    sees = torch.arange(rows, device=places.device) <= places[..., None]
    if course.segments is not None:
        own = course.segments[:, :rows]
        sees = sees & (own[:, None] == own.gather(1, places)[..., None])
    context = course.positions[:, :rows]
    return BlockView(context.expand(len(places), -1).gather(1, places) + 1, context, sees, causal)


def _picked(lesson: TrainingBatch, places: Tensor) -> TrainingBatch:
    """The pairs at places [B, A] alone."""
    return TrainingBatch(
        embeds=_of(lesson.embeds, places),
        positions=places,
        mask=None,
        target_logits=_of(lesson.target_logits, places),
        hidden=_of(lesson.hidden, places),
        learnt=lesson.learnt.gather(1, places),
    )


def _of(rows: Tensor, places: Tensor) -> Tensor:
    """rows [B, T, width] at places [B, A]: [B, A, width]."""
    return rows.gather(1, places.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
