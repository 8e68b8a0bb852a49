"""A step's device and a draft worker's host without a host between them: rounds into a mailbox, drafts out.

`eyas.engine.ipc.mailbox` says what the words of 8 bytes mean, and whose they are. `post` does not ask whether
a word has been read. `fetch` waits for drafts by looking again, a bounded number of times, since no clock is
needed for that; it believes nothing that it has not checked, and a sequence without drafts has a plain round.
What drafts from elsewhere leave in the tables without it: `TableWrites.draft`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from eyas.engine.batch.tables import SlotTables
from eyas.engine.ipc.mailbox import MISSED_ROUNDS, NEWEST, MailLayout
from eyas.engine.ipc.row_ring import GOLDEN
from eyas.engine.kernels.drafts.rounds import FACTS, PLAIN, RoundBatch
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2

POLL_S = 0.8e-6
"""Seconds of one look: a GPU reads memory of the host. On H200s 0.6 with one sequence, 1.0 with 32."""
MOST_POLLS = 1 << 15
"""No round waits longer, some 30 ms: a draft worker that has hung costs no more, a few times."""

_GOLDEN = tl.constexpr(GOLDEN - (1 << 32))  # as an int32
_NEWEST = tl.constexpr(NEWEST - (1 << 32))  # as an int32
_MISSED_ROUNDS = tl.constexpr(MISSED_ROUNDS)
_ANY = (*PLAIN, "slots", "mailboxes", "generations", "polls", "lates", "result", "vocab")


def polls_in(seconds: float) -> int:
    """How often a round looks that may wait so long: at least once; in two binary digits, which seldom
    change.
    """
    looks = min(max(int(seconds / POLL_S), 1), MOST_POLLS)
    unit = 1 << max(looks.bit_length() - 2, 0)
    return looks // unit * unit


@dataclass(frozen=True)
class MailLimits:
    """Which drafts make sense: ids below `vocab`, and at most `deepest` of them in a row."""

    vocab: int
    deepest: int


def post(tables: SlotTables, slots: Tensor, result: Tensor, place: MailLayout) -> None:
    """Tells of the rows that a step has made certain, of those of `slots` int32 [B] that have a mailbox.

    `result` int32 [B, FACTS + W] as `rounds.RoundVerdicts` has it; lengths count these rows already.
    """
    size, words = result.shape
    _post[(size,)](
        *(slots, tables.mailbox, tables.ring_generation, tables.length, result, tables.padding_slot),
        FACTS=FACTS,
        WIDTH=words - FACTS,
        RING=place.rows,
        BLOCK=power_of_2(words - FACTS),
        num_warps=1,
    )


@kernel(do_not_specialize=_ANY)
def _post(
    slots,
    mailboxes,
    generations,
    length,
    result,
    padding,
    FACTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    address = tl.load(mailboxes + slot)
    if (slot != padding) & (address != 0):
        facts = result + sequence * (FACTS + WIDTH)
        count = tl.load(facts)
        index = tl.arange(0, BLOCK)
        inside = index < count
        position = tl.load(length + slot) - count + index
        token = tl.load(facts + FACTS + index, mask=inside, other=0)
        half = token | tl.where(index == count - 1, _NEWEST, 0)
        tag = tl.load(generations + slot) * _GOLDEN + position + 1
        word = (tag.to(tl.int64) << 32) | (half.to(tl.int64) & 0xFFFFFFFF)
        tl.store(address.to(tl.pointer_type(tl.int64)) + position % RING, word, mask=inside)


def fetch(batch: RoundBatch, place: MailLayout, reach: MailLimits) -> None:
    """The drafts of each sequence with a mailbox become those of the round that is about to be prepared.

    That is the proposal below its root. A slot looks `polls` times until all of it is there. It looks once if
    its last MISSED_ROUNDS rounds, or more, were `late`, but for a power of two of them. Drafts beyond the
    sequence's own depth are none (-1); a proposal that makes no sense, or branches, has none.
    """
    tables = batch.tables
    drafts = tables.drafts.shape[1]
    _fetch[(batch.size,)](
        batch.slots,
        tables.mailbox,
        tables.ring_generation,
        tables.polls,
        tables.missed,
        tables.length,
        tables.speculative,
        tables.drafts,
        reach.vocab,
        tables.padding_slot,
        drafts,
        RING=place.rows,
        NODES=place.nodes,
        DEEPEST=reach.deepest,
        BLOCK=power_of_2(max(place.nodes, drafts)),
        PDL=batch.pdl,
        num_warps=1,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=_ANY)
def _fetch(
    slots,
    mailboxes,
    generations,
    polls,
    lates,
    length,
    speculative,
    drafts,
    vocab,
    padding,
    drafts_stride,
    RING: tl.constexpr,
    NODES: tl.constexpr,
    DEEPEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    slot = tl.load(slots + tl.program_id(0))
    address = tl.load(mailboxes + slot)
    if (slot != padding) & (address != 0):
        tag = tl.load(generations + slot) * _GOLDEN + tl.load(length + slot) + 1
        late = tl.load(lates + slot)
        waits = (late < _MISSED_ROUNDS) | ((late & (late - 1)) == 0)
        looks = tl.where(waits, tl.load(polls + slot), 1)
        proposal = address.to(tl.pointer_type(tl.int64)) + RING
        node = tl.arange(0, BLOCK)
        count, token, parent = _arrived(proposal, tag, looks, node, NODES)
        tl.store(lates + slot, tl.where(count >= 0, 0, late + 1))
        real = node < count
        wrong = (token < 0) | (token >= vocab) | (parent != node - 1)
        own = real & (tl.max((real & wrong).to(tl.int32), axis=0) == 0)
        own = own & (node < tl.load(speculative + slot)) & (node < DEEPEST)
        tl.store(drafts + slot * drafts_stride + node, tl.where(own, token, -1), mask=node < drafts_stride)


@triton.jit
def _arrived(proposal, tag, looks, node, NODES: tl.constexpr):
    """Looks until a proposal with this tag is there: its number of nodes (-1: it did not come, or has more
    than there is room for), their tokens and their parents, int32.
    """
    tokens = tl.zeros(node.shape, tl.int64)
    parents = tl.zeros(node.shape, tl.int64)
    count = 0
    missing = 1
    looked = 0
    while (missing != 0) & (looked < looks):
        header = tl.load(proposal, volatile=True)
        there = (header >> 32).to(tl.int32) == tag
        count = header.to(tl.int32)
        inside = there & (node < count) & (node < NODES)
        tokens = tl.load(proposal + 1 + node, mask=inside, other=0, volatile=True)
        parents = tl.load(proposal + 1 + NODES + node, mask=inside, other=0, volatile=True)
        torn = inside & (((tokens >> 32).to(tl.int32) != tag) | ((parents >> 32).to(tl.int32) != tag))
        missing = tl.where(there, tl.max(torn.to(tl.int32), axis=0), 1)
        looked += 1
    count = tl.where((missing == 0) & (count >= 0) & (count <= NODES), count, -1)
    return count, tokens.to(tl.int32), parents.to(tl.int32)
