"""Special rows: those whose request asks for more than temperature and filters.

Bias, penalties, bans, masks, log-probabilities, first tokens of several choices: all of it is done on the
device, for these rows only, between a step's forward and its verdict, in memory that does not grow with them.
The host says which rows and with which numbers; what it reads of the result, it reads when the step has
landed.

Rows that have a mask, and nothing else that is special, are no work of that kind: their logits are masked
where they stand, and sampled with all others.

The masks of a step's rows are filled on the host while the device computes the forward. Only the device knows
which drafts stand below a sequence's root. Where an output is held to a grammar, they are read back before
the forward begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from eyas.common.params import MAX_TOP_LOGPROBS, SamplingParams
from eyas.common.types import TokenLogprob
from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.batch.step_result import NO_FORKS
from eyas.engine.batch.stopping import ending_ids
from eyas.engine.batch.tables import SlotTables, TableWrites
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.device.step import PlacedBatch, RowMasks, StepShape
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.grammar.state import MaskRoom
from eyas.engine.kernels.sampling import sample, special
from eyas.engine.kernels.sampling.special import COLUMNS, SpecialWorkspace
from eyas.engine.sampling.scores import TokenScores

SLICE = 64
"""Special rows that are sampled at a time."""

_ALL = np.int32(-1)  # a word of a mask that allows every id


class SpecialRows:
    """The special rows of one step, in the order in which they are added. `eos_ids`: of the model."""

    def __init__(self, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = eos_ids
        self._places: list[tuple[int, ...]] = []
        self._wishes: list[tuple[int, ...]] = []
        # By the place of a round's root, or of a prompt's last row.
        self._by_place: dict[int, _SpecialRow] = {}
        self._works: dict[int, SequenceWork] = {}  # as `_by_place`
        self._masks: dict[int, np.ndarray] = {}  # by the place in `_places`
        self._widths: dict[int, int] = {}  # of what has masks alone, by the place of its first row
        self._masked: dict[int, np.ndarray] = {}  # masks of those rows, by their place

    @classmethod
    def of(cls, shape: StepShape, placed: PlacedBatch, eos_ids: tuple[int, ...]) -> Self:
        """Collects the special rows of a step."""
        rows, first = cls(eos_ids), shape.batch * shape.width
        parts = (
            (0, shape.width, placed.rounds),
            (first, 1, placed.singles),
            (shape.round_rows, 1, placed.ends),
        )
        for start, width, works in parts:
            for number, work in enumerate(works):
                if not work.seq.special:
                    continue
                place = start + number * width
                rows._works[place] = work
                if work.seq.masked_alone:
                    rows.add_masked(place, width)
                elif work.round:
                    rows.add_round(place, width, work.seq)
                else:
                    rows.add_end(place, work.seq)
        return rows

    def fill(self, masks: StepMasks, room: MaskRoom | None = None) -> None:
        """Asks for the masks of the step's rows, whose sequences' last tokens are known by now. `room`: of
        the rows that have masks alone; what a sequence was when it was added counts, not what it is now.
        """
        for place, work in self._works.items():
            self.add_masks(place, masks.of(work, room if place in self._widths else None))

    def __bool__(self) -> bool:
        return bool(self._places)

    def add_masked(self, place: int, width: int) -> None:
        """Adds `width` rows from `place` on that have masks and are not special else."""
        self._widths[place] = width

    def add_round(self, place: int, width: int, seq: Sequence) -> None:
        """A round whose `width` rows stand from `place` on among the step's sampled rows."""
        self._add(place, width, seq, position=-1)

    def add_end(self, place: int, seq: Sequence) -> None:
        """Adds a prompt's last row."""
        self._add(place, 1, seq, position=len(seq))

    def add_masks(self, place: int, masks: SequenceOf[np.ndarray | None]) -> None:
        """Adds the masks of the row at `place`: of its nodes, the root first, as far as there are any; forks
        get the root's.
        """
        if place in self._widths:
            own = enumerate(masks[: self._widths[place]], start=place)
            self._masked |= {row: mask for row, mask in own if mask is not None}
            return
        row = self._by_place[place]
        node_masks = [*masks[: row.width], *list(masks[:1]) * len(row.forks)]
        self._masks |= {row.first + i: mask for i, mask in enumerate(node_masks) if mask is not None}

    def _add(self, place: int, width: int, seq: Sequence, position: int) -> None:
        params, forks = seq.generation.request.params, seq.next_forks
        self._by_place[place] = _SpecialRow(len(self._places), width, forks, params.logprobs)
        nodes = [(place + node, seq.slot, node, position, seq.choice, 1) for node in range(width)]
        firsts = [(place, seq.slot, 0, position, choice, 0) for choice in forks]
        self._places += [*nodes, *firsts]
        self._wishes += [self._wish(params, len(seq.prompt))] * (width + len(forks))

    def _wish(self, params: SamplingParams, prompt: int) -> tuple[int, ...]:
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return (
            -1 if params.logprobs is None else params.logprobs,
            prompt,
            int(reads_text(params)),
            params.min_tokens if params.grammar is None else 0,  # else the mask says so
            len(ending_ids(params, self._eos_ids)),
            len(params.logit_bias),
            len(params.bad_words),
            *np.array(penalties, np.float32).view(np.int32).tolist(),
        )

    def array(self) -> np.ndarray:
        """int32 [n, columns], as `SpecialSampler` takes them."""
        both = [(*place, *wish) for place, wish in zip(self._places, self._wishes, strict=True)]
        words = len(next(iter(self._masks.values()))) if self._masks else 0
        rows = np.empty((len(both), len(COLUMNS) + words), np.int32)
        rows[:, : len(COLUMNS)] = np.array(both, np.int32).reshape(-1, len(COLUMNS))
        for row in range(len(both)) if words else ():  # each word is written once: they are megabytes
            rows[row, len(COLUMNS) :] = self._masks.get(row, _ALL)
        return rows

    @property
    def most_masked(self) -> int:
        """The number of rows, at most, that have masks alone."""
        return sum(self._widths.values())

    def masked(self, room: MaskRoom) -> RowMasks:
        """The rows that have masks alone, whose masks stand in `room`."""
        indices = [room.index(mask) for mask in self._masked.values()]
        places = np.full(room.used, -1, np.int32)
        places[indices] = list(self._masked)
        return RowMasks(places, room.rows[: room.used])

    def report(self, reports: SequenceOf[torch.Tensor]) -> SpecialReport:
        """The report of all rows, slice by slice, to be read once the step has landed."""
        return SpecialReport(self._by_place, reports)


@dataclass(frozen=True)
class _SpecialRow:
    """`first`: the first of its rows, which are its nodes and then its forks."""

    first: int
    width: int
    forks: tuple[int, ...]
    logprobs: int | None


@dataclass
class SpecialReport:
    """The report of a landed step on its special rows, by the place of a round's root, or of a
    prompt's end.
    """

    by_place: dict[int, _SpecialRow]
    reports: SequenceOf[torch.Tensor] = ()
    _words: np.ndarray | None = field(default=None, init=False)

    def logprobs(self, place: int, nodes: SequenceOf[int]) -> list[TokenLogprob | None]:
        """Log-probabilities of the tokens chosen at `nodes`; None where none was requested."""
        special = self.by_place.get(place)
        if special is None or special.logprobs is None:
            return []
        return [self._logprob(special.first + node, special.logprobs) for node in nodes]

    def firsts(self, place: int) -> Mapping[int, tuple[int, TokenLogprob | None]]:
        """The first token of each fork, by its choice."""
        special = self.by_place.get(place)
        if special is None or not special.forks:
            return NO_FORKS
        rows = range(special.first + special.width, special.first + special.width + len(special.forks))
        return {
            choice: (int(self._row(row)[0]), self._logprob(row, special.logprobs))
            for choice, row in zip(special.forks, rows, strict=True)
        }

    def _logprob(self, row: int, top: int | None) -> TokenLogprob | None:
        if top is None:
            return None
        ids, best = self._row(row)[2:].reshape(2, -1)
        pairs = zip(ids[:top].tolist(), best[:top].view(np.float32).tolist(), strict=True)
        return TokenLogprob(float(self._row(row)[1:2].view(np.float32)[0]), tuple(pairs))

    def _row(self, row: int) -> np.ndarray:
        if self._words is None:
            self._words = torch.cat(tuple(self.reports)).numpy()
        words: np.ndarray = self._words[row]
        return words


class SpecialSampler:
    """Samples special rows in a workspace of its own, which steps share: one step's after the other's."""

    def __init__(self, tables: SlotTables, vocab_size: int, *, pdl: bool) -> None:
        self._tables = tables
        self._pdl = pdl
        self._work = SpecialWorkspace.on(str(tables.memory.device), SLICE, vocab_size)

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor, settled: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Samples up to SLICE rows int32 [n, columns]; gives their reports [n, REPORT_WORDS], valid until the
        next call.

        The first columns are COLUMNS; the others, if there are any, the rows' masks. `logits` float32
        [N, vocab] of the step's sampled rows; `positions` int32 of the first of them, those of rounds. Tokens
        go to their rows' places in `settled` int32 [N].
        """
        work, count = self._work, rows.shape[0]
        masked = rows.shape[1] > len(COLUMNS)
        if masked:  # all columns at once: a part of host memory would be copied piece by piece
            rows = rows.to(work.rows.device, non_blocking=True)
            work.masks[:count].copy_(rows[:, len(COLUMNS) :])
            rows = rows[:, : len(COLUMNS)]
        work.rows[:count].copy_(rows, non_blocking=True)
        special.process(logits, positions, self._tables, work, count)
        if masked:
            special.mask(work, count)
        who = sample.SampledRows(
            work.slots[:count], work.positions[:count], work.unsettled[:count], work.choices[:count]
        )
        sample.choose(work.logits[:count], who, self._tables, work.tokens[:count], pdl=self._pdl)
        special.report(logits, settled, work, count)
        return work.reports[:count]


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> TokenScores:
    """Scores of tokens by a kernel, with the bits that tokens have when they are sampled here; see
    `eyas.engine.sampling.scores.score`.
    """
    reports, top = special.score(logits, tokens, top), min(top, logits.shape[1])
    best = 2 + MAX_TOP_LOGPROBS
    own = reports[:, 1].contiguous().view(torch.float32)
    return TokenScores(own, reports[:, 2 : 2 + top], reports[:, best : best + top].view(torch.float32))


def padding_rows(count: int, padding_slot: int, vocab_size: int) -> np.ndarray:
    """Rows that no request asked for, of the step's first sampled row, with masks that allow all."""
    rows = np.full((count, len(COLUMNS) + special.mask_words(vocab_size)), -1, np.int32)
    rows[:, : len(COLUMNS)] = 0
    rows[:, COLUMNS.index("slot")] = padding_slot
    return rows


def reads_text(params: SamplingParams) -> bool:
    """True if a token depends on those before it by more than the model."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0
    return any(penalties) or bool(params.bad_words)


def occupy_special(writes: TableWrites, seq: Sequence, eos_ids: tuple[int, ...]) -> None:
    """Writes the parameters of a sequence whose rows are special, now or later, to the tables."""
    params = seq.generation.request.params
    writes.occupy_special(seq.slot, params, ending_ids(params, eos_ids))
    if reads_text(params):
        writes.put("text", seq.slot, seq.all_tokens())


@dataclass(frozen=True)
class DraftNodes:
    """The drafts below one root: `places[i]` says which node of the round's rows (0: the root) draft i is."""

    tree: DraftTree
    places: tuple[int, ...]

    @classmethod
    def of(cls, drafts: SequenceOf[SequenceOf[int]], width: int) -> DraftNodes:
        """`drafts` [2, n]: drafts (-1: none) and their parents; the first width - 1 have rows."""
        tokens, parents = (each[: width - 1] for each in drafts)
        places = [place for place, token in enumerate(tokens) if token >= 0]
        node = {ROOT: ROOT} | {place: i for i, place in enumerate(places)}
        tree = DraftTree([tokens[place] for place in places], [node[parents[place]] for place in places])
        return cls(tree, tuple(1 + place for place in places))


class StepMasks:
    """`drafts`: by slot, those that the step verifies; a sequence that is not there has none."""

    def __init__(self, grammars: GrammarManager, drafts: Mapping[int, DraftNodes]) -> None:
        self._grammars = grammars
        self._drafts = drafts

    def of(self, work: SequenceWork, room: MaskRoom | None = None) -> list[np.ndarray | None]:
        """The grammar masks by node of the work's rows, the root first: as `GrammarManager.masks`, which may
        be empty.
        """
        nodes = self._drafts.get(work.seq.slot)
        if nodes is None:
            return self._grammars.masks(work.seq, None, room)
        masks = self._grammars.masks(work.seq, nodes.tree, room)
        if not masks:
            return []
        root, *below = masks
        by_place: list[np.ndarray | None] = [root, *[None] * max(nodes.places, default=0)]
        for place, mask in zip(nodes.places, below, strict=True):
            by_place[place] = mask
        return by_place
