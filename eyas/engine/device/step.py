"""One step as integers: its shape, and all input of the device, in one int32 array.

A step has `rows` rows: first the rounds (B sequences of W rows: the root, and the drafts below it) and the
rows of sequences without drafts, whose tokens only the device knows, then the prompt chunks (C rows), which
only the host knows. Tensor-parallel ranks are sent exactly this. No device memory here.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from eyas.engine.batch.sections import ALIGNMENT, sections
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.window import FIRST_ROWS
from eyas.engine.kernels.drafts.rounds import FACTS
from eyas.engine.states.shape import SPAN
from kv_transfer.layout import pages_for

STATES = ("slots", "tables", "firsts", "counts", "starts", "bounds", "folds")
"""Columns of what a step's chunks are to layers with states: as `StateRows` has them, and a sequence's slot
in the tables.
"""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's arrays; a graph is captured for each that is worth it.

    `batch` sequences with `width` rows each, `chunk` prompt rows cut into `tiles` tiles, `ends` of which
    (rows) give a token. `singles`: sequences with one row each, for which nothing is drafted. `prompts`: the
    most sequences that its chunks are of; 0: there may be as many as tiles. `headless`: a head in the step
    lets its rows wait, and drafts are looked up alone. `adapted`: some of its rows have an adapter.
    """

    batch: int
    width: int = 1
    chunk: int = 0
    tiles: int = 0
    ends: int = 0
    singles: int = 0
    prompts: int = 0
    headless: bool = field(default=False, kw_only=True)
    adapted: bool = field(default=False, kw_only=True)

    @property
    def round_rows(self) -> int:
        """The number of rows that decode; those of prompts follow."""
        return self.batch * self.width + self.singles

    @property
    def rows(self) -> int:
        """All rows of a step: of its rounds, and of its chunks."""
        return self.round_rows + self.chunk

    @property
    def sampled(self) -> int:
        """Rows that give a token: all of a round's, then the chunks' ends."""
        return self.round_rows + self.ends

    def parts(self, stated: bool) -> dict[str, tuple[int, int]]:
        """`sections`, or `stated_sections` of a model whose layers have states."""
        return self.stated_sections if stated else self.sections

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """First word and number of words of each part of a step's array.

        `following`: the token after each chunk row, for the draft head, and a word that is never read.
        `sampled_slots`, `picked`: slot and row of each row that gives a token; `settled`: that token if it is
        known before the others are chosen, else -1. `tiles`: (slot, first chunk row, its position, rows), see
        `eyas.engine.kernels.attention.prefill`. `end_slots`, `end_positions`, `end_rows`: of the chunks'
        ends, whose tokens stand one further; the rows counted from the first chunk row. `adapters`: the slot
        of each row's adapter, 0: it has none.
        """
        return sections(self._counts)

    @cached_property
    def stated_sections(self) -> dict[str, tuple[int, int]]:
        """`sections`, and behind them what layers with states need of the chunks: `states`, a column of
        `STATES` for each sequence; `spans` and `span_ends`, as `StateGroups` has its table and ends.
        """
        counts = {
            "states": len(STATES) * self.chunk_sequences,
            "spans": 2 * self.state_spans,
            "span_ends": self.chunk_sequences,
        }
        return sections(self._counts | counts)

    @property
    def _counts(self) -> dict[str, int]:
        return {
            "slots": self.batch,
            "single_slots": self.singles,
            "tokens": self.rows,
            "positions": self.rows,
            "kv_rows": self.rows,
            "following": self.chunk + 1,
            "picked": self.sampled,
            "sampled_slots": self.sampled,
            "settled": self.sampled,
            "tiles": 4 * self.tiles,
            "end_slots": self.ends,
            "end_positions": self.ends,
            "end_rows": self.ends,
            "adapters": self.rows if self.adapted else 0,
        }

    @property
    def chunk_sequences(self) -> int:
        """The most sequences that its chunks are of, and one of padding or more: with this number columns
        begin on 16 bytes, so that kernels have one variant for all steps.
        """
        return -(-((self.prompts or self.tiles) + 1) // ALIGNMENT) * ALIGNMENT if self.chunk else 0

    @property
    def state_spans(self) -> int:
        """The most spans of SPAN rows, from where states stand on, that have rows of its chunks."""
        return self.chunk // SPAN + 2 * (self.prompts or self.tiles) if self.chunk else 0

    @property
    def headed(self) -> int:
        """Rows of a round, as far as a head in the step drafts below it; 1: it does not."""
        return 1 if self.headless else self.width

    @property
    def drafts(self) -> bool:
        """True if it has rows that a draft head follows."""
        return bool(self.batch or self.chunk)

    @property
    def result_ends(self) -> tuple[int, int, int]:
        """Words of what a step tells the host, up to the end of each part.

        `RoundVerdicts.result` of the rounds, the same of the singles, the ends' tokens; then, to
        the last word, `RoundVerdicts.path` of the rounds.
        """
        rounds = self.batch * (FACTS + self.width)
        singles = rounds + self.singles * (FACTS + 1)
        return rounds, singles, singles + self.ends


@dataclass(frozen=True)
class PlacedBatch:
    """The works of a step in the order of their rows: rounds, sequences with one row each, prompt chunks."""

    rounds: SequenceOf[SequenceWork]
    singles: SequenceOf[SequenceWork]
    chunks: SequenceOf[SequenceWork]

    @property
    def adapted(self) -> bool:
        """True if a sequence has an adapter."""
        return any(work.seq.adapter_slot for work in (*self.rounds, *self.singles, *self.chunks))

    @property
    def ends(self) -> list[SequenceWork]:
        """The chunks that end their prompt, and so give a token."""
        return [work for work in self.chunks if work.sample]


@dataclass(frozen=True)
class FeatureRequest:
    """Features that a drafter elsewhere needs on the host: of `decoded`, rows of `StepProgram.certain`; then
    of `rows` of the forward, those of prompts.
    """

    decoded: SequenceOf[int]
    rows: SequenceOf[int]


@dataclass(frozen=True)
class MailedPrompts:
    """The last rows of E prompts that end in a step, up to P of each, for the mailboxes of their slots.

    `slots` int32 [E]; `rows` int32 [E, P]: places in the forward; `words` int32 [E, FACTS + FIRST_ROWS], as
    results of rounds: how many rows there are, and their tokens but the last, which the step chooses.
    """

    slots: np.ndarray
    rows: np.ndarray
    words: np.ndarray

    @classmethod
    def of(cls, chunks: SequenceOf[SequenceWork], first: int) -> Self | None:
        """Those of a step's chunks, whose rows stand in the forward from `first` on; None: there are none."""
        ends = first + np.cumsum([len(work.tokens) for work in chunks])
        mailed = [(work, end) for work, end in zip(chunks, ends.tolist(), strict=True) if work.mailed_rows]
        if not mailed:
            return None
        most = max(work.mailed_rows for work, _ in mailed)
        rows = np.zeros((len(mailed), most), np.int32)
        words = np.zeros((len(mailed), FACTS + FIRST_ROWS), np.int32)
        for i, (work, end) in enumerate(mailed):
            count = words[i, 0] = work.mailed_rows
            rows[i, :count] = np.arange(end - count, end)
            words[i, FACTS : FACTS + count - 1] = work.tokens[len(work.tokens) - count + 1 :]
        return cls(np.array([work.seq.slot for work, _ in mailed], np.int32), rows, words)

    @classmethod
    def padding(cls, slot: int) -> Self:
        """Of one row that is mailed nowhere."""
        words = np.zeros((1, FACTS + FIRST_ROWS), np.int32)
        words[0, 0] = 1
        return cls(np.array([slot], np.int32), np.zeros((1, 1), np.int32), words)


class ArrivedState(NamedTuple):
    """A slot of states whose rows came from elsewhere, or from another slot: where its state stands, and the
    end of its rows.
    """

    slot: int
    bound: int
    end: int


@dataclass(frozen=True)
class StepInput:
    """`data`: int32, the `shape.parts`. `writes`: int32 [2, n] for `SlotTables.apply`.

    `spans`: the chunks, in the order of their rows, where their attention may be planned on the host.
    `scored`: more of its rows will be asked for than those that give a token. `feature_request`: None: no
    features. `drafted_slots`: slots whose drafts the host wants to know, as `StepExecutor.drafts` tells them.
    `arrived`: slots of states that are new to the device, as `kernels.states.rings.remake` takes them.
    `recorded`: which experts its rows take will be asked for. `forced`: rows of `kernels.drafts.forced`, one
    after the other. `mailed`: None: no prompt's rows go to a mailbox.
    """

    shape: StepShape
    data: np.ndarray
    writes: np.ndarray
    spans: SequenceOf[QuerySpan] = ()
    scored: bool = False
    feature_request: FeatureRequest | None = None
    drafted_slots: SequenceOf[int] = ()
    arrived: SequenceOf[ArrivedState] = ()
    recorded: bool = False
    forced: SequenceOf[int] = ()
    mailed: MailedPrompts | None = None


class RowMasks(NamedTuple):
    """Sampled rows that have masks and are not special else: `places` int32 [n], below 0 none; `masks` int32
    [n, words].
    """

    places: np.ndarray
    masks: np.ndarray


NO_MASKS = RowMasks(np.empty(0, np.int32), np.empty((0, 1), np.int32))


@dataclass(frozen=True)
class JoinBatch:
    """J sequences before their first round whose drafts, and newest draft row below the root, are missing.

    `words` int32 [4, J]: each one's slot; of that row the token after it, its position and its physical row.
    `features` float32 [J, head width]: the row's; without a head, of width 0. `width`: rows of the rounds in
    the step that follows. `writes`: to the tables, before it, as a `StepInput` has them.
    """

    words: np.ndarray
    features: np.ndarray
    width: int
    writes: np.ndarray

    def filled(self, count: int, head_width: int, slot: int) -> JoinBatch:
        """A copy with `count` sequences: the added ones are padding, in `slot`, without a row."""
        missing = count - self.words.shape[1]
        padding = np.array([[slot], [0], [0], [-1]], np.int32).repeat(missing, 1)
        features = np.zeros((count, head_width), np.float32)
        features[: count - missing, : self.features.shape[1]] = self.features
        return replace(self, words=np.concatenate((self.words, padding), 1), features=features)


@dataclass(frozen=True)
class CatchUp:
    """Sequences whose rows wait for the draft head in its ring. `words`, `width`: as `DeviceDrafter.catch_up`
    has them.
    """

    words: np.ndarray
    width: int

    @staticmethod
    def padding(count: int, width: int, slot: int) -> CatchUp:
        """A batch of `count` sequences in the padding slot, which have no waiting rows."""
        return CatchUp(np.array([[slot] * count, [0] * count], np.int32), width)

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences, and rows of a round."""
        return self.words.shape[1], self.width


@dataclass(frozen=True)
class StepLayout:
    """The parameters of packing.

    `tile_rows`: prompt rows in a tile. `first_page`: of the pool that packed rows lie in, as the scheduler
    counts pages. `stated`: layers have states.
    """

    page_size: int
    padding_slot: int
    tile_rows: int
    first_page: int = 0
    stated: bool = False


def tiles_for(counts: SequenceOf[int], layout: StepLayout) -> int:
    """Tiles of chunks; `counts`: the rows of each chunk."""
    return sum(-(-count // layout.tile_rows) for count in counts)


def pack(placed: PlacedBatch, shape: StepShape, layout: StepLayout) -> np.ndarray:
    """The step's array: what was placed, in order, padded to `shape`."""
    parts = shape.parts(layout.stated)
    data = np.zeros(parts["all"][1], np.int32)
    part = {name: data[first : first + count] for name, (first, count) in parts.items()}
    part["slots"][:] = layout.padding_slot
    part["slots"][: len(placed.rounds)] = [work.seq.slot for work in placed.rounds]
    part["single_slots"][:] = layout.padding_slot
    part["single_slots"][: len(placed.singles)] = [work.seq.slot for work in placed.singles]
    wide = np.repeat(part["slots"], shape.width)
    part["sampled_slots"][: shape.round_rows] = np.concatenate((wide, part["single_slots"]))
    part["sampled_slots"][shape.round_rows :] = part["end_slots"][:] = layout.padding_slot
    part["settled"][:] = -1
    part["picked"][: shape.round_rows] = np.arange(shape.round_rows)
    part["picked"][shape.round_rows :] = shape.round_rows
    part["kv_rows"][:] = -1
    part["end_rows"][:] = shape.chunk
    _pack_chunks(placed.chunks, part, shape, layout)
    if shape.adapted:
        _pack_adapters(placed, part["adapters"], shape)
    if shape.chunk and layout.stated:
        _pack_states(placed.chunks, part, shape, layout)
    return data


def _pack_adapters(placed: PlacedBatch, adapters: np.ndarray, shape: StepShape) -> None:
    """The slot of each row's adapter; rows of padding have none."""
    wide, first = shape.batch * shape.width, shape.round_rows
    rounds = np.array([work.seq.adapter_slot for work in placed.rounds], np.int32).repeat(shape.width)
    singles = [work.seq.adapter_slot for work in placed.singles]
    chunks = [slot for work in placed.chunks for slot in [work.seq.adapter_slot] * len(work.tokens)]
    for start, slots in ((0, rounds), (wide, singles), (first, chunks)):
        adapters[start : start + len(slots)] = slots


def _pack_states(
    chunks: SequenceOf[SequenceWork], part: dict[str, np.ndarray], shape: StepShape, layout: StepLayout
) -> None:
    """What layers with states need of the chunks: a column for each sequence, and `StateGroups.table`."""
    columns, spans = part["states"].reshape(len(STATES), -1), part["spans"].reshape(-1, 2)
    columns[STATES.index("tables")] = layout.padding_slot
    row, end = shape.round_rows, 0
    for number, work in enumerate(chunks):
        seq, count = work.seq, len(work.tokens)
        columns[:, number] = seq.state, seq.slot, row, count, work.start, seq.bound, work.fold
        for first in range(seq.bound, work.start + count, SPAN):
            spans[end] = number, first
            end += 1
        part["span_ends"][number] = end
        row += count
    part["span_ends"][len(chunks) :] = end
    spans[end:, 0] = columns.shape[1] - 1


def _pack_chunks(
    chunks: SequenceOf[SequenceWork], part: dict[str, np.ndarray], shape: StepShape, layout: StepLayout
) -> None:
    tiles = part["tiles"].reshape(-1, 4)
    row, end, tile = shape.round_rows, 0, []
    for work in chunks:
        seq, count = work.seq, len(work.tokens)
        here, inside = slice(row, row + count), row - shape.round_rows
        positions = np.arange(work.start, work.start + count, dtype=np.int32)
        part["tokens"][here] = work.tokens
        part["positions"][here] = positions
        first = work.start // layout.page_size
        pages = np.array(seq.pages[first : pages_for(work.start + count, layout.page_size)], np.int32)
        pages -= layout.first_page
        part["kv_rows"][here] = pages[positions // layout.page_size - first] * layout.page_size + (
            positions % layout.page_size
        )
        part["following"][inside : inside + count - 1] = work.tokens[1:]
        for i in range(0, count, layout.tile_rows):
            tile.append((seq.slot, inside + i, work.start + i, min(layout.tile_rows, count - i)))
        if work.sample:
            part["picked"][shape.round_rows + end] = row + count - 1
            part["sampled_slots"][shape.round_rows + end] = part["end_slots"][end] = seq.slot
            part["end_positions"][end] = work.start + count
            part["end_rows"][end] = inside + count - 1
            end += 1
        else:
            (part["following"][inside + count - 1],) = seq.tokens(work.start + count, work.start + count + 1)
        row += count
    tile.sort(key=lambda t: -(t[2] + t[3]))  # the longest first: they bound the kernel
    tiles[: len(tile)] = np.array(tile, np.int32).reshape(-1, 4)
