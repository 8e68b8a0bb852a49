"""Moves rows along an accepted path in all layers' rings, as `drafts.paths.compact` moves keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.drafts.rounds import RoundBatch, RoundVerdicts
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.states.store import RING, StateStore

_BLOCK = 1024  # words of a row that one program moves, for all rows of a path


@dataclass(frozen=True)
class RingLayout:
    """The kernel's compile-time parameters, in words of 32 bits: of each part the stride of a layer and of a
    slot, and the width of a row.
    """

    ring: int
    inputs: tuple[int, int, int]
    gates: tuple[int, int, int]
    keys: tuple[int, int, int]
    misses: tuple[int, int, int]
    solved: tuple[int, int, int]
    sums: tuple[int, int, int]


def keep_path(batch: RoundBatch, verdicts: RoundVerdicts, states: StateStore, kept: SolvedStore) -> None:
    """Moves the row of each accepted node i from start + path[i] to start + i, in all layers' rings, after
    the verdict. All sources are read before any row is written.
    """
    words = {name: _words(states.parts[name].transpose(0, 1)) for name in RING}
    words |= {name: _words(part) for name, part in kept.parts.items()}
    tables, path = batch.tables, verdicts.path
    strides = {name: (part.stride(0), part.stride(1), part.shape[3]) for name, part in words.items()}
    layers, widest = words["inputs"].shape[0], max(part.shape[3] for part in words.values())
    _keep_path[(batch.size, layers, cdiv(widest, _BLOCK))](
        *(batch.slots, tables.length, tables.state, verdicts.result, path, *words.values()),
        *(tables.padding_slot, verdicts.result.shape[1], RingLayout(states.format.ring, **strides)),
        PATH=path.shape[1],
        PATH_BLOCK=power_of_2(path.shape[1]),
        BLOCK=_BLOCK,
        PDL=batch.pdl,
        num_warps=4,
        launch_pdl=batch.pdl,
    )


def _words(part: torch.Tensor) -> torch.Tensor:
    """[layers, slots, ring, ..] -> [layers, slots, ring, words of 32 bits]."""
    return part.flatten(3).view(torch.int32)


@kernel(do_not_specialize=["padding", "result_stride"])
def _keep_path(
    slots, length, state, result, path, inputs, gates, keys, misses, solved, sums, padding, result_stride,
    layout: tl.constexpr, PATH: tl.constexpr, PATH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B, layers, blocks of the widest row)."""
    after_previous(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    index = tl.arange(0, PATH_BLOCK)
    node = tl.load(path + sequence * PATH + index, mask=index < PATH, other=-1)
    moved = (slot != padding) & (node != index) & (node >= 0)
    if tl.max(moved.to(tl.int32), 0) > 0:
        start = tl.load(length + slot) - tl.load(result + sequence * result_stride)
        own = tl.load(state + slot).to(tl.int64)
        source, target = (start + node) % layout.ring, (start + index) % layout.ring
        _move(inputs, own, source, target, moved, layout.inputs, BLOCK)
        _move(gates, own, source, target, moved, layout.gates, BLOCK)
        _move(keys, own, source, target, moved, layout.keys, BLOCK)
        _move(misses, own, source, target, moved, layout.misses, BLOCK)
        _move(solved, own, source, target, moved, layout.solved, BLOCK)
        _move(sums, own, source, target, moved, layout.sums, BLOCK)


@triton.jit
def _move(part, slot, source, target, moved, strides: tl.constexpr, BLOCK: tl.constexpr):
    """A program's block of the rows of one part."""
    WIDTH: tl.constexpr = strides[2]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = moved[:, None] & (column < WIDTH)[None, :]
    part += tl.program_id(1).to(tl.int64) * strides[0] + slot * strides[1]
    taken = tl.load(part + source[:, None] * WIDTH + column[None, :], mask=there)
    tl.debug_barrier()  # another thread's target may be this one's source
    tl.store(part + target[:, None] * WIDTH + column[None, :], taken, mask=there)
