"""Moves rows along an accepted path in all layers' rings; `accepted_path.compact` moves keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.drafts.rounds import RoundBatch, RoundVerdicts
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.states.store import RING, StateStore

_BLOCK = 1024  # words of a row that one program moves, for all rows of a path


def keep_path(batch: RoundBatch, verdicts: RoundVerdicts, states: StateStore, kept: SolvedStore) -> None:
    """Moves the row of each accepted node i from start + path[i] to start + i, in all layers' rings, after
    the verdict. All sources are read before any row is written.
    """
    tables, path = batch.tables, verdicts.path
    rings = (*(states.parts[name].transpose(0, 1) for name in RING), *kept.parts.values())
    parts = tuple(part.flatten(3).view(torch.int32) for part in rings if part.numel())
    strides = tuple((part.stride(0), part.stride(1), part.shape[3]) for part in parts)
    _keep_path[(batch.size, parts[0].shape[0], cdiv(max(part.shape[3] for part in parts), _BLOCK))](
        *(batch.slots, tables.length, tables.state, verdicts.result, path, parts),
        *(tables.padding_slot, verdicts.result.shape[1]),
        STRIDES=strides,
        RING_ROWS=states.format.ring,
        PATH=path.shape[1],
        PATH_BLOCK=power_of_2(path.shape[1]),
        BLOCK=_BLOCK,
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=["padding", "result_stride"])
def _keep_path(
    slots, length, state, result, path, parts, padding, result_stride,
    STRIDES: tl.constexpr, RING_ROWS: tl.constexpr, PATH: tl.constexpr, PATH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, layers, blocks of the widest row). `STRIDES`, in words of 32 bits: of each part that of a
    layer, that of a slot, and the width of a row.
    """
    after_previous(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    index = tl.arange(0, PATH_BLOCK)
    node = tl.load(path + sequence * PATH + index, mask=index < PATH, other=-1)
    moved = (slot != padding) & (node != index) & (node >= 0)
    if tl.max(moved.to(tl.int32), 0) > 0:
        start = tl.load(length + slot) - tl.load(result + sequence * result_stride)
        own = tl.load(state + slot).to(tl.int64)
        source, target = (start + node) % RING_ROWS, (start + index) % RING_ROWS
        for number in tl.static_range(len(STRIDES)):
            layer_stride, slot_stride, width = STRIDES[number]
            rows = parts[number] + tl.program_id(1).to(tl.int64) * layer_stride + own * slot_stride
            _move(rows, source * width, target * width, moved, width, BLOCK)


@triton.jit
def _move(rows, source, target, moved, width, BLOCK: tl.constexpr):
    """A program's block of the rows of one part."""
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = moved[:, None] & (column < width)[None, :]
    taken = tl.load(rows + source[:, None] + column[None, :], mask=there)
    tl.debug_barrier()  # another thread's target may be this one's source
    tl.store(rows + target[:, None] + column[None, :], taken, mask=there)
