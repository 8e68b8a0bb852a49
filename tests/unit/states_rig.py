"""Sequences with states for the tests of kernels: what each step gives them, and a twin in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eyas.engine.kernels.states.by_row import recur_by_row
from eyas.engine.kernels.states.few import recur_few
from eyas.engine.kernels.states.order import DeltaLayer, SolvedRows
from eyas.engine.kernels.states.prompts import Chunks, recur_chunks
from eyas.engine.kernels.states.recur import recur
from eyas.engine.states import plain
from eyas.engine.states.delta import DeltaRule
from eyas.engine.states.rows import StateGroups, StateRows
from eyas.engine.states.shape import SPAN, ChannelShape, DeltaShape, ring_rows
from eyas.engine.states.store import StateFormat, StateStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Piece:
    """The rows of one sequence in a step: `tokens` [n] of its text; `parents` of each, -1: the row before the
    step (None: a chain). The first `certain` of them are committed, in their order.
    """

    sequence: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    certain: int | None = None


class Scene:
    """Slots of one layer, and rows by token: what a token has as inputs and gates is drawn once."""

    def __init__(
        self, shape: DeltaShape, slots: int, dtype: torch.dtype = torch.float32, width: int = 8, seed: int = 0
    ) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        random = torch.Generator().manual_seed(seed)
        self.shape = shape
        filters = torch.randn(shape.inputs, shape.kernel, generator=random).t().contiguous()
        self.rule = DeltaRule(shape, filters.to(DEVICE))
        if not shape.corrects:
            bias, skip = (torch.randn(n, generator=random) for n in (shape.inputs, shape.value_heads))
            self.rule = DeltaRule(shape, filters.to(DEVICE), bias.to(DEVICE), skip.to(DEVICE))
        self.plain = self.rule
        self.inputs = torch.randn(512, shape.inputs, generator=random).to(DEVICE, dtype)
        decays, factors = shape.gate_counts
        decay = -torch.rand(512, decays, generator=random).square() * 0.4
        shares = torch.rand(512, factors, generator=random)
        self.gates = torch.cat((decay, shares), 1).to(DEVICE)
        format = StateFormat((0,), shape, ring_rows(width), dtype)
        memory = torch.full((slots, format.slot_bytes), 255, dtype=torch.uint8, device=DEVICE)  # NaN
        self.store, self.twin = StateStore(format, memory), StateStore(format, memory.clone())
        self.layer = self.store.layers[0]
        self.solved = SolvedRows.on(self.layer, shape)
        self.lengths, self.bounds = [0] * slots, [0] * slots

    def lose(self, part: str) -> None:
        """From here on, the kernels' rule has zeros for one of its parts; the plain equations' has it."""
        self.plain = self.rule
        self.rule = replace(self.rule, **{part: torch.zeros_like(getattr(self.rule, part))})

    def _rows(self, pieces: Sequence[Piece], prompt: bool) -> StateRows:
        """Sequence s has slot s; a padding sequence is added to them."""
        columns: dict[str, list[int]] = {
            name: [] for name in ("slots", "firsts", "counts", "starts", "bounds")
        }
        folds: list[int] = []
        before: list[int] = []
        positions: list[int] = []
        for piece in pieces:
            start, count = self.lengths[piece.sequence], len(piece.tokens)
            bound, end = self.bounds[piece.sequence], start + (count if prompt else 0)
            for name, number in zip(columns, (piece.sequence, len(before), count, start, bound), strict=True):
                columns[name].append(number)
            folds.append(end // SPAN * SPAN)
            parents = list(range(-1, count - 1)) if piece.parents is None else piece.parents
            depths: list[int] = []
            for parent in parents:
                depths.append(1 + (depths[parent] if parent >= 0 else -1))
            before += [start + parent for parent in parents]
            positions += [start + depth for depth in depths]
        for part in (*columns.values(), folds):
            part.append(0)
        tables = (*columns.values(), folds, before, positions)
        return StateRows(
            *(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in tables),
            max(map(len, (piece.tokens for piece in pieces))),
            trees=any(piece.parents is not None for piece in pieces),
        )

    def step(self, pieces: Sequence[Piece], prompt: bool = False, twin: bool = True) -> list[torch.Tensor]:
        """Runs a step by the kernels -> what the rows of each piece read. Asserts that it is near to what the
        plain equations read, if there is a `twin`.
        """
        rows = self._rows(pieces, prompt)
        flat = [token for piece in pieces for token in piece.tokens]
        tokens = torch.tensor(flat, dtype=torch.int64, device=DEVICE)
        wide = torch.cat((self.inputs[tokens], self.inputs[tokens]), 1)[:, : self.shape.inputs + 16]
        inputs, gates = wide[:, : self.shape.inputs], self.gates[tokens]
        out = self._computed(pieces, rows, inputs, gates, prompt)
        if twin:
            self._compare(rows, inputs, gates, out)
        folds = rows.folds.tolist()
        for piece, fold in zip(pieces, folds, strict=False):
            certain = len(piece.tokens) if piece.certain is None else piece.certain
            self.bounds[piece.sequence] = fold
            self.lengths[piece.sequence] += certain
        return list(out.split([len(piece.tokens) for piece in pieces]))

    def _computed(
        self,
        pieces: Sequence[Piece],
        rows: StateRows,
        inputs: torch.Tensor,
        gates: torch.Tensor,
        prompt: bool,
    ) -> torch.Tensor:
        """What the kernels make of the rows."""
        given = (inputs, gates, DeltaLayer(self.rule, self.layer, self.solved), rows)
        out = self._room(inputs)
        if isinstance(self.shape, ChannelShape):
            recur_by_row(*given, out)
        elif prompt:
            ends = [self.lengths[piece.sequence] + len(piece.tokens) for piece in pieces]
            chunks = Chunks.of([self.bounds[piece.sequence] for piece in pieces] + [0], [*ends, 0], DEVICE)
            recur_chunks(*given, chunks, out)
        else:
            recur_few(*given, out)
        return out

    def _room(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.new_zeros(len(inputs), self.shape.value_heads * self.shape.value_size)

    def mixed(self, tree: Piece, single: Piece, prompt: Piece) -> None:
        """Runs a step of three groups with a piece each, and asserts what `step` does."""
        pieces = (tree, single, prompt)
        every = [self._rows([piece], piece is prompt) for piece in pieces]
        firsts = itertools.accumulate((len(piece.tokens) for piece in pieces), initial=0)
        joined = {
            name: torch.cat([getattr(rows, name) for rows in every]) for name in ("before", "positions")
        }
        rows = [
            replace(rows, firsts=rows.firsts + first, **joined)
            for rows, first in zip(every, firsts, strict=False)
        ]
        chunks = Chunks.of(
            [self.bounds[prompt.sequence], 0], [self.lengths[prompt.sequence] + len(prompt.tokens), 0], DEVICE
        )
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens], device=DEVICE)
        inputs, gates = self.inputs[tokens], self.gates[tokens]
        layer = DeltaLayer(self.rule, self.layer, self.solved)
        groups = StateGroups(*rows, chunks.chunks, chunks.ends)
        out = recur(inputs, gates, layer, groups, self._room(inputs))
        found = out.split([len(piece.tokens) for piece in pieces])
        for one, piece, made in zip(every, pieces, found, strict=True):
            mine = torch.tensor(piece.tokens, device=DEVICE)
            self._compare(one, self.inputs[mine], self.gates[mine], made)

    def _compare(self, rows: StateRows, inputs: torch.Tensor, gates: torch.Tensor, out: torch.Tensor) -> None:
        other = self.twin.layers[0]
        expected = plain.recur(rows, other, self.plain, inputs, gates)
        _assert_near(out, expected)
        for slot, fold in zip(rows.slots.tolist()[:-1], rows.folds.tolist(), strict=False):
            if fold:
                _assert_near(self.layer.states[slot], other.states[slot])
                assert torch.equal(self.layer.tails[slot], other.tails[slot])
        for slot, start, count, fold in zip(
            *(each.tolist()[:-1] for each in (rows.slots, rows.starts, rows.counts, rows.folds)), strict=True
        ):
            places = torch.arange(fold, start + count) % other.inputs.shape[1]
            assert torch.equal(self.layer.inputs[slot, places], other.inputs[slot, places])
            assert torch.equal(self.layer.gates[slot, places], other.gates[slot, places])

    def accept(self, sequence: int, start: int, path: Sequence[int]) -> None:
        """Moves the rows of a path of nodes to `start`, `start` + 1, .., and makes them certain."""
        sources = torch.tensor(path, device=DEVICE) + start
        targets = torch.arange(start, start + len(path), device=DEVICE)
        slots = torch.full_like(sources, sequence)
        for store in (self.store, self.twin):
            store.move(slots, sources, targets)
        ring = self.solved.keys.shape[1]
        for rows in vars(self.solved).values():
            rows[slots, targets % ring] = rows[slots, sources % ring]
        self.lengths[sequence] = start + len(path)


def _assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """By the greatest number that is expected."""
    close = 1e-5 if expected.dtype == torch.float32 else 2e-2
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert float(error) < close
