"""Adds to drafts' logits the noise that the target will add to the same tokens, by their request's seed.

The softmax of what is left in the logits is `sampler.draft_probabilities`, the specification, up to rounding;
its best id is that of `sampler.perturbed`.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.sampling.gumbel import gumbel_at, gumbel_from

_TILE = 2048  # ids per program


def add_noise(batch: RoundBatch, level: int, logits: Tensor, token_map: Tensor | None) -> None:
    """logits += temperature * G, in place, for the children that a tree gets at `level` (0: the root's).

    `logits` float32 [B * R, draft vocab]: R rows for each sequence of the batch. Their tokens stand at
    position length + 1 + level. `token_map` int64 [draft vocab]: the target's id of each draft id (None: the
    same). At temperature 0 no logits are read or written.
    """
    tables, (rows, vocab) = batch.tables, logits.shape
    _add_noise[(cdiv(vocab, _TILE), rows)](
        *(logits, logits.stride(0), batch.slots, tables.length),
        *(tables.temperature, tables.seed, tables.choice, token_map, level),
        ROWS=rows // batch.size,
        VOCAB=vocab,
        TILE=_TILE,
        PDL=batch.pdl,
        num_warps=8,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=(*PLAIN, "temperature", "choice", "token_map"))
def _add_noise(
    logits,
    stride,
    slots,
    length,
    temperature,
    seed,
    choice,
    token_map,
    level,
    ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(1)
    slot = tl.load(slots + row // ROWS)
    t = tl.load(temperature + slot)
    if t != 0.0:
        start = tl.program_id(0) * TILE
        ids = start + tl.arange(0, TILE)
        inside = ids < VOCAB
        position = tl.load(length + slot) + 1 + level
        stream = tl.load(seed + slot), position, tl.load(choice + slot)
        if token_map is None:
            noise = gumbel_from(*stream, start, TILE)
        else:
            noise = gumbel_at(*stream, tl.load(token_map + ids, mask=inside, other=0).to(tl.int32))
        place = logits + row.to(tl.int64) * stride + ids
        tl.store(place, tl.load(place, mask=inside, other=0.0) + t * noise, mask=inside)
