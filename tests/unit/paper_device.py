"""A device in plain Python: does what a `StepInput` says on a KV pool of token ids, and samples from those.

A token depends on every id that a sequence's page table leads to, so a page that was lost, given away too
early or never told changes the text. Drafts are chains, right as often as chance has it. It keeps no more
than a device does: what it knows of a sequence, the tables and the pool say.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from eyas.common.params import MAX_BAD_WORDS, MAX_TOP_LOGPROBS, SamplingParams
from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.tables import SlotTables
from eyas.engine.device.step import CatchUp, JoinBatch, RowMasks, StepInput
from eyas.engine.kernels.drafts.forced import HEAD
from eyas.engine.kernels.sampling.special import COLUMNS, REPORT_WORDS
from eyas.engine.sampling.sampler import SampledRow, sample
from eyas.engine.sampling.scores import TokenScores, score
from eyas.engine.speculation.feature_rows import RING_ROWS

VOCAB = 24


def logits_after(ids: SequenceOf[int]) -> torch.Tensor:
    """The model: float32 [VOCAB], made of all ids so far."""
    seed = zlib.crc32(np.array(ids, np.int64).tobytes())
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@dataclass
class Pool:
    """Physical row -> (position, id) of the row that was last written there."""

    page_size: int
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def copy_page(self, source: int, target: int) -> None:
        for row in range(self.page_size):
            found = self.rows.get(source * self.page_size + row)
            if found is not None:
                self.rows[target * self.page_size + row] = found


@dataclass
class _Round:
    """One sequence of a step: its root and drafts, as they stood when the step began."""

    slot: int
    width: int
    nodes: list[int]
    ids: list[int]  # up to the root


class PaperDevice:
    """Twin of `eyas.engine.device.executor.StepExecutor`."""

    def __init__(self, tables: SlotTables, pool: Pool, seed: int) -> None:
        """It drafts if the tables have room for drafts."""
        drafter = tables.sizes.width > 1 or None
        self.state = SimpleNamespace(
            tables=tables, prompts=None, tap=None, drafter=drafter, lookup=None, adapters=None, trees=False
        )
        self.state.path_rows = lambda width: width
        self.tables = tables
        self.pool = pool
        self.head = Pool(pool.page_size)  # the draft head's: of a row its position, and the id after it
        self.kept: dict[tuple[int, int], int] = {}  # by slot and place in the ring: a row that waits
        self.caught_up = self.catch_ups = 0  # sequences; calls
        self.accepted = self.joined = self.waits = self.looked_up = 0
        self.forced = 0  # drafts that a grammar forced behind a verdict that came
        self.masked_below = 0  # rows of drafts that not every id may follow
        self.special_rows: list[int] = []  # of each step that had some
        self._random = random.Random(seed)

    # --- as the executor -----------------------------------------------------------------------------

    def join(self, joined: JoinBatch) -> None:
        self._apply(joined.writes)
        for (slot, token, position, _), feature in zip(joined.words.T.tolist(), joined.features, strict=True):
            length, root = int(self.tables.length[slot]), int(self.tables.root[slot])
            assert (token, position) == (root, length - 1) and feature[0] == self._read(slot, length)[-1]
            self.head.rows[self._row(slot, length - 1)] = length - 1, root
            self._settle(slot, length, [root], joined.width)
            self.joined += 1

    def catch_up(self, late: CatchUp) -> None:
        self.catch_ups += 1
        for slot, may_wait in late.words.T.tolist():
            length, since = int(self.tables.length[slot]), int(self.tables.waits[slot])
            self.tables.waits[slot] = -1
            for position in range(since, length) if may_wait and since >= 0 else ():
                assert self.kept.pop((slot, position % RING_ROWS)) == position, "another row waits there"
                self.head.rows[self._row(slot, position)] = (
                    position,
                    int(self.tables.text[slot, position + 1]),
                )
            if may_wait:
                self.caught_up += 1
                self._propose(slot, late.width)

    def features(self, rows: SequenceOf[int]) -> torch.Tensor:
        """The feature of a row is its id."""
        return torch.tensor([[[float(self._part["tokens"][row])] for row in rows]])

    def begin(self, step: StepInput) -> None:
        self._apply(step.writes)
        for slot, length, root, *drafts in np.array(step.forced, np.int32).reshape(
            -1, HEAD + self.tables.drafts.shape[1]
        ):
            if (length, root) == (self.tables.length[slot], self.tables.root[slot]):
                self.tables.drafts[slot] = torch.tensor(drafts)
                self.forced += 1
        self._held = list(step.drafted_slots)
        part = {
            name: step.data[first : first + count] for name, (first, count) in step.shape.sections.items()
        }
        self._shape, self._part = step.shape, part
        for row, token, position in zip(part["kv_rows"], part["tokens"], part["positions"], strict=True):
            if row >= 0:
                self.pool.rows[int(row)] = int(position), int(token)
        self._rounds = [self._round(int(slot), self._shape.width) for slot in part["slots"]]
        self._rounds += [self._round(int(slot), 1) for slot in part["single_slots"]]
        self._contexts = [context for one in self._rounds for context in self._nodes(one)]
        for slot, length in zip(*self._ends(), strict=True):
            self._contexts.append((slot, self._read(slot, length) if self._is_real(slot) else []))

    def drafts(self) -> np.ndarray:
        return torch.stack((self.tables.drafts[self._held], self.tables.parents[self._held]), 1).numpy()[None]

    def mask_rows(self, count: int, rank: int) -> np.ndarray:
        assert rank == 0
        return np.empty((count, 1), np.int32)

    def mask(self, rows: RowMasks) -> None:
        """Samples what may follow by these masks, of rows that ask for no more."""
        rounds = self._shape.batch * self._shape.width
        for place, mask in zip(rows.places.tolist(), rows.masks.tolist(), strict=True):
            slot, ids = self._contexts[place]
            if not ids:  # a node without a draft
                continue
            self._part["settled"][place] = self._token(slot, ids, np.array(mask, np.int32))
            below = place < rounds and place % self._shape.width
            self.masked_below += bool(below) and any(word != -1 for word in mask)

    def sample(self, rows: np.ndarray) -> list[torch.Tensor]:
        """By the specification, with what the rows and the tables say."""
        self.special_rows.append(len(rows))
        reports = torch.zeros(len(rows), REPORT_WORDS, dtype=torch.int32)
        for words, report in zip(rows.tolist(), reports, strict=True):
            row, mask = dict(zip(COLUMNS, words, strict=False)), words[len(COLUMNS) :]
            slot, ids = self._contexts[row["place"]]
            if not ids:  # a node without a draft
                continue
            allowed = np.array(mask, np.int32) if mask else None
            wanted = replace(self._special(row, ids), allowed=allowed)
            found = sample(logits_after(ids)[None], [wanted])
            report[0] = token = found.tokens[0]
            self.masked_below += bool(row["node"]) and any(word != -1 for word in mask)
            if row["own"]:
                self._part["settled"][row["place"]] = token
            if (told := found.logprobs[0]) is not None:
                report[1] = float_words([told.logprob])[0]
                report[2 : 2 + len(told.top)] = torch.tensor([id for id, _ in told.top])
                first = 2 + MAX_TOP_LOGPROBS
                report[first : first + len(told.top)] = float_words([value for _, value in told.top])
        return [reports[None]]

    def _special(self, row: dict[str, int], ids: list[int]) -> SampledRow:
        slot, tables = row["slot"], self.tables
        prompt, text = row["prompt"], ids
        if row["reads_text"]:
            known = len(ids) - len(self._above(slot, row["node"]))
            text = [*tables.text[slot, :known].tolist(), *self._above(slot, row["node"])]
        assert row["position"] in (-1, len(ids))
        words = tables.bad_words[slot].view(MAX_BAD_WORDS, -1)[: row["bad_words"]].tolist()
        count = row["biases"]
        biases = zip(tables.bias_ids[slot, :count].tolist(), tables.bias[slot, :count].tolist(), strict=True)
        repetition, presence, frequency = np.array(
            [row["repetition"], row["presence"], row["frequency"]], np.int32
        ).view(np.float32)
        params = msgspec.structs.replace(
            self._params(slot),
            repetition_penalty=float(repetition),
            presence_penalty=float(presence),
            frequency_penalty=float(frequency),
            logit_bias=dict(biases),
            bad_words=tuple(tuple(reversed(word[: word.index(-1)])) for word in words),
            logprobs=None if row["top"] < 0 else row["top"],
        )
        ending = len(ids) - prompt < row["min_tokens"]
        banned = tables.endings[slot, : row["endings"]].tolist() if ending else ()
        return SampledRow(params, row["choice"], len(ids), text[:prompt], text[prompt:], (), banned)

    def _above(self, slot: int, node: int) -> list[int]:
        """The drafts of a chain down to a node."""
        return self.tables.drafts[slot, :node].tolist()

    def score(self, asked: ScoreRequest) -> TokenScores:
        """Of chunk rows: what the pool holds up to each of them decides."""
        slots = [0] * self._shape.chunk
        for slot, first, _, count in self._part["tiles"].reshape(-1, 4).tolist():
            slots[first : first + count] = [slot] * count
        contexts = [
            self._read(slots[place - self._shape.round_rows], int(self._part["positions"][place]) + 1)
            for place in asked.places
        ]
        logits = torch.stack([logits_after(ids) for ids in contexts])
        found = score(logits, torch.tensor(asked.tokens), asked.top)
        return TokenScores(found.own[None], found.ids[None], found.best[None])

    def finish(self, step: StepInput) -> tuple[torch.Tensor, None]:
        chosen = [
            known if known >= 0 else self._token(*context)
            for known, context in zip(self._part["settled"].tolist(), self._contexts, strict=True)
        ]
        shape, result, row = step.shape, [], 0
        for one in self._rounds:
            result += self._verdict(one, chosen[row : row + one.width])
            row += one.width
        ends = chosen[shape.round_rows :]
        landing = zip(
            self._part["end_slots"].tolist(), self._part["end_positions"].tolist(), ends, strict=True
        )
        self._follow_prompts(ends)
        for slot, length, token in landing:
            if self._is_real(slot):
                self._settle(slot, length, [token], shape.width)
        paths = [*range(shape.width)] * shape.batch
        return torch.tensor([[*result, *ends, *paths]], dtype=torch.int32), None

    def _follow_prompts(self, ends: SequenceOf[int]) -> None:
        """The head takes the chunks' rows."""
        part, first = self._part, self._shape.round_rows
        following = part["following"].tolist()
        for row, token in zip(part["end_rows"].tolist(), ends, strict=True):
            following[row] = token
        kv_rows, positions = part["kv_rows"][first:].tolist(), part["positions"][first:].tolist()
        rows = zip(kv_rows, positions, following, strict=False)
        self.head.rows |= {row: (position, token) for row, position, token in rows if row >= 0}

    def copy_page(self, source: int, target: int, rank: int) -> None:
        assert rank == 0
        self.pool.copy_page(source, target)
        self.head.copy_page(source, target)

    def wait(self) -> None:
        self.waits += 1

    def _ends(self) -> tuple[list[int], list[int]]:
        """Slots of the prompts that end here, and their lengths."""
        return self._part["end_slots"].tolist(), self._part["end_positions"].tolist()

    # --- a round ---------------------------------------------------------------------------------------

    def _round(self, slot: int, width: int) -> _Round:
        if not self._is_real(slot):
            return _Round(slot, width, [], [])
        length, root = int(self.tables.length[slot]), int(self.tables.root[slot])
        drafts = [token for token in self.tables.drafts[slot].tolist() if token >= 0][: width - 1]
        for node, token in enumerate((root, *drafts)):
            self.pool.rows[self._row(slot, length + node)] = length + node, token
        return _Round(slot, width, [root, *drafts], self._read(slot, length + 1))

    def _nodes(self, one: _Round) -> list[tuple[int, list[int]]]:
        """The context of every row, also of those without a node."""
        count = one.width
        found = [(one.slot, [*one.ids, *one.nodes[1 : 1 + node]]) for node in range(len(one.nodes))]
        return found + [(self.tables.padding_slot, [])] * (count - len(found))

    def _verdict(self, one: _Round, chosen: list[int]) -> list[int]:
        """A row of the result: tokens emitted, depth and number of the drafts, the tokens."""
        width = one.width
        if not one.nodes:
            return [1, 0, 0, *[-1] * width]
        accepted = 0
        while accepted + 1 < len(one.nodes) and one.nodes[accepted + 1] == chosen[accepted]:
            accepted += 1
        self.accepted += accepted
        length = int(self.tables.length[one.slot]) + accepted + 1
        tokens = chosen[: accepted + 1]
        for position, token in enumerate(tokens, start=length - len(tokens)):
            if self._shape.headed > 1:
                self.head.rows[self._row(one.slot, position)] = position, token
            else:
                self.kept[one.slot, position % RING_ROWS] = position
                if self.tables.waits[one.slot] < 0:
                    self.tables.waits[one.slot] = position
        self._settle(one.slot, length, tokens, self._shape.width, headed=not self._shape.headless)
        drafts = len(one.nodes) - 1
        return [accepted + 1, drafts, drafts, *tokens, *[-1] * (width - len(tokens))]

    def _settle(self, slot: int, length: int, tokens: list[int], width: int, *, headed: bool = True) -> None:
        """What is certain now; and drafts below it for a round of `width` rows."""
        root = tokens[-1]
        self.tables.length[slot], self.tables.root[slot] = length, root
        for position, token in zip(range(length + 1 - len(tokens), length + 1), tokens, strict=True):
            self.tables.text[slot, position : position + 1] = token
        self.tables.drafts[slot] = -1
        self._propose(slot, width, headed=headed)

    def _propose(self, slot: int, width: int, *, headed: bool = True) -> None:
        """Chance says how many drafts are right. All rows before a head's have been there for it."""
        drafts = min(width - 1, int(self.tables.speculative[slot]))
        if not drafts:
            return
        length = int(self.tables.length[slot])
        ids = [*self._read(slot, length), int(self.tables.root[slot])]
        known = [self.head.rows.get(self._row(slot, row), (-1, -1)) for row in range(length)]
        self.looked_up += not headed
        assert not headed or known == [*enumerate(ids[1:])], "a row that the head was never given"
        right = self._random.randint(0, drafts)
        for i in range(drafts):
            token = self._token(slot, ids)
            token = token if i < right else (token + 1) % VOCAB
            self.tables.drafts[slot, i] = token
            self._row(slot, length + i)  # the draft head writes there
            ids.append(token)

    # --- the tables ------------------------------------------------------------------------------------

    def _apply(self, writes: np.ndarray) -> None:
        self._vacate(writes[0].tolist())
        self.tables.apply(torch.from_numpy(writes))

    def _vacate(self, poked: SequenceOf[int]) -> None:
        """A slot gets somebody new, who must be told of his own pages."""
        for slot in range(self.tables.padding_slot):
            if self.tables.places("seed", slot, 0, 1)[0] in poked:
                self.tables.pages[slot] = -1

    def _token(self, slot: int, ids: list[int], allowed: np.ndarray | None = None) -> int:
        if not self._is_real(slot):
            return 0
        choice = int(self.tables.choice[slot])
        row = SampledRow(self._params(slot), choice, len(ids), ids, (), (), allowed=allowed)
        return sample(logits_after(ids)[None], [row]).tokens[0]

    def _params(self, slot: int) -> SamplingParams:
        tables = self.tables
        return SamplingParams(
            temperature=float(tables.temperature[slot]),
            top_k=int(tables.top_k[slot]),
            top_p=float(tables.top_p[slot]),
            min_p=float(tables.min_p[slot]),
            seed=int(tables.seed[slot]) % 2**64,
        )

    def _read(self, slot: int, count: int) -> list[int]:
        """The ids at positions 0 .. count - 1, as the pool has them."""
        found = [self.pool.rows.get(self._row(slot, row), (-1, -1)) for row in range(count)]
        assert [position for position, _ in found] == list(range(count)), "a row that was never written"
        return [token for _, token in found]

    def _row(self, slot: int, logical: int) -> int:
        page, place = divmod(logical, self.pool.page_size)
        number = int(self.tables.pages[slot, page])
        assert number >= 0, "a row beyond the pages that were told"
        return number * self.pool.page_size + place

    def _is_real(self, slot: int) -> bool:
        return slot != self.tables.padding_slot


def float_words(values: SequenceOf[float]) -> torch.Tensor:
    """int32 words of float32 values."""
    return torch.tensor(values, dtype=torch.float32).view(torch.int32)
