"""The launches of one step's shape, in order: rows, forward, tokens, verdict, drafts.

Launching is all it does: no value of the device is read here, so the same calls run eagerly and into a graph.
The plain twin is `eyas.engine.loop.plain_runner` with `eyas.engine.loop.commit` and
`eyas.engine.speculation.draft_worker.draft_runner`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.engine.attention.prompts import PromptPlan
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.tables import SlotTables, mask_words
from eyas.engine.device.adapters import DeviceAdapters
from eyas.engine.device.special import SpecialSampler
from eyas.engine.device.step import STATES, StepShape
from eyas.engine.kernels.attention.group_rows import in_group
from eyas.engine.kernels.drafts import accepted_path, first_tokens
from eyas.engine.kernels.drafts import rounds as round_kernels
from eyas.engine.kernels.drafts.rounds import FACTS
from eyas.engine.kernels.exchange import mailbox, row_ring
from eyas.engine.kernels.sampling import sample
from eyas.engine.kernels.sampling.special import mask_in_place
from eyas.engine.kernels.states.accepted import keep_path
from eyas.engine.kernels.states.groups import decoded
from eyas.engine.kernels.states.order import DeltaLayer
from eyas.engine.kernels.states.rings import SolvedStore
from eyas.engine.kv.movable import MovableMemory
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import DecoderModel
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.sampling.scores import SLICE
from eyas.engine.speculation.device import AcceptedChunk, DeviceDrafter, DeviceTap
from eyas.engine.speculation.drafters.device_lookup import DeviceLookup
from eyas.engine.states.rows import StateGroups, StateRows


@dataclass(frozen=True)
class DeviceState:
    """Everything on the device that steps share.

    `drafter`: a head that proposes in the same step, if there is one. `tap`: where drafts come from
    elsewhere, which wants features. `lookup`: looks drafts up in the step, if any are wanted. `prompts`:
    attends the chunks that it plans, if there is one; all others, and those of every graph, the tile kernel
    does. `state_layers`: those that have states. `sharers`: attention ranks, if there are several;
    each has steps of the same shape. `weights`: their memory, if it can leave.
    """

    model: DecoderModel[ForwardRows]
    pool: KvPool
    tables: SlotTables
    special: SpecialSampler
    drafter: DeviceDrafter | None
    synthetic: torch.Tensor | None = None  # chances of acceptance, for benchmarks
    pdl: bool = False
    prompts: PromptPlan | None = None
    lookup: DeviceLookup | None = None
    tap: DeviceTap | None = None
    state_layers: tuple[DeltaLayer, ...] = ()
    sharers: ProcessGroup | None = None
    weights: MovableMemory | None = None
    adapters: DeviceAdapters | None = None

    @property
    def head(self) -> DeviceDrafter | DeviceTap | None:
        """The part of a draft head that runs here; None: none."""
        return self.drafter or self.tap

    @property
    def trees(self) -> bool:
        """True if drafts may branch. Chains need neither masks nor rows moved."""
        return self.head is not None and self.head.trees

    @property
    def pools(self) -> tuple[KvPool, ...]:
        """The target's, then the draft head's, under the same page numbers."""
        return (self.pool,) if self.drafter is None else (self.pool, self.drafter.pool)

    @property
    def movable(self) -> list[MovableMemory]:
        """The memory that can leave: pools, then that of weights, if it can."""
        return [*self.pools, *(() if self.weights is None else (self.weights,))]

    def path_rows(self, width: int) -> int:
        """Rows of the longest path that a round of `width` rows can accept, its root included."""
        parts = (part.path_rows for part in (self.head, self.lookup) if part is not None)
        return min(max(parts, default=1), width)

    @property
    def device(self) -> str:
        """The device of the pool, by torch's name."""
        return self.pool.shape.device

    def all_gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of all attention ranks, [ranks, ...]."""
        return rows[None] if self.sharers is None else self.sharers.gather(rows.contiguous())

    def look_up(self, slots: torch.Tensor) -> None:
        """Drafts for each of `slots` int32 [B], after those of the head."""
        if self.lookup is not None:
            self.lookup.look_up(slots, self.pool.page_size, pdl=self.pdl)

    def slice_logits(
        self, rows: torch.Tensor, adapters: torch.Tensor | None, places: torch.Tensor
    ) -> torch.Tensor:
        """Float32 [n, vocab] of up to SLICE of a forward's rows, which `places` int32 [n] names. `adapters`:
        of all its rows.

        The product has the same height for any n: a row's logits do not depend on where its prompt was cut.
        """
        padded = torch.nn.functional.pad(places, (0, SLICE - places.shape[0]))
        return self.model.logits(rows, padded, adapters=adapters)[: places.shape[0]]


class StepProgram:
    """One shape's launches, on fixed parts of the step's input and result memory.

    `planned`: the machine's `prompts` has been planned for this step's chunks. `logits`: room for those of
    its sampled rows, at least, if others use it too.
    """

    def __init__(
        self,
        state: DeviceState,
        shape: StepShape,
        inputs: torch.Tensor,
        results: torch.Tensor,
        planned: bool = False,
        logits: torch.Tensor | None = None,
    ) -> None:
        self._state = state
        self._shape = shape
        self._room = None if logits is None else logits[: shape.sampled]
        self._planned = planned
        parts = shape.parts(state.pool.states is not None)
        self._part = {name: inputs[first : first + count] for name, (first, count) in parts.items()}
        rounds, singles, ends = shape.result_ends
        path_rows = state.path_rows(shape.width)
        self.result_words = ends + shape.batch * path_rows
        self._table = results[:rounds].view(shape.batch, -1) if shape.batch else results[:0]
        self._single_table = results[rounds:singles].view(shape.singles, -1) if shape.singles else results[:0]
        self._ends = results[singles:ends]
        self._paths = results[ends : self.result_words].view(shape.batch, path_rows)

    def blank(self) -> None:
        """Inputs of a step in which every row is padding."""
        padding = self._state.tables.padding_slot
        self._part["all"].zero_()
        for name, value in (
            ("slots", padding),
            ("single_slots", padding),
            ("sampled_slots", padding),
            ("end_slots", padding),
            ("kv_rows", -1),
            ("settled", -1),
        ):
            self._part[name].fill_(value)

    def forward(self, every: bool = False) -> torch.Tensor:
        """Computes up to the logits of the rows that give a token: float32 [sampled, vocab].

        Returns rows as the model's `logits` takes them: all, if it is to have `every` one. Of a step with
        prompts it may have those alone that give a token: nothing reads the others behind the last layer's
        attention.
        """
        shape, part, state = self._shape, self._part, self._state
        rounds = self._decode_rows("slots", 0, shape.width) if shape.batch else None
        first = shape.batch * shape.width
        singles = self._decode_rows("single_slots", first, 1) if shape.singles else None
        tiles = part["tiles"].view(-1, 4) if shape.chunk else None
        rows = ForwardRows(
            *(part["tokens"], part["positions"], part["kv_rows"], rounds, tiles, self._planned, singles),
            adapters=part["adapters"] if shape.adapted else None,
        )
        size, tables = state.pool.page_size, state.tables.other_pages
        if tables:
            rows = replace(rows, others=tuple(in_group(rows, table, size, state.pdl) for table in tables))
        if state.pool.states is not None:
            rows = replace(rows, states=self._states())
        taps = state.head.taps if state.head and (shape.drafts or state.tap) else ()
        picked = part["picked"] if shape.chunk else None
        if not every and picked is not None and self._may_drop(taps):
            rows, picked = replace(rows, leaving=picked), None
        x, self._tapped = state.model.forward(rows, state.pool, taps)
        self._rows, self._ahead, drafter = rows, None, state.drafter
        if drafter is not None and shape.drafts and not shape.chunk:
            self._ahead = drafter.of(adapted=shape.adapted).ahead(self._tapped, rows, shape.headed)
        if state.tap is not None and self._in_order and not shape.chunk:
            send = partial(self._send, state.tap, certain=False)
            self._ahead = state.tap.ahead(self._tapped, rows.tokens, send)
        if shape.sampled:
            self.logits = state.model.logits(x, picked, self._room, rows.adapters)
        if state.head is not None:
            state.head.meet()  # here, since a graph ends with the logits
        return x

    def _may_drop(self, taps: tuple[int, ...]) -> bool:
        """True if rows may be left out of the last layer: those of other ranks, and adapters, are of all."""
        shape, state = self._shape, self._state
        alone = state.sharers is None and not shape.adapted
        return alone and state.model.may_drop(shape.rows, taps)

    @property
    def _in_order(self) -> bool:
        """Do the rows of a path, and those behind it, stand side by side whatever is accepted?"""
        return self._paths.shape[1] == self._shape.width and not self._state.trees

    @property
    def adapters(self) -> torch.Tensor | None:
        """The adapter of each row of the forward, as in `ForwardRows`."""
        return self._rows.adapters

    def _states(self) -> StateGroups:
        """The rows for layers with states, behind `_decode_rows`; prompts' states stand behind them then."""
        shape, part, tables = self._shape, self._part, self._state.tables
        positions = part["positions"]
        rounds = singles = chunks = table = ends = None
        if shape.batch:
            trees = self._state.trees and shape.width > 1
            rounds = decoded(tables, part["slots"], shape.width, 0, positions, trees=trees)
        if shape.singles:
            first = shape.batch * shape.width
            singles = decoded(tables, part["single_slots"], 1, first, positions)
        if shape.chunk:
            columns = dict(zip(STATES, part["states"].view(len(STATES), -1), strict=True))
            at = columns.pop("tables").long()
            chunks = StateRows(**columns, before=positions - 1, positions=positions, most=shape.chunk)
            tables.bound.index_copy_(0, at, columns["folds"])
            table, ends = part["spans"].view(-1, 2), part["span_ends"]
        return StateGroups(rounds, singles, chunks, table, ends)

    def _decode_rows(self, slots: str, first: int, width: int) -> DecodeRows:
        """Prepares the rows of the sequences in a part of the step's array, from row `first` on.

        Drafts that come to the device by themselves are fetched for it.
        """
        batch, part = self._batch(slots), self._part
        starts = batch.slots.new_empty(batch.size)
        shape = mask_words(width), batch.size, width
        mask = torch.empty(shape, dtype=torch.int64, device=starts.device)
        own = slice(first, first + batch.size * width)
        rows = round_kernels.RoundRows(
            part["tokens"][own], part["positions"][own], part["kv_rows"][own], starts
        )
        tap = self._state.tap
        if tap is not None and tap.mails and width > 1:
            reach = mailbox.MailLimits(self._state.model.config.vocab_size, tap.path_rows - 1)
            mailbox.fetch(batch, tap.place, reach)
        round_kernels.prepare(batch, rows, mask)
        return DecodeRows(batch.slots, starts, width, mask if self._state.trees and width > 1 else None)

    def sample_special(self, rows: torch.Tensor) -> torch.Tensor:
        """Chooses the tokens of up to SLICE special rows, which `choose` then leaves as they are.

        `rows`, and the reports that are returned until the next call: as `SpecialSampler.sample` has them.
        """
        part = self._part
        return self._state.special.sample(self.logits, part["positions"], part["settled"], rows)

    def mask(self, places: torch.Tensor, masks: torch.Tensor) -> None:
        """Masks the step's logits, before `choose`; as `mask_in_place`."""
        mask_in_place(self.logits, places, masks)

    def features(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, head width]: of the forward's rows, int64 [n]."""
        assert self._state.head is not None
        tapped, tokens = (each.index_select(0, rows) for each in (self._tapped, self._rows.tokens))
        return self._state.head.features(tapped, tokens)

    def _keep(self, tap: DeviceTap) -> torch.Tensor:
        """[batch * path rows + singles, head width]: of the rows on each round's path, then of those without
        drafts. What stands behind a path's end is any row's.

        Where features stay on the device they are written there, and into the GPUs of draft workers.
        """
        if self._ahead is not None:
            return self._ahead
        features = self._on_paths()
        if tap.windows is not None:
            self._send(tap, features, certain=True)
        return features

    def _send(self, tap: DeviceTap, features: torch.Tensor, *, certain: bool) -> None:
        """Writes features, which stand as `_keep` has them, into windows and rings: those of rows that are
        `certain`, or before that is known all of them.
        """
        assert tap.windows is not None
        windows, rounds = tap.windows.rows, self._paths.numel()
        rows = features.to(windows.dtype)  # which need not be that of the target's pool
        parts = ("slots", rows[:rounds], self._table), ("single_slots", rows[rounds:], self._single_table)
        for slots, own, counts in parts:
            known = counts if certain else None
            written = row_ring.WrittenRows(self._part[slots], tap.place.rows, windows, known)
            row_ring.put(self._state.tables, written, own)

    def mail(self, slots: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Posts the ends of prompts, once this step has given their first tokens, as it posts rounds: drafts
        for their first rounds follow. As `MailedPrompts`, on the device; `rows` int64 [E * P].
        """
        state, tap = self._state, self._state.tap
        assert tap is not None and tap.windows is not None
        last = words[:, :1].long() + (FACTS - 1)
        words.scatter_(1, last, state.tables.root.index_select(0, slots)[:, None])
        windows = tap.windows.rows
        written = row_ring.WrittenRows(slots, tap.place.rows, windows, words)
        row_ring.put(state.tables, written, self.features(rows).to(windows.dtype))
        mailbox.post(state.tables, slots, words, tap.place)

    def _on_paths(self) -> torch.Tensor:
        """Features of the rows of paths, as `_keep` gives them. A chain's path begins with its first nodes:
        its rows are in order.
        """
        shape, device = self._shape, self._tapped.device
        if self._in_order:
            own = slice(0, shape.round_rows)
            assert self._state.head is not None
            return self._state.head.features(self._tapped[own], self._rows.tokens[own])
        first = torch.arange(shape.batch, device=device)[:, None] * shape.width
        accepted = (self._paths.clamp(min=0) + first).view(-1)
        alone = torch.arange(shape.batch * shape.width, shape.round_rows, device=device)
        return self.features(torch.cat((accepted, alone)))

    def choose(self) -> torch.Tensor:
        """The token of each sampled row, int32 [sampled]."""
        shape, part = self._shape, self._part
        positions, ahead = part["positions"][: shape.round_rows], 1
        if shape.ends:
            positions, ahead = torch.cat((positions + 1, part["end_positions"])), 0
        chosen = part["sampled_slots"].new_empty(shape.sampled)
        if not shape.sampled:  # the middle of a prompt
            return chosen
        rows = sample.SampledRows(part["sampled_slots"], positions, part["settled"], ahead=ahead)
        sample.choose(self.logits, rows, self._state.tables, chosen, pdl=self._state.pdl)
        return chosen

    def rest(self, chosen: torch.Tensor) -> None:
        """The verdict on `chosen`, which becomes the result; then the next drafts, or `certain`: features for
        those that come from elsewhere.
        """
        shape, state = self._shape, self._state
        verdicts = None
        if shape.batch:
            verdicts = self._verdict(chosen)
        if shape.singles:
            own = chosen[shape.batch * shape.width : shape.round_rows]
            alone = round_kernels.RoundVerdicts(self._single_table, torch.empty_like(own).view(-1, 1))
            round_kernels.verdict(self._batch("single_slots"), own, alone)
        if shape.ends:
            self._land(chosen[shape.round_rows :])
        if state.tap is not None and shape.round_rows:
            self.certain = self._keep(state.tap)
            if state.tap.mails and shape.batch:  # features first: who hears of a row looks for its features
                mailbox.post(state.tables, self._part["slots"], self._table, state.tap.place)
        if state.drafter is not None and shape.drafts:
            drafter = state.drafter.of(adapted=shape.adapted)
            if self._ahead is not None:
                drafter.behind(self._ahead, self._part["slots"], shape.headed)
            else:
                batch = self._batch("slots") if shape.batch else None
                tokens = self._rows.tokens
                drafter.follow(self._tapped, tokens, batch, verdicts, self._chunk(), shape.headed)
        if shape.batch:
            state.look_up(self._part["slots"])
        if shape.ends:
            state.look_up(self._part["end_slots"])

    def _verdict(self, chosen: torch.Tensor) -> round_kernels.RoundVerdicts:
        state, batch = self._state, self._batch("slots")
        verdicts = round_kernels.RoundVerdicts(self._table, self._paths)
        round_kernels.verdict(batch, chosen, verdicts, state.synthetic)
        if state.trees:
            for table in (state.tables.pages, *state.tables.other_pages):
                accepted_path.compact(batch, verdicts, state.pool.tensor, table)
            if (states := state.pool.states) is not None:
                assert isinstance(states.beside, SolvedStore)
                keep_path(batch, verdicts, states, states.beside)
        return verdicts

    def _land(self, chosen: torch.Tensor) -> None:
        """Prompts that ended here have their first token, and are rounds from now on."""
        part, state = self._part, self._state
        ends = first_tokens.PromptEnds(
            part["end_slots"], part["end_positions"], part["end_rows"], part["following"]
        )
        first_tokens.store(state.tables, ends, chosen, self._ends, state.pdl)

    def _chunk(self) -> AcceptedChunk | None:
        shape, part, rows = self._shape, self._part, self._rows
        if not shape.chunk:
            return None
        own = slice(shape.round_rows, None)
        mine = ForwardRows(
            *(rows.tokens[own], rows.positions[own], rows.kv_rows[own], None, rows.tiles, self._planned),
            adapters=None if rows.adapters is None else rows.adapters[own],
        )
        ends = part["end_rows"].clamp(max=shape.chunk - 1)  # of padding: any row
        return AcceptedChunk(mine, part["following"][: shape.chunk], ends, part["end_slots"])

    def _batch(self, slots: str) -> round_kernels.RoundBatch:
        state = self._state
        return round_kernels.RoundBatch(state.tables, self._part[slots], state.pool.page_size, state.pdl)
