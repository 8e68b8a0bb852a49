"""Device tables: the state of every running sequence, indexed by slot.

All tables lie in one block of int32 memory, so the host changes any entry of any table by (place, word)
pairs. The last slot is for padding: padding rows read and write it. `eyas.engine.device.executor` decides
when they change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from eyas.common.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from eyas.engine.batch.sequence import RingPlace
from eyas.engine.batch.tree import DraftTree

LOOKING = ("prompt", "predicted", "tokens", "found", "headed", "lookup", "head")
"""Words of a slot's row in the table `looking`: ids before what is predicted; entries of the table
`predicted` (0: nothing was predicted); ids of the text when drafts were last proposed (0: never), the first
one that was looked up then (-1: none) and whether a head proposed; then how well both sources do
(`speculation.lookup`).
"""

_WORDS_OF = {torch.int32: 1, torch.float32: 1, torch.int64: 2}
MASK_BITS = 64
"""Rows that one word of a mask can show."""


def mask_words(rows: int) -> int:
    """Words of a mask over `rows` rows: bit r % 64 of word r // 64 says whether row r is seen."""
    return -(-rows // MASK_BITS)


@dataclass(frozen=True)
class TableSizes:
    """`slots`: with the padding slot. `max_pages`: per sequence. `width`: rows of the widest round.

    `context`: ids of a text that are kept. `endings`: ids that may end one output. `predicted`: ids that are
    kept of a prediction and of the prompt's end before it. `groups`: of layers that have pages of their own.
    """

    slots: int
    max_pages: int
    width: int = 1
    context: int = 1
    endings: int = MAX_STOP_TOKEN_IDS
    predicted: int = 1
    groups: int = 1

    @property
    def page_tables(self) -> list[str]:
        """The names of the tables of pages, one for each group of layers."""
        return ["pages", *(f"pages_{group}" for group in range(1, self.groups))]


class SlotTables:
    """Tensors [slots, ...], but `mask` [words, slots, nodes]; `memory` is the int32 block under them all."""

    def __init__(self, sizes: TableSizes, device: str) -> None:
        self.sizes = sizes
        nodes, drafts = sizes.width, max(sizes.width - 1, 1)
        columns = _columns(sizes)
        planes = {"mask": mask_words(nodes)}  # of all slots, one after the other; most trees need one
        self._places: dict[str, tuple[int, int]] = {}  # table -> (first word, words per slot)
        end = 0
        for name, (dtype, count) in columns.items():
            self._places[name] = (end, count * _WORDS_OF[dtype])
            end += sizes.slots * count * _WORDS_OF[dtype] * planes.get(name, 1)
            end += end % 2  # int64 columns begin at even words
        self.memory = torch.zeros(end, dtype=torch.int32, device=device)
        for name, (dtype, count) in columns.items():
            first, words = self._places[name]
            block = self.memory[first : first + sizes.slots * words * planes.get(name, 1)]
            view = block.view(dtype).view(-1, count)
            setattr(self, name, view if name in _WIDE or name in sizes.page_tables else view.view(-1))
        self.other_pages = [getattr(self, name) for name in sizes.page_tables[1:]]
        self.drafts.fill_(-1)
        self.waits.fill_(-1)
        chain = torch.arange(nodes, device=device)
        # A node sees none that is higher, so that the later words of the first 64 nodes are always 0, and who
        # writes a chain writes the first word alone.
        self.mask = self.mask.view(-1, sizes.slots, nodes)
        for word, view in enumerate(self.mask):
            seen = (chain + 1 - word * MASK_BITS).clamp(0, MASK_BITS)
            view.copy_(torch.where(seen == MASK_BITS, -1, (1 << seen % MASK_BITS) - 1))
        self.depth.copy_(chain)
        self.parents.copy_(torch.arange(-1, drafts - 1, device=device))

    seed: torch.Tensor
    mask: torch.Tensor
    ring: torch.Tensor
    mailbox: torch.Tensor
    ring_generation: torch.Tensor
    polls: torch.Tensor
    missed: torch.Tensor
    pages: torch.Tensor
    length: torch.Tensor
    root: torch.Tensor
    drafts: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    waits: torch.Tensor
    speculative: torch.Tensor
    adapter: torch.Tensor
    most_topk: torch.Tensor
    most_nodes: torch.Tensor
    choice: torch.Tensor
    state: torch.Tensor
    bound: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    looking: torch.Tensor
    predicted: torch.Tensor
    text: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor
    endings: torch.Tensor
    bad_words: torch.Tensor

    @property
    def padding_slot(self) -> int:
        """The last slot, which no sequence has."""
        return self.sizes.slots - 1

    def places(self, name: str, slot: int, start: int, count: int) -> range:
        """The words of `memory` that hold `count` entries of a one-word table's row, from entry `start`."""
        first, words = self._places[name]
        begin = first + slot * words + start
        return range(begin, begin + count)

    def apply(self, writes: torch.Tensor) -> None:
        """memory[writes[0]] = writes[1], for `writes` int32 [2, n] on the device; a place that is named
        twice gets the same value twice."""
        self.memory.index_copy_(0, writes[0].long(), writes[1])


_WIDE = {
    *("mask", "pages", "drafts", "parents", "depth", "looking", "predicted", "text"),
    *("bias_ids", "bias", "endings", "bad_words"),
}


def _columns(sizes: TableSizes) -> dict[str, tuple[torch.dtype, int]]:
    """The dtype of each table, and its entries per slot."""
    nodes, drafts = sizes.width, max(sizes.width - 1, 1)
    columns = {
        "seed": (torch.int64, 1),
        "mask": (torch.int64, nodes),  # bit r of node j: node r is visible from node j (0: the root)
        "ring": (torch.int64, 1),  # the address of its rows in a draft worker's GPU; 0: nowhere
        "mailbox": (torch.int64, 1),  # the address of its place in a draft worker's mailbox; 0: nowhere
        "ring_generation": (torch.int32, 1),  # as which it is known at both
        "polls": (torch.int32, 1),  # how often its round looks there for drafts, before it has none ..
        "missed": (torch.int32, 1),  # .. and for how many rounds in a row it found none
        "pages": (torch.int32, sizes.max_pages),
        "length": (torch.int32, 1),  # rows with valid KV, which is the root token's position
        "root": (torch.int32, 1),  # the newest committed token; its row is not computed yet
        "drafts": (torch.int32, drafts),  # tokens proposed below the root; -1: none
        "parents": (torch.int32, drafts),  # the draft's parent: a draft's index, or -1 for the root
        "depth": (torch.int32, nodes),  # how far node j lies below the root
        "waits": (torch.int32, 1),  # the first row that waits for a draft head in the step; -1: none does
        "speculative": (torch.int32, 1),  # how deep this sequence's drafts may be; 0: none is proposed
        "most_topk": (torch.int32, 1),  # children of a draft that are verified (0: all) ..
        "most_nodes": (torch.int32, 1),  # .. and drafts in all, where a head or a mailbox gives trees
        "adapter": (torch.int32, 1),  # the slot of its adapter, if adapters update a head; 0: none
        "choice": (torch.int32, 1),
        "state": (torch.int32, 1),  # its slot of states, if layers have some ..
        "bound": (torch.int32, 1),  # .. and where its state stands
        "top_k": (torch.int32, 1),  # 0: off
        "temperature": (torch.float32, 1),
        "top_p": (torch.float32, 1),
        "min_p": (torch.float32, 1),
        # Where drafts are looked up; no other sequence's entries mean anything.
        "looking": (torch.int32, len(LOOKING)),
        "predicted": (torch.int32, sizes.predicted),  # ids, as `lookup.SequenceText.searched` has them
        # What only special rows read, and the lookup; entries that neither counts mean nothing.
        "text": (torch.int32, sizes.context),  # ids by position, up to the root
        "bias_ids": (torch.int32, MAX_BIASED_TOKENS),
        "bias": (torch.float32, MAX_BIASED_TOKENS),
        "endings": (torch.int32, sizes.endings),
        "bad_words": (torch.int32, MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS),  # each from its end, then -1
    }
    return columns | {name: (torch.int32, sizes.max_pages) for name in sizes.page_tables[1:]}


class TableWrites:
    """The host's changes to the tables for one step, collected as (place, word) pairs: each place once."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._places: list[int] = []
        self._words: list[int] = []

    def put(self, name: str, slot: int, words: Iterable[int], start: int = 0) -> None:
        """Sets the entries `start`, `start` + 1, ... of the slot's row in a table of one-word entries."""
        words = list(words)
        self._places += self._tables.places(name, slot, start, len(words))
        self._words += words

    def occupy(self, slot: int, params: SamplingParams, choice: int, *, speculative: int) -> None:
        """Sets everything about a sequence that does not change while it runs."""
        seed = params.seed or 0
        self.put("seed", slot, _halves(seed))
        self.put("choice", slot, (choice,))
        self.put("top_k", slot, (min(params.top_k, 2**31 - 1) if params.top_k > 0 else 0,))
        floats = (params.temperature, params.top_p, params.min_p)
        for name, word in zip(("temperature", "top_p", "min_p"), _bits(floats), strict=True):
            self.put(name, slot, (word,))
        self.put("speculative", slot, (speculative,))
        self.put("waits", slot, (-1,))

    def draft(self, slot: int, tree: DraftTree, *, branching: bool) -> None:
        """Drafts that came from elsewhere, or none, below the slot's root; the tables' chain is as good as a
        `tree`'s.

        `branching`: other proposals are trees, so this one's shape is written down too.
        """
        nodes, most = len(tree), self._tables.drafts.shape[1]
        self.put("drafts", slot, [*tree.tokens, *[-1] * (most - nodes)])
        if not branching:
            return
        depths, masks = [0], [1]
        for node, parent in enumerate(tree.parents):
            depths.append(depths[parent + 1] + 1)
            masks.append(masks[parent + 1] | 1 << (node + 1))
        self.put("parents", slot, tree.parents)
        self.put("depth", slot, depths)
        for node, mask in enumerate(masks):
            for word in range(mask_words(node + 1)):
                part = mask >> MASK_BITS * word
                self.put("mask", slot, _halves(part), start=2 * (word * self._tables.mask[0].numel() + node))

    def ring(self, slot: int, place: RingPlace | None) -> None:
        """Sets where a slot's accepted rows go from now on and where its drafts come from; None: nowhere."""
        self.put("ring", slot, _halves(0 if place is None else place.address))
        self.put("mailbox", slot, _halves(0 if place is None else place.mailbox))
        self.put("ring_generation", slot, (0 if place is None else place.generation,))
        self.put("missed", slot, (0,))

    def occupy_special(self, slot: int, params: SamplingParams, endings: Iterable[int]) -> None:
        """The lists that processors read. `endings`: ids that would end the output."""
        self.put("bias_ids", slot, params.logit_bias)
        self.put("bias", slot, _bits(params.logit_bias.values()))
        self.put("endings", slot, endings)
        for i, word in enumerate(params.bad_words):
            words = [*reversed(word), -1][:MAX_BAD_WORD_TOKENS]
            self.put("bad_words", slot, words, start=i * MAX_BAD_WORD_TOKENS)

    def array(self) -> np.ndarray:
        """All writes as int32 [2, n], the argument of `SlotTables.apply`."""
        return np.array([self._places, self._words], np.int32).reshape(2, -1)


def _halves(word: int) -> tuple[int, int]:
    """The 64 bits as two int32, the lower first."""
    return _signed(word & 0xFFFFFFFF), _signed(word >> 32 & 0xFFFFFFFF)


def _signed(word: int) -> int:
    """A 32-bit word as int32."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _bits(values: Iterable[float]) -> list[int]:
    """The bits of each float32 as an int32."""
    bits: list[int] = np.array(list(values), np.float32).view(np.int32).tolist()
    return bits
