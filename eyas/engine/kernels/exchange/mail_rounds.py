"""A draft worker's device at its end of the mailboxes: it waits for rounds, and leaves drafts there.

`eyas.engine.ipc.mailbox` says what the words of 8 bytes mean, whose ends for a host are the specification:
`DraftMailbox.rounds` and `propose`. The other end is a decode engine's device (`mailbox` beside this). A wait
ends after a number of looks, which needs no clock, or once the host ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.ipc.mailbox import NEWEST, MailLayout
from eyas.engine.ipc.row_ring import GOLDEN, ROUND
from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch, RoundRows, physical_rows
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import power_of_2

SETTLED = 8
"""Looks after the newest arrival, some 10 us: a step posts the rounds of all its sequences at once, so that
those which are still missing then are of no such step, or of none.
"""
WRONG = -1
"""Instead of a number of rows: one of their tokens is none."""

_GOLDEN, _ROUND = (tl.constexpr(each - (1 << 32)) for each in (GOLDEN, ROUND))  # as int32
_TOKEN = tl.constexpr(NEWEST - 1)
_NEWEST = tl.constexpr(NEWEST)
_SETTLED = tl.constexpr(SETTLED)
_WRONG = tl.constexpr(WRONG)
_ANY = (
    *(*PLAIN, "slots", "mailboxes", "rings", "generations", "stop", "size", "vocab", "looks", "row_bytes"),
    *("missing", "lost"),
)


@dataclass(frozen=True)
class MailWait:
    """How long rounds are waited for: `looks`, or until `stop` int32 [1], which the host can write, is not 0.

    `row_bytes`: of a row in the rings of features. `vocab`: tokens are below it.
    """

    place: MailLayout
    row_bytes: int
    vocab: int
    looks: int
    stop: Tensor


@dataclass(frozen=True)
class HeardRows:
    """Certain rows of B sequences, up to P of each. `slots` int32 [B]: the padding slot where none came,
    whose rows are empty. `last` int32 [B]: which of `rows` is each one's newest. `rings` int64 [2, B * P]:
    where their features are, as `row_ring.take` has them. `counts` int32 [B]: how many came, or WRONG.
    """

    slots: Tensor
    rows: RoundRows
    last: Tensor
    rings: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, batch: int, few: int, device: str) -> HeardRows:
        """Memory for a batch of sequences, with up to `few` rows each."""
        count = batch * few
        slots, starts, last, counts = (_zeros(batch, device) for _ in range(4))
        tokens, positions, kv_rows = (_zeros(count, device) for _ in range(3))
        rows = RoundRows(tokens, positions, kv_rows, starts)
        return cls(slots, rows, last, torch.zeros(2, count, dtype=torch.int64, device=device), counts)

    @property
    def few(self) -> int:
        """P."""
        return self.rows.tokens.shape[0] // self.slots.shape[0]


@dataclass(frozen=True)
class TakenFeatures:
    """Features that were taken before it was known which rows are certain. `missing` int32 [B * P]: 1 where a
    row was not there; `lost` int32 [B] becomes 1 where that row is certain.
    """

    missing: Tensor
    lost: Tensor


def _zeros(count: int, device: str) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def watch(batch: RoundBatch, wait: MailWait, coming: HeardRows) -> None:
    """Waits until features of the next rounds of all sequences with a mailbox come, or of some and no more:
    they leave before it is known which rows are certain.

    The first P rows from each one's length on become its rows, without tokens; none has changed a table.
    """
    tables, rows = batch.tables, coming.rows
    _watch[(1,)](
        *(batch.slots, tables.mailbox, tables.ring, tables.ring_generation, tables.length, tables.pages),
        *(wait.stop, coming.slots, rows.tensors, coming.rings),
        *(batch.size, tables.padding_slot, tables.pages.shape[1], wait.looks, wait.row_bytes),
        RING=wait.place.rows,
        FEW=coming.few,
        PAGE_SIZE=batch.page_size,
        BLOCK=power_of_2(batch.size),
        ROWS=power_of_2(coming.few),
        num_warps=1,
    )


@kernel(do_not_specialize=_ANY)
def _watch(
    slots,
    mailboxes,
    rings,
    generations,
    length,
    pages,
    stop,
    out_slots,
    out,
    out_rings,
    size,
    padding,
    max_pages,
    looks,
    row_bytes,
    RING: tl.constexpr,
    FEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence = tl.arange(0, BLOCK)
    index = tl.arange(0, ROWS)[None, :]
    inside = sequence < size
    slot = tl.load(slots + sequence, mask=inside, other=padding)
    live = inside & (slot != padding) & (tl.load(mailboxes + slot) != 0)
    start = tl.load(length + slot)
    ring = tl.load(rings + slot)
    tag = tl.load(generations + slot) * _GOLDEN + start * _ROUND + 1
    first = (ring + (start % RING).to(tl.int64) * row_bytes).to(tl.pointer_type(tl.int64))
    there = _begun(first, tag + start, live, stop, looks)
    own = there[:, None] & (index < FEW)
    position = start[:, None] + index
    at = sequence[:, None] * FEW + index
    stored = inside[:, None] & (index < FEW)
    nothing = tl.zeros_like(position)
    _store_rows(out, at, stored, own, nothing, position, slot, pages, max_pages, PAGE_SIZE)
    address = ring[:, None] + (position % RING).to(tl.int64) * row_bytes
    tl.store(out_rings + at, tl.where(own, address, 0), mask=stored)
    tl.store(out_rings + size * FEW + at, (tag[:, None] + position).to(tl.int64), mask=stored)
    tl.store(out[3] + sequence, tl.where(there, start, 0), mask=inside)
    tl.store(out_slots + sequence, tl.where(there, slot, padding), mask=inside)


@triton.jit
def _begun(first, tag, live, stop, looks):
    """Looks until the first words of rows are there: of which sequences they are. Rows take longer than words
    to come, and a look here is shorter.
    """
    there = live & ((tl.load(first, mask=live, other=0, volatile=True) >> 32).to(tl.int32) == tag)
    living = tl.sum(live.to(tl.int32), axis=0)
    came = tl.sum(there.to(tl.int32), axis=0)
    looked = 1
    quiet = 0
    stopped = tl.load(stop, volatile=True)
    while (came < living) & (looked < looks) & (quiet < 4 * _SETTLED) & ((came > 0) | (stopped == 0)):
        there = live & ((tl.load(first, mask=live, other=0, volatile=True) >> 32).to(tl.int32) == tag)
        stopped = tl.load(stop, volatile=True)
        now = tl.sum(there.to(tl.int32), axis=0)
        quiet = tl.where((now == came) & (now > 0), quiet + 1, 0)
        came = now
        looked += 1
    return there


@triton.jit
def _store_rows(out, at, stored, own, token, position, slot, pages, max_pages, PAGE_SIZE: tl.constexpr):
    """Stores the token, position and physical row of each row; `own`: which rows are a sequence's."""
    kv_row = physical_rows(pages, slot[:, None], position, own, max_pages, PAGE_SIZE)
    tl.store(out[0] + at, tl.where(own, token, 0), mask=stored)
    tl.store(out[1] + at, tl.where(own, position, 0), mask=stored)
    tl.store(out[2] + at, kv_row, mask=stored)


def hear(batch: RoundBatch, wait: MailWait, heard: HeardRows, features: TakenFeatures | None = None) -> None:
    """Waits until the next rounds of all sequences with a mailbox are there, or of some and no more come.

    Each one's round becomes its rows; its length and its root count them from now on. `features`: where they
    have been taken before.
    """
    tables, rows = batch.tables, heard.rows
    missing, lost = (None, None) if features is None else (features.missing, features.lost)
    _hear[(1,)](
        *(batch.slots, tables.mailbox, tables.ring, tables.ring_generation, tables.length, tables.root),
        *(tables.pages, wait.stop, heard.slots, rows.tensors, heard.last, heard.rings, heard.counts),
        *(missing, lost),
        *(batch.size, wait.vocab, tables.padding_slot, tables.pages.shape[1], wait.looks, wait.row_bytes),
        RING=wait.place.rows,
        FEW=heard.few,
        PAGE_SIZE=batch.page_size,
        BLOCK=power_of_2(batch.size),
        ROWS=power_of_2(heard.few),
        num_warps=1,  # all lanes see the same in one look, and end together
    )


@kernel(do_not_specialize=_ANY)
def _hear(
    slots,
    mailboxes,
    rings,
    generations,
    length,
    root,
    pages,
    stop,
    out_slots,
    out,
    last,
    out_rings,
    counts,
    missing,
    lost,
    size,
    vocab,
    padding,
    max_pages,
    looks,
    row_bytes,
    RING: tl.constexpr,
    FEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    sequence = tl.arange(0, BLOCK)
    index = tl.arange(0, ROWS)[None, :]
    inside = sequence < size
    slot = tl.load(slots + sequence, mask=inside, other=padding)
    address = tl.load(mailboxes + slot)
    live = inside & (slot != padding) & (address != 0)
    start = tl.load(length + slot)
    position = start[:, None] + index
    tag = tl.load(generations + slot)[:, None] * _GOLDEN + position + 1
    words = address[:, None].to(tl.pointer_type(tl.int64)) + position % RING
    count, word = _arrived(words, tag, live[:, None] & (index < FEW), index, live, stop, looks, ROWS)
    token = (word & _TOKEN).to(tl.int32)
    came = index < count[:, None]
    wrong = tl.max((came & (token >= vocab)).to(tl.int32), axis=1) != 0
    good = (count > 0) & (wrong == 0)
    own = came & good[:, None]
    at = sequence[:, None] * FEW + index
    stored = inside[:, None] & (index < FEW)
    _store_rows(out, at, stored, own, token, position, slot, pages, max_pages, PAGE_SIZE)
    if missing is not None:
        gone = tl.load(missing + at, mask=stored & own, other=0)
        tl.store(lost + sequence, tl.max(gone, axis=1), mask=inside)
    ring = tl.load(rings + slot)[:, None] + (position % RING).to(tl.int64) * row_bytes
    tl.store(out_rings + at, tl.where(own, ring, 0), mask=stored)
    tl.store(out_rings + size * FEW + at, (tag + start[:, None] * _ROUND).to(tl.int64), mask=stored)
    tl.store(out[3] + sequence, tl.where(good, start, 0), mask=inside)
    tl.store(out_slots + sequence, tl.where(good, slot, padding), mask=inside)
    tl.store(last + sequence, tl.where(good, sequence * FEW + count - 1, 0), mask=inside)
    tl.store(counts + sequence, tl.where(wrong, _WRONG, count), mask=inside)
    newest = tl.sum(tl.where(index == count[:, None] - 1, token, 0), axis=1)
    tl.store(length + slot, start + count, mask=good)
    tl.store(root + slot, newest, mask=good)


@triton.jit
def _arrived(words, tag, expected, index, live, stop, looks, ROWS: tl.constexpr):
    """Looks until whole rounds are there: how many rows that of each sequence has, int32, and its words."""
    word = tl.load(words, mask=expected, other=0, volatile=True)
    count = _whole(word, tag, expected, index, ROWS)
    living = tl.sum(live.to(tl.int32), axis=0)
    came = tl.sum((count > 0).to(tl.int32), axis=0)
    looked = 1
    quiet = 0
    stopped = tl.load(stop, volatile=True)
    while (came < living) & (looked < looks) & (quiet < _SETTLED) & ((came > 0) | (stopped == 0)):
        word = tl.load(words, mask=expected, other=0, volatile=True)
        stopped = tl.load(stop, volatile=True)
        count = _whole(word, tag, expected, index, ROWS)
        now = tl.sum((count > 0).to(tl.int32), axis=0)
        quiet = tl.where((now == came) & (now > 0), quiet + 1, 0)
        came = now
        looked += 1
    return count, word


@triton.jit
def _whole(word, tag, expected, index, ROWS: tl.constexpr):
    """How many rows the next round of each sequence has, if all are there; else 0."""
    there = expected & ((word >> 32).to(tl.int32) == tag)
    gap = tl.min(tl.where(there, ROWS, index), axis=1)
    ends = there & ((word & _NEWEST) != 0)
    end = tl.min(tl.where(ends, index, ROWS), axis=1)
    return tl.where(end < gap, end + 1, 0)


def answer(tables: SlotTables, slots: Tensor, lost: Tensor, place: MailLayout) -> None:
    """The chains in the tables of drafts become the proposals below the roots of `slots` int32 [B], in their
    mailboxes; not of those with `lost` int32 [B] set, nor of padding.
    """
    drafts = tables.drafts.shape[1]
    _answer[(slots.shape[0],)](
        *(slots, lost, tables.mailbox, tables.ring_generation, tables.length, tables.drafts),
        *(tables.padding_slot, drafts),
        RING=place.rows,
        NODES=place.nodes,
        BLOCK=power_of_2(max(drafts, place.nodes)),
        num_warps=1,
    )


@kernel(do_not_specialize=(*_ANY, "lost"))
def _answer(
    slots,
    lost,
    mailboxes,
    generations,
    length,
    drafts,
    padding,
    drafts_stride,
    RING: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    if (slot != padding) & (tl.load(lost + sequence) == 0):
        node = tl.arange(0, BLOCK)
        inside = (node < drafts_stride) & (node < NODES)
        token = tl.load(drafts + slot * drafts_stride + node, mask=inside, other=-1)
        count = tl.min(tl.where(token < 0, node, BLOCK), axis=0)
        tag = tl.load(generations + slot) * _GOLDEN + tl.load(length + slot) + 1
        above = tag.to(tl.int64) << 32
        proposal = tl.load(mailboxes + slot).to(tl.pointer_type(tl.int64)) + RING
        real = inside & (node < count)
        tl.store(proposal + 1 + node, above | token.to(tl.int64), mask=real)
        parent = (node - 1).to(tl.int64) & 0xFFFFFFFF
        tl.store(proposal + 1 + NODES + node, above | parent, mask=real)
        tl.store(proposal, above | count.to(tl.int64))
