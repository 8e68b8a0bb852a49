"""A round on the device: the rows that its forward reads, and its verdict.

The kernels read and write the tables by slot. So a round starts where the last one ended, and the host need
not know where that was. Rows of the padding slot write no KV, and its tables never change (it is not
speculative). The verdict's specification is `eyas.engine.speculation.verify`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.sampling.ranking import marked, unmarked

# Tables start at any word and have any size: not specialised, so that one compiled kernel serves all.
PLAIN = (
    *("length", "root", "drafts", "parents", "mask", "depth", "pages", "speculative", "seed"),
    *("rows", "padding", "max_pages", "drafts_stride", "nodes_stride", "step", "level"),
    *("text", "context", "most_topk", "most_nodes", "behind"),
)
LANES = 128  # rows per program, in kernels with one lane per row
FACTS = 3
"""Words of a round's result before its tokens: the number of tokens, the depth and the number of drafts. The
depth is `ranking.marked` if the logits that gave the last of the tokens are not finite.
"""
SYNTHETIC_CHOICE = tl.constexpr(-1)  # the choice in the key of synthetic draws; no real choice has it


@dataclass(frozen=True)
class RoundBatch:
    """The sequences of a round: `slots` int32 [B]. `pdl`: use programmatic dependent launch.

    `behind`: how many rows behind its root's the row of a first draft is, of who drafts for them.
    """

    tables: SlotTables
    slots: Tensor
    page_size: int
    pdl: bool = False
    behind: int = 0

    @property
    def size(self) -> int:
        """B."""
        return self.slots.shape[0]


@dataclass(frozen=True)
class RoundRows:
    """Inputs of a forward of R = B * W rows, all int32: `tokens`, `positions`, `kv_rows` [R], `starts` [B].

    Row j of sequence b is logical row starts[b] + j, and row b * W + j here. `kv_rows` are physical rows,
    page * page_size + slot; -1: an empty row, which writes nothing; its token and position are 0.
    """

    tokens: Tensor
    positions: Tensor
    kv_rows: Tensor
    starts: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four, in the order in which kernels take them."""
        return self.tokens, self.positions, self.kv_rows, self.starts


@dataclass(frozen=True)
class RoundVerdicts:
    """`result` int32 [B, FACTS + W]: the number of tokens emitted (a + 1), the depth and the number of the
    drafts, then the tokens. `path` int32 [B, P]: the accepted nodes, root (0) first. Unused entries are -1.

    P <= W: a walk ends at depth P - 1, which should be the depth of the deepest draft.
    """

    result: Tensor
    path: Tensor

    @property
    def width(self) -> int:
        """W: nodes of a round, its root included."""
        return self.result.shape[1] - FACTS


@triton.jit
def physical_rows(pages, slot, row, real, max_pages, PAGE_SIZE: tl.constexpr):
    """The physical row of logical `row` of `slot`; -1 where `real` is false, or past the page table."""
    real = real & (row < max_pages * PAGE_SIZE)
    page = tl.load(pages + slot * max_pages + row // PAGE_SIZE, mask=real, other=0)
    return tl.where(real, page * PAGE_SIZE + row % PAGE_SIZE, -1)


@triton.jit
def store_rows(out, row, token, position, kv_row, inside):
    """Writes to `out`, which is RoundRows.tensors. An empty row (kv_row -1) gets token and position 0."""
    tl.store(out[0] + row, tl.where(kv_row >= 0, token, 0), mask=inside)
    tl.store(out[1] + row, tl.where(kv_row >= 0, position, 0), mask=inside)
    tl.store(out[2] + row, kv_row, mask=inside)


def prepare(batch: RoundBatch, rows: RoundRows, mask: Tensor) -> None:
    """Writes the rows of a round: each sequence's root, then its drafts.

    `mask` int64 [words, B, W] receives the masks of the tables: bit r % 64 of word r // 64 of entry j says
    that node j sees node r. If W is less than the width of the tables, the round has the first W nodes. A
    node without a draft is empty.
    """
    tables = batch.tables
    words, _, width = mask.shape
    _prepare[(cdiv(batch.size * width, LANES),)](
        batch.slots,
        tables.length,
        tables.root,
        tables.drafts,
        tables.mask,
        tables.depth,
        tables.pages,
        rows.tensors,
        mask,
        batch.size * width,
        tables.padding_slot,
        tables.pages.shape[1],
        tables.drafts.shape[1],
        tables.depth.shape[1],
        WORDS=words,
        WIDTH=width,
        PAGE_SIZE=batch.page_size,
        BLOCK=LANES,
        PDL=batch.pdl,
        num_warps=LANES // 32,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _prepare(
    slots,
    length,
    root,
    drafts,
    mask,
    depth,
    pages,
    out,
    round_mask,
    rows,
    padding,
    max_pages,
    drafts_stride,
    nodes_stride,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    sequence, node = row // WIDTH, row % WIDTH
    slot = tl.load(slots + sequence, mask=inside, other=padding)
    start = tl.load(length + slot)
    draft = tl.load(drafts + slot * drafts_stride + node - 1, mask=inside & (node > 0), other=-1)
    token = tl.where(node == 0, tl.load(root + slot), draft)
    real = inside & (slot != padding) & (token >= 0)
    kv_row = physical_rows(pages, slot, start + node, real, max_pages, PAGE_SIZE)
    below = tl.load(depth + slot * nodes_stride + node, mask=real, other=0)
    store_rows(out, row, token, start + below, kv_row, inside)
    tl.store(out[3] + sequence, start, mask=inside & (node == 0))
    for word in tl.static_range(WORDS):
        entry = (word * (padding + 1) + slot) * nodes_stride + node  # the padding slot is the last
        visible = tl.load(mask + entry, mask=inside, other=0)
        tl.store(round_mask + word * rows + row, visible, mask=inside)


def verdict(batch: RoundBatch, chosen: Tensor, verdicts: RoundVerdicts, rates: Tensor | None = None) -> None:
    """Walks the drafts of a round of W nodes and commits those that the target agrees with.

    The first B * W entries of `chosen` int32 are the target's token at each node, marked where its logits are
    not finite: no draft agrees with such a one. The length grows by a + 1,
    the text by the tokens emitted, the last of them becomes the root, and the drafts are cleared (-1).

    `rates` float32 [P - 1] makes acceptance synthetic, for benchmarks only. Down the first path of the tree,
    draft i is accepted with probability rates[i] if the drafts above it were, whatever the target chose; the
    draw is keyed by (the slot's seed, length, i). Accepted tokens are drafts; the last is the target's.
    """
    tables = batch.tables
    result, path = verdicts.result, verdicts.path
    width = verdicts.width
    lanes = max(width, tables.drafts.shape[1] + 1)
    _verdict[(batch.size,)](
        batch.slots,
        chosen,
        tables.length,
        tables.root,
        tables.drafts,
        tables.parents,
        tables.depth,
        tables.seed,
        tables.text,
        result,
        path,
        rates,
        tables.padding_slot,
        tables.drafts.shape[1],
        tables.depth.shape[1],
        tables.text.shape[1],
        FACTS=FACTS,
        WIDTH=width,
        PATH=path.shape[1],
        BLOCK=power_of_2(lanes),
        SYNTHETIC=rates is not None,
        PDL=batch.pdl,
        num_warps=1,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=PLAIN)
def _verdict(
    slots,
    chosen,
    length,
    root,
    drafts,
    parents,
    depth,
    seed,
    text,
    result,
    path,
    rates,
    padding,
    drafts_stride,
    nodes_stride,
    context,
    FACTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    start = tl.load(length + slot)
    node = tl.arange(0, BLOCK)
    below = (node > 0) & (node < WIDTH)
    place = slot * drafts_stride + node - 1
    draft = tl.load(drafts + place, mask=below, other=-1)
    parent = tl.load(parents + place, mask=below, other=-1) + 1
    offered = draft >= 0
    limit = PATH - 1
    if SYNTHETIC:
        limit = _draw(tl.load(seed + slot) + slot, start, rates, PATH, BLOCK)
    accepted = 0
    nodes = tl.where(node == 0, 0, -1)
    tokens = tl.full([BLOCK], -1, tl.int32)
    token = tl.load(chosen + sequence * WIDTH)
    child = _child(node, offered & (parent == 0), draft, token, BLOCK, SYNTHETIC)
    while (child < BLOCK) & (accepted < limit):
        if SYNTHETIC:
            token = tl.sum(tl.where(node == child, draft, 0))
        tokens = tl.where(node == accepted, token, tokens)
        accepted += 1
        nodes = tl.where(node == accepted, child, nodes)
        token = tl.load(chosen + sequence * WIDTH + child)
        child = _child(node, offered & (parent == child), draft, token, BLOCK, SYNTHETIC)
    tokens = tl.where(node == accepted, unmarked(token), tokens)
    tl.store(path + sequence * PATH + node, nodes, mask=node < PATH)
    result += sequence * (FACTS + WIDTH)
    _store_facts(result, accepted, offered, depth + slot * nodes_stride + node, token < 0)
    tl.store(result + FACTS + node, tokens, mask=node < WIDTH)
    live = slot != padding
    tl.store(length + slot, start + accepted + 1, mask=live)
    tl.store(root + slot, unmarked(token), mask=live)
    _write(text + slot.to(tl.int64) * context, start + 1 + node, tokens, live & (node <= accepted), context)
    tl.store(drafts + place, tl.full([BLOCK], -1, tl.int32), mask=live & (node > 0) & (node <= drafts_stride))


@triton.jit
def _write(text, positions, tokens, accepted_rows, context):
    """Into a slot's text; what lies beyond it is not kept."""
    tl.store(text + positions, tokens, mask=accepted_rows & (positions < context))


@triton.jit
def _store_facts(out, accepted, offered, depth, broken):
    """The first FACTS words of a result. `depth`: where that of each draft stands."""
    tl.store(out, accepted + 1)
    deepest = tl.max(tl.load(depth, mask=offered, other=0))
    tl.store(out + 1, tl.where(broken, marked(deepest), deepest))
    tl.store(out + 2, tl.sum(offered.to(tl.int32)))


@triton.jit
def _child(node, below, draft, token, BLOCK: tl.constexpr, SYNTHETIC: tl.constexpr):
    """The first of the nodes `below` with this token (synthetic: with any token); BLOCK: there is none."""
    if not SYNTHETIC:
        below = below & (draft == token)
    return tl.min(tl.where(below, node, BLOCK))


@triton.jit
def _draw(seed, start, rates, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """The most drafts in a row that may be accepted; draft i may if its draw is below rates[i].

    `seed`: a slot has its own, since greedy requests, which have none, may be as long as each other.
    """
    step = tl.arange(0, BLOCK)
    still = tl.zeros([BLOCK], tl.int32)
    x, _, _, _ = tl.philox(seed, step, still + start, still + SYNTHETIC_CHOICE, still)
    rate = tl.load(rates + step, mask=step < PATH - 1, other=0.0)
    return tl.min(tl.where(tl.uint_to_uniform_float(x) < rate, PATH - 1, tl.minimum(step, PATH - 1)))
