"""Writes the first tokens of prompts into the tables of the device, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.kernels.drafts.rounds import LANES, PLAIN
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.sampling.ranking import unmarked


@dataclass(frozen=True)
class PromptEnds:
    """Prompts that end in a step, all int32 [E].

    `slots` of their sequences (padding changes no table); `positions` of their first tokens; `rows`: where in
    `following` [C + 1] each of these stands.
    """

    slots: Tensor
    positions: Tensor
    rows: Tensor
    following: Tensor


def store(tables: SlotTables, ends: PromptEnds, chosen: Tensor, result: Tensor, pdl: bool) -> None:
    """`chosen` int32 [E] become their sequences' roots, stand in their texts, and are copied to `result`;
    there alone they may be marked.
    """
    count = ends.slots.shape[0]
    _store[(cdiv(count, LANES),)](
        ends.slots,
        ends.positions,
        ends.rows,
        chosen,
        tables.length,
        tables.root,
        tables.text,
        ends.following,
        result,
        count,
        tables.padding_slot,
        tables.text.shape[1],
        BLOCK=LANES,
        PDL=pdl,
        num_warps=LANES // 32,
        launch_pdl=pdl,
    )


@kernel(do_not_specialize=(*PLAIN, "slots", "positions", "end_rows", "chosen", "following", "result"))
def _store(
    slots,
    positions,
    end_rows,
    chosen,
    length,
    root,
    text,
    following,
    result,
    rows,
    padding,
    context,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    end = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = end < rows
    slot = tl.load(slots + end, mask=inside, other=padding)
    position = tl.load(positions + end, mask=inside, other=0)
    token = tl.load(chosen + end, mask=inside, other=0)
    live = slot != padding
    tl.store(result + end, token, mask=inside)
    token = unmarked(token)
    tl.store(length + slot, position, mask=live)
    tl.store(root + slot, token, mask=live)
    tl.store(text + slot.to(tl.int64) * context + position, token, mask=live & (position < context))
    tl.store(following + tl.load(end_rows + end, mask=inside, other=0), token, mask=inside)
